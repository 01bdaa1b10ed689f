from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.checkpoint import catalog, layout
from tests.checkpoint.shards import make_version, save
from tests.cli.checkpoint.commands import run_command as _run


def _steps(run: Path) -> list[int]:
    return [info.step for info in catalog.committed(run / "checkpoints")]


def test_a_pinned_checkpoint_stays_pinned_until_it_is_unpinned(run: Path) -> None:
    result = _run("pin", run, "5", "10", "--reason", "for the paper")
    assert result.exit_code == 0
    assert result.stdout == "step-00000005: pinned\nstep-00000010: pinned\n"
    assert _run("pin", run, "5").stdout == "step-00000005: was pinned already\n"
    shown = _run("ls", run).stdout
    assert "good, pinned" in shown
    assert "step-00000005 is pinned: for the paper" in shown
    assert _run("unpin", run, "step-00000005").stdout == "step-00000005: no longer pinned\n"
    assert _run("unpin", run, "5").stdout == "step-00000005: was not pinned\n"
    assert _run("verify", run).exit_code == 0


def test_rm_removes_what_is_named_and_says_how_much(run: Path) -> None:
    result = _run("rm", run, "5", "--yes")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("removed 1 checkpoint (10.")
    assert result.stdout.endswith("KiB): step-00000005\n")
    assert _steps(run) == [10]
    assert not (run / "checkpoints/step-00000005").exists()


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (["5", "10"], "step-00000010 is the last good checkpoint"),
        (["5"], "step-00000005 is pinned"),
        (["15"], "step-00000015 was never committed: a save may be in flight"),
    ],
)
def test_rm_refuses_what_may_be_needed_unless_forced(run: Path, steps: list[str], why: str) -> None:
    if len(steps) == 1:
        _run("pin", run, "5")
    result = _run("rm", run, *steps, "--yes")
    assert result.exit_code == 64
    assert why in result.stderr
    assert "Nothing was removed" in result.stderr
    assert _steps(run) == [10, 5]
    assert _run("rm", run, *steps, "--yes", "--force").exit_code == 0
    gone = {int(step) for step in steps}
    assert set(_steps(run)) == {5, 10} - gone
    assert {layout.parse_folder(name) for name in gone_folders(run, gone)} == set()


def gone_folders(run: Path, steps: set[int]) -> list[str]:
    """Folders of these steps that are still there."""
    names = layout.list_folders(run / "checkpoints")
    return [name for name in names if int(name[5:13]) in steps]


def test_a_damaged_newer_one_does_not_make_the_last_good_one_removable(run: Path) -> None:
    (run / "checkpoints/step-00000010" / layout.shard_name(0)).unlink()
    result = _run("rm", run, "5", "-y")
    assert result.exit_code == 64
    assert "step-00000005 is the last good checkpoint" in result.stderr
    assert _run("rm", run, "10", "-y").exit_code == 0


def test_rm_removes_nothing_without_an_answer(run: Path) -> None:
    result = _run("rm", run, "5")
    assert result.exit_code == 64
    assert "its input is no terminal. Nothing was changed. Give --yes." in result.stderr
    assert _steps(run) == [10, 5]


def test_a_step_with_two_folders_must_be_named_by_the_folder(run: Path) -> None:
    save(run / "checkpoints", make_version(10, round=11))
    result = _run("rm", run, "10", "-y")
    assert result.exit_code == 64
    assert "step 10 has 2 folders: step-00000010, step-00000010.t1r11" in result.stderr
    assert _run("rm", run, "step-00000010", "-y").exit_code == 0
    assert "step-00000010.t1r11" in _run("ls", run).stdout


@pytest.mark.parametrize("command", ["rm", "pin", "unpin"])
def test_a_step_that_is_not_there_is_told(run: Path, command: str) -> None:
    result = _run(command, run, "5", "77")
    assert result.exit_code == 65
    assert "there is no checkpoint of step 77" in result.stderr
    assert _steps(run) == [10, 5]
