"""What is said of NVRx when it is chosen: nothing false, nothing twice, nothing for native."""

from __future__ import annotations

import pytest

from keepstep.config import EngineSettings
from keepstep.policy.differences import differences


def clauses(**parts: str) -> list[str]:
    settings = EngineSettings(**parts)  # type: ignore[arg-type]
    return [one.clause for one in differences(settings.parts)]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, []),
        ({"checkpoint": "nvrx"}, []),
        ({"name": "nvrx"}, ["survivors-keep-process", "learned-limits", "long-call"]),
        ({"launcher": "nvrx"}, ["restart-in-process", "survivors-keep-process"]),
        (
            {"restart": "nvrx"},
            ["survivors-keep-process", "restarts-in-table", "learned-limits", "long-call"],
        ),
    ],
)
def test_only_what_the_chosen_parts_cannot_do_is_named(
    parts: dict[str, str], expected: list[str]
) -> None:
    assert clauses(**parts) == expected


def test_every_difference_is_a_clause_and_a_sentence_without_an_end() -> None:
    for parts in (EngineSettings(name="nvrx").parts, EngineSettings(launcher="nvrx").parts):
        for one in differences(parts):
            assert one.clause.replace("-", "").isalpha() and one.clause.islower()
            assert len(one.text) > 20 and not one.text.endswith(".")
