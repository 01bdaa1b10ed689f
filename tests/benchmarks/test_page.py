"""The tables of the comparison and their place in its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.outcomes import Outcome
from benchmarks.page import BEGIN, END, Cell

GOOD = Outcome(
    fired=True,
    found_s=0.5,
    recovered_s=4.0,
    world=2,
    steps_lost=3,
    kept=True,
    attempts=2,
    digest="same",
    waited_s=6.0,
    code=0,
    late=False,
    last="",
)
LATE = Outcome(
    fired=True,
    found_s=None,
    recovered_s=None,
    world=None,
    steps_lost=None,
    kept=None,
    attempts=1,
    digest=None,
    waited_s=60.0,
    code=None,
    late=True,
    last="",
)


def changed(outcome: Outcome, **values: object) -> Outcome:
    return Outcome(**{**outcome.__dict__, **values})


def row(*outcomes: Outcome) -> dict[str, str]:
    cell = Cell("system", 2, 60.0, "same", outcomes)
    return dict(zip(page.COLUMNS, cell.row(), strict=True))


def test_one_run_is_shown_as_it_is() -> None:
    assert row(GOOD) == {
        "system": "system",
        "recovered": "1 of 1",
        "next step of all ranks, s": "4.00",
        "found, s": "0.50",
        "steps lost": "3",
        "full world back": "yes",
        "other ranks' processes kept": "yes",
        "weights equal": "yes",
    }


def test_several_runs_are_shown_with_median_and_range() -> None:
    slow = changed(GOOD, recovered_s=9.0, steps_lost=8, kept=False, digest="other")
    shown = row(GOOD, slow, changed(GOOD, recovered_s=5.0))
    assert shown["recovered"] == "3 of 3"
    assert shown["next step of all ranks, s"] == "5.00 (4.00-9.00)"
    assert shown["steps lost"] == "3 to 8"
    assert shown["other ranks' processes kept"] == shown["weights equal"] == "2 of 3"


def test_what_did_not_recover_is_told_with_the_reason() -> None:
    assert row(LATE)["recovered"] == "0 of 1; not in 60 s"
    assert set(list(row(LATE).values())[2:]) == {"-"}
    lost = changed(LATE, code=1, late=False, waited_s=12.3)
    assert row(GOOD, lost, LATE)["recovered"] == "1 of 3; job lost after 12 s; not in 60 s"
    unborn = changed(lost, fired=False)
    assert row(unborn)["recovered"] == "0 of 1; did not come so far as the fault"


def test_a_smaller_world_is_told_with_its_size() -> None:
    assert row(changed(GOOD, world=1))["full world back"] == "no (world 1)"
    assert row(GOOD, changed(GOOD, world=1))["full world back"] == "1 of 2 (world 1)"


def test_a_job_that_recovered_but_did_not_end_is_told() -> None:
    assert row(changed(GOOD, digest=None))["weights equal"] == "1 did not end"
    assert row(GOOD, changed(GOOD, digest=None))["weights equal"] == "yes, 1 did not end"


def test_nothing_is_said_of_weights_that_there_is_nothing_to_compare_with() -> None:
    assert Cell("system", 2, 60.0, None, [GOOD]).equal() == "-"


def test_no_run_at_all_is_a_row_of_dashes() -> None:
    assert row()["recovered"] == "0 of 0"


def test_only_what_stands_between_the_markers_is_replaced() -> None:
    before = f"# Title\n\n{BEGIN}\nold\n{END}\n\nText.\n"
    once = page.replaced(before, "new")
    assert once == f"# Title\n\n{BEGIN}\n\nnew\n\n{END}\n\nText.\n"
    assert page.replaced(once, "new") == once


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_page_without_its_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        page.replaced(text, "new")


def test_a_page_that_is_refused_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("kept", encoding="utf-8")
    with pytest.raises(ValueError, match="once each"):
        page.rewrite(path, lambda text: page.replaced(text, "new"))
    assert path.read_text(encoding="utf-8") == "kept"
    assert list(tmp_path.iterdir()) == [path]


def test_the_tables_name_machine_command_settings_and_faults() -> None:
    cells = {"A fault": [Cell("system", 2, 60.0, "same", [GOOD])]}
    text = page.tables({"date": "today", "cores": 2}, "python -m x", [["s", "w", "0.1"]], cells)
    assert text.startswith(
        "date today; cores 2.\n\n```\npython -m x\n```\n\n| system | what was set"
    )
    assert "### A fault\n\n| system | recovered |" in text
    assert "| system | 1 of 1 | 4.00 |" in text


def test_the_page_of_the_comparison_has_its_markers() -> None:
    path = Path(__file__).parents[2] / "docs" / "comparison.md"
    assert page.replaced(path.read_text(encoding="utf-8"), "new")
