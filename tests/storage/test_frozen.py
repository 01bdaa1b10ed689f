"""Frozen storage: whoever touches it is blocked in the kernel, and no signal ends it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keepstep.checkpoint import catalog
from keepstep.clock import SYSTEM
from keepstep.rank.local_writer import LocalStaging
from tests.checkpoint.shards import image, make_version
from tests.process.job import wait_until
from tests.storage.disks import Disk, ext4
from tests.storage.scripts import Saver
from tests.training.gated_run import Launch, undisturbed

pytestmark = [pytest.mark.training, pytest.mark.needs("root", "loop_mount")]
STALL = ("--set", "checkpoint.stall_s=0.5")


def test_training_goes_on_the_operator_is_told_and_after_the_thaw_saves_go_on(
    tmp_path: Path,
) -> None:
    with ext4(tmp_path) as disk:
        root = disk.path / "checkpoints"
        flags = [*STALL, "--set", f"checkpoint.dir={root}", "--set", "checkpoint.when_busy=skip"]
        with Launch(tmp_path, flags=flags, closed=["step-8", "step-26"]) as job:
            job.at("step-8")
            job.committed_is(5)
            disk.freeze()
            job.open("step-8")
            job.at("step-26")  # training has gone on
            job.until(lambda: job.data("storage.stalled"), "the stall is told")
            (stalled,) = job.data("storage.stalled")
            writer = job.helper("checkpoint.writer_process")
            assert (stalled["process"], stalled["pid"]) == ("writer", writer)
            assert stalled["state"] == "D"
            assert job.said("storage has taken nothing for", "save of step 10", f"{writer}") == 1
            assert job.said("state D") == 1
            skipped = [one.step for one in job.events("checkpoint.skip")]
            assert skipped == [20, 25]
            assert job.commits() == [5]
            disk.thaw()
            job.committed_is(15)
            job.open("step-26")
            assert job.end() == 0, job.ending
        # Both that waited are written at once: either may be the first.
        assert sorted(job.commits()) == [5, 10, 15, 30]
        assert [one["process"] for one in job.data("storage.moves")] == ["writer"]
        assert job.said("storage goes on after") == 1
        assert job.digest == undisturbed()[0]
        assert catalog.committed(root)[0].step == 30


@pytest.mark.full
def test_ranks_that_wait_for_frozen_storage_do_not_hang(tmp_path: Path) -> None:
    with ext4(tmp_path) as disk:
        flags = [*STALL, "--set", f"checkpoint.dir={disk.path / 'checkpoints'}"]
        flags += ["--set", "checkpoint.when_busy=wait", "--set", "heartbeat.min_limit_s=1"]
        with Launch(tmp_path, flags=flags, closed=["step-8"]) as job:
            job.at("step-8")
            job.committed_is(5)
            disk.freeze()
            job.open("step-8")
            # The saves of steps 10 and 15 take both slots; that of step 20 waits.
            job.until(lambda: job.steps(1).get(0, 0) >= 19, "the save of step 20 is due")
            begun = SYSTEM.mono()
            # Ten times as long as any rank may be silent: a time that must pass without an event.
            job.until(lambda: SYSTEM.mono() - begun > 10.0, "time has passed")
            disk.thaw()
            assert job.end() == 0, job.ending
        assert job.causes() == []
        assert job.data("rank.hung") == []
        assert sorted(job.commits()) == [5, 10, 15, 20, 25, 30]


def test_a_run_that_cannot_save_its_end_ends_all_the_same_and_says_so(tmp_path: Path) -> None:
    with ext4(tmp_path) as disk:
        root = disk.path / "checkpoints"
        flags = [*STALL, "--set", f"checkpoint.dir={root}", "--set", "checkpoint.write_limit_s=3"]
        with Launch(tmp_path, steps=12, flags=flags, closed=["step-8"]) as job:
            job.at("step-8")
            job.committed_is(5)
            disk.freeze()
            job.open("step-8")
            began = SYSTEM.mono()
            assert job.process.wait(120.0) == 65, job.ending
            assert SYSTEM.mono() - began < 100.0
            assert "the last save (step 12) did not commit" in job.ending
            assert job.said("writer", "state D", "left behind") == 1
            _thawed(disk, job)
        assert [one.step for one in catalog.committed(root)][-1] == 5


@pytest.mark.full
def test_a_run_folder_that_freezes_costs_events_and_not_the_run(tmp_path: Path) -> None:
    with ext4(tmp_path) as disk:
        run_dir = disk.path / "run"
        flags = [*STALL, "--log-dir", str(tmp_path / "logs")]
        flags += ["--set", "checkpoint.write_limit_s=3"]
        (tmp_path / "logs").mkdir()
        launch = Launch(tmp_path, steps=12, flags=flags, closed=["step-8"], run_dir=run_dir)
        with launch as job:
            job.at("step-8")
            job.committed_is(5)
            disk.freeze()
            job.open("step-8")
            assert job.process.wait(120.0) == 65, job.ending
            assert "the last save (step 12) did not commit" in job.ending
            assert job.said("storage did not take the last events") == 1
            _thawed(disk, job)


@pytest.mark.parametrize("inside", ["run", "checkpoints"])
def test_a_run_on_frozen_storage_is_refused_and_nothing_is_started(
    tmp_path: Path, inside: str
) -> None:
    with ext4(tmp_path) as disk:
        run_dir = disk.path / "run" if inside == "run" else tmp_path / "run"
        checkpoints = run_dir / "checkpoints" if inside == "run" else disk.path / "checkpoints"
        flags = ["--set", "checkpoint.stall_s=2", "--set", f"checkpoint.dir={checkpoints}"]
        disk.freeze()
        with Launch(tmp_path, flags=flags, run_dir=run_dir) as job:
            code = job.process.wait(60.0)
            assert code == (64 if inside == "run" else 65), job.err
            assert re.search("no answer from (its disk|the disk of .*/run) in 2 s", job.err)
            _thawed(disk, job)


def _thawed(disk: Disk, job: Launch) -> None:
    """What was left behind ends as soon as storage lets it."""
    assert job.pids()
    disk.thaw()
    wait_until(lambda: not job.pids(), "everything has ended")


def test_the_end_of_a_script_is_not_held_up_by_frozen_storage(tmp_path: Path) -> None:
    with ext4(tmp_path) as disk, Saver(disk.path / "checkpoints") as script:
        assert script.ask("save 1") == "ok"
        assert script.ask("finalize 30") == "ok"
        disk.freeze()
        assert script.ask("save 2") == "ok"
        error = script.ask("finalize 1")
        assert error.startswith("SaveFailed the save of step 2 is not written after 1 s")
        assert script.ask("abort") == "ok"
        assert script.end(60.0)[0] == 0
        disk.thaw()


def test_a_writer_that_storage_blocks_is_named_and_so_is_the_end_of_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    version = make_version(3, world=1)
    with ext4(tmp_path) as disk:
        staging = LocalStaging(disk.path / "checkpoints", rank=0, keep_last=3, stall_s=0.3)
        data = image(version, 0)
        slot = staging.acquire(len(data), 30.0)
        slot.buffer[: len(data)] = data
        disk.freeze()
        pending = staging.submit(slot, len(data), version)
        said = ""

        def told(words: str) -> bool:
            nonlocal said
            said += capfd.readouterr().err
            return words in said

        wait_until(lambda: told("storage has taken nothing for"), "the stall is told")
        assert f"save of step 3, writer process {staging.writer_pid} of rank 0, state D" in said
        disk.thaw()
        pending.wait(30.0)
        wait_until(lambda: told("storage goes on after"), "the end of the stall is told")
        staging.close()
