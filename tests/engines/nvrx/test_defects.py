"""Defects of NVRx that keepstep works around and that show without a second process.

Those that need ranks are in tests/training/test_nvrx_defects.py. A test that fails because NVRx
does right says that docs/nvrx.md and the work-around are to be looked at again.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib
from pathlib import Path
from typing import Any, Optional

import pytest

from keepstep.engines.nvrx import library
from keepstep.errors import KeepstepError, SaveFailed
from tests.engines.nvrx.standins import RankMonitorClient06

_ROOT = "nvidia_resiliency_ext"


def _module(name: str) -> Any:
    return importlib.import_module(f"{_ROOT}.{name}")


def _state(error: BaseException) -> Any:
    state = _module("inprocess.state").State(rank=0, world_size=1)
    state.fn_exception = error
    return state


class TwoArguments(Exception):
    """An exception that ``copy`` cannot rebuild from ``args``."""

    def __init__(self, wanted: int, found: int) -> None:
        super().__init__(f"wanted {wanted}, found {found}")


def test_the_state_cannot_be_shown_to_hooks_where_the_exception_cannot_be_copied() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        _state(TwoArguments(1, 2)).freeze()


@pytest.mark.parametrize(
    "error", [KeepstepError("what", done="done", advice="advice"), SaveFailed("what")]
)
def test_errors_of_keepstep_can_be_copied_as_nvrx_does(error: KeepstepError) -> None:
    frozen = _state(error).freeze()
    assert type(frozen.fn_exception) is type(error)
    assert str(frozen.fn_exception) == str(error) == str(copy.deepcopy(error))


def test_a_frozen_state_has_the_fields_that_hooks_read() -> None:
    names = {field.name for field in dataclasses.fields(_module("inprocess.state").FrozenState)}
    assert names == {
        "rank",
        "world_size",
        "active_rank",
        "active_world_size",
        "initial_rank",
        "initial_world_size",
        "iteration",
        "mode",
        "fn_exception",
    }


@pytest.mark.parametrize("annotation", ["CallWrapper", "int", list[int]])
def test_the_wrapper_cannot_call_a_function_with_such_an_annotation(annotation: object) -> None:
    call_wrapper = library.inprocess().CallWrapper

    def train(steps):  # type: ignore[no-untyped-def]
        return steps

    train.__annotations__ = {"steps": annotation}
    with pytest.raises(TypeError):
        _module("inprocess.param_utils").substitute_param_value(
            train, (1,), {}, {call_wrapper: object()}
        )


def test_an_annotation_that_is_the_class_or_may_be_none_is_taken() -> None:
    call_wrapper = library.inprocess().CallWrapper
    for annotation in (call_wrapper, Optional[call_wrapper]):  # noqa: UP045 - both are written

        def train(call):  # type: ignore[no-untyped-def]
            return call

        train.__annotations__ = {"call": annotation}
        given = _module("inprocess.param_utils").substitute_param_value(
            train, (None,), {}, {call_wrapper: "it"}
        )
        assert given == (("it",), {})


def test_a_configuration_file_without_its_section_is_passed_over_without_a_word(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ft.yaml"
    path.write_text("fault-tolerance:\n  rank_heartbeat_timeout: 5\n", encoding="utf-8")
    config = _module("fault_tolerance.config").FaultToleranceConfig
    arguments = argparse.Namespace(ft_cfg_path=str(path), ft_log_level="warning")
    assert config.from_args(arguments).rank_heartbeat_timeout != 5


def test_an_unknown_key_of_a_configuration_file_is_passed_over_without_a_word(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ft.yaml"
    path.write_text("fault_tolerance:\n  rank_hearbeat_timeout: 5\n", encoding="utf-8")
    config = _module("fault_tolerance.config").FaultToleranceConfig
    assert config.from_yaml_file(str(path)).rank_heartbeat_timeout != 5


def test_closing_all_sections_closes_none_in_newer_releases() -> None:
    client = RankMonitorClient06(["section"])
    client.init_workload_monitoring()
    client.start_section("section")
    client.end_all_sections()
    assert client.sent == ["init", "open section"]
