"""What an exception of the user's script means."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from keepstep.errors import CheckpointCorrupt, CheckpointMismatch, SaveFailed, UsageError
from keepstep.faults.plan import FaultPlan
from keepstep.rank.failure import describe


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001 - any kind is described
        return raised


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), "exception"),
        (RuntimeError("CUDA error: an illegal memory access"), "exception"),
        (RuntimeError("my own request timed out"), "exception"),
        (RuntimeError("Connection closed by peer [10.0.0.1]:4711"), "peer_lost"),
        (RuntimeError("read: Connection reset by peer"), "peer_lost"),
        (RuntimeError("the round was aborted"), "peer_lost"),
        (ConnectionResetError("connection reset by peer"), "exception"),
        (CheckpointCorrupt("x"), "checkpoint"),
        (CheckpointMismatch("x"), "mismatch"),
        (SaveFailed("x"), "save"),
        (UsageError("the store: connection refused"), "usage"),
        (KeyboardInterrupt(), "exception"),
    ],
)
def test_the_kind_follows_from_type_and_text(error: BaseException, kind: str) -> None:
    assert describe(_raised(error)).kind == kind


def test_a_time_out_counts_as_a_collectives_only_inside_torch(tmp_path: Path) -> None:
    for folder, kind in (("torch", "timeout"), ("mine", "exception")):
        script = tmp_path / folder / "comm.py"
        script.parent.mkdir()
        script.write_text("raise RuntimeError('Timed out waiting 500ms for recv')\n")
        with pytest.raises(RuntimeError) as caught:
            runpy.run_path(str(script))
        assert describe(caught.value).failure == kind


def test_the_place_is_the_users_innermost_line_also_when_a_library_raised(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import json\n\ndef load():\n    json.loads('{')\n\nload()\n")
    with pytest.raises(ValueError) as caught:
        runpy.run_path(str(script), run_name="__main__")
    about = describe(caught.value)
    assert about.location == f"{script}:4"
    assert about.error.startswith("json.decoder.JSONDecodeError: ")
    assert about.stack.startswith("Traceback (most recent call last):\n")
    assert about.stack.rstrip().endswith(about.error)
    assert "line 6, in <module>" in about.stack
    assert "<frozen runpy>" not in about.stack


def test_frames_of_keepstep_are_not_the_users_business() -> None:
    with pytest.raises(UsageError) as caught:
        FaultPlan.parse(("nonsense",), world=1)
    about = describe(caught.value)
    assert about.location.rsplit(":", 1)[0] == __file__
    assert about.stack.count("  File ") == 1


def test_an_error_without_traceback_has_no_place() -> None:
    about = describe(ValueError("made, not raised"))
    assert about.location == ""
    assert about.stack == "Traceback (most recent call last):\nValueError: made, not raised\n"


def test_a_usage_error_ends_the_job_with_its_code_and_shows_no_traceback() -> None:
    found = describe(_raised(UsageError("no such backend")))
    assert (found.kind, found.failure, found.fatal, found.shown) == ("usage", "exception", 64, "")
    other = describe(_raised(ValueError("bad batch")))
    assert (other.failure, other.fatal) == ("exception", 0)
    assert other.shown == other.stack
