"""Disks that are full, fill up half-way, or turn read-only."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.checkpoint import catalog, verify
from tests.storage.disks import MIB, Disk, ext4
from tests.storage.scripts import Saver
from tests.training.gated_run import Launch

pytestmark = [pytest.mark.training, pytest.mark.needs("root", "loop_mount")]
STATE = 8 * MIB


def assert_clean(disk: Disk, *steps: int) -> None:
    """These steps are there and good, and nothing of any other."""
    root = disk.path / "checkpoints"
    assert [one.step for one in catalog.committed(root)] == list(steps)
    for one in catalog.committed(root):
        assert verify.verify(root, one.folder) == []
    assert not list(root.rglob("*.tmp"))
    assert not catalog.unfinished(root)


@pytest.mark.parametrize("left", [0, 3 * MIB], ids=["full", "full half-way"])
def test_a_save_onto_a_full_disk_fails_by_name_and_the_next_one_with_space_is_good(
    tmp_path: Path, left: int
) -> None:
    with ext4(tmp_path) as disk, Saver(disk.path / "checkpoints", STATE) as script:
        assert script.ask("save 1") == "ok"
        assert script.ask("finalize 30") == "ok"
        disk.fill(left)
        assert script.ask("save 2") == "ok"
        error = script.ask("finalize 30")
        assert error.startswith("SaveFailed the save of step 2 failed")
        assert "No space left on device" in error and "bytes are free" in error
        assert script.ask("restore") == "ok 1 1"
        disk.empty()
        assert script.ask("save 3") == "ok"
        assert script.ask("finalize 30") == "ok"
        assert_clean(disk, 3, 1)
        assert script.end()[0] == 0


def test_a_last_save_that_has_no_room_gives_a_non_zero_exit_code(tmp_path: Path) -> None:
    with ext4(tmp_path) as disk, Saver(disk.path / "checkpoints", STATE) as script:
        assert script.ask("save 1") == "ok"
        assert script.ask("finalize 30") == "ok"
        disk.fill(3 * MIB)
        assert script.ask("save 2") == "ok"
        code, told, _ = script.end()
        assert code == 65
        assert "No space left on device" in told


def test_a_file_system_that_turns_read_only_fails_saves_until_it_is_writable_again(
    tmp_path: Path,
) -> None:
    with ext4(tmp_path) as disk, Saver(disk.path / "checkpoints", STATE) as script:
        assert script.ask("save 1") == "ok"
        assert script.ask("finalize 30") == "ok"
        disk.read_only()
        assert script.ask("save 2") == "ok"
        error = script.ask("finalize 30")
        assert error.startswith("SaveFailed") and "Read-only file system" in error
        assert script.ask("restore") == "ok 1 1"
        disk.read_only(False)
        assert script.ask("save 3") == "ok"
        assert script.ask("finalize 30") == "ok"
        assert_clean(disk, 3, 1)
        assert script.end()[0] == 0


def test_a_run_goes_on_past_a_full_disk_says_so_and_saves_when_there_is_room(
    tmp_path: Path,
) -> None:
    with ext4(tmp_path) as disk:
        flags = ["--set", f"checkpoint.dir={disk.path / 'checkpoints'}"]
        flags += ["--set", "checkpoint.retries=0"]
        with Launch(tmp_path, flags=flags, closed=["step-8", "step-14"]) as job:
            job.at("step-8")
            job.committed_is(5)
            disk.fill(MIB)
            job.open("step-8")
            job.at("step-14")
            job.until(lambda: job.data("checkpoint.fail"), "the save of step 10 fails")
            disk.empty()
            job.open("step-14")
            assert job.end() == 0, job.ending
        assert [one.step for one in job.events("checkpoint.fail")] == [10]
        assert job.said("checkpoint of step 10 was not committed", "No space left on device") == 1
        assert 10 not in job.commits() and job.commits()[-1] == 30
        root = disk.path / "checkpoints"
        assert [one.step for one in catalog.committed(root)] == [30, 25, 20]
        assert not list(root.rglob("*.tmp"))
