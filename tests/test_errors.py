from __future__ import annotations

import copy
import difflib
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep import errors
from keepstep.errors import ExitCode, KeepstepError, RestartSignal
from tests.golden.messages import CLASSES, GOLDEN, raised, sample
from tests.golden.messages import render as render_golden

EXIT_CODES = {
    "KeepstepError": 70,
    "UsageError": 64,
    "EngineUnavailable": 64,
    "NotEnoughMemory": 64,
    "FolderInUse": 64,
    "CheckpointError": 65,
    "CheckpointNotFound": 65,
    "CheckpointCorrupt": 65,
    "CheckpointMismatch": 65,
    "CheckpointNotWritable": 65,
    "SaveFailed": 65,
    "InternalError": 70,
    "RestartsExhausted": 76,
    "NodeUnhealthy": 77,
    "ScriptFailed": 78,
}


def test_the_four_parts_come_in_order() -> None:
    error = KeepstepError("2 ranks died", where="node 1", done="They were replaced", advice="Wait")
    assert str(error) == "2 ranks died (node 1). They were replaced. Wait."
    assert (error.what, error.where, error.done, error.advice) == (
        "2 ranks died",
        "node 1",
        "They were replaced",
        "Wait",
    )


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "2 ranks died."),
        ({"where": "node 1"}, "2 ranks died (node 1)."),
        ({"advice": "Wait."}, "2 ranks died. Wait."),
        ({"done": "Nothing was done.", "advice": "Wait"}, "2 ranks died. Nothing was done. Wait."),
    ],
)
def test_parts_that_are_missing_leave_no_trace(parts: dict[str, str], text: str) -> None:
    assert str(KeepstepError("2 ranks died", **parts)) == text


def test_every_class_has_its_exit_code() -> None:
    assert {name: int(kind.exit_code) for name, kind in CLASSES.items()} == EXIT_CODES


def test_exit_codes_are_numbers_that_other_systems_rely_on() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "OK": 0,
        "NEGATIVE": 1,
        "USAGE": 64,
        "CHECKPOINT": 65,
        "INTERNAL": 70,
        "STOPPED_ON_NOTICE": 75,
        "RESTARTS_EXHAUSTED": 76,
        "NODE_UNHEALTHY": 77,
        "SCRIPT_FAILED": 78,
    }


@pytest.mark.parametrize("kind", CLASSES.values(), ids=list(CLASSES))
def test_an_error_that_is_copied_to_another_process_keeps_its_parts(
    kind: type[KeepstepError],
) -> None:
    error = sample(kind)
    twin = copy.deepcopy(error)
    assert type(twin) is kind
    assert str(twin) == str(error)
    assert (twin.what, twin.where, twin.done, twin.advice) == (
        error.what,
        error.where,
        error.done,
        error.advice,
    )


def test_every_class_is_documented_and_in_the_tree_at_the_top() -> None:
    for kind in CLASSES.values():
        assert kind.__doc__
        assert kind.__name__ in (errors.__doc__ or "")


def test_code_that_catches_exceptions_does_not_swallow_a_restart() -> None:
    assert not issubclass(RestartSignal, Exception)
    assert issubclass(RestartSignal, BaseException)


# --- the golden file ------------------------------------------------------------------------------


def test_every_sentence_is_the_one_in_the_golden_file() -> None:
    wanted, found = GOLDEN.read_text(encoding="utf-8"), render_golden()
    change = difflib.unified_diff(wanted.splitlines(), found.splitlines(), lineterm="", n=1)
    hint = "if it is meant: python -m tests.golden.messages --write\n"
    assert wanted == found, hint + "\n".join(change)


def test_every_sentence_says_what_happened_and_ends_once() -> None:
    for place, error in raised():
        text = str(error)
        assert error.what.strip("<>. "), place
        assert text.endswith(".") and not text.endswith(".."), f"{place}: {text}"
        assert "\n" not in text, f"{place}: {text}"


def test_the_golden_file_is_written_only_with_its_flag() -> None:
    before = GOLDEN.read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.messages"],
        cwd=Path(__file__).parents[1],
        env={"PYTHONPATH": str(Path(errors.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "--write" in done.stderr
    assert GOLDEN.read_bytes() == before
