"""Two runs of ``keepstep run``, and one folder of checkpoints."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest

from keepstep.checkpoint import lease
from keepstep.checkpoint.lease import LeaseFiles
from tests.agent.observe.watched import Watched
from tests.process.job import LOOP, Job, finish_file

pytestmark = pytest.mark.process


def job(folder: Path, shared: Path, **options: object) -> Job:
    flags = ["--set", f"checkpoint.dir={shared}", "--set", "rank.spares=0"]
    arguments = [str(finish_file(folder))]
    return Job(folder, LOOP, flags=flags, arguments=arguments, nproc=1, **options)  # type: ignore[arg-type]


def test_a_second_run_in_the_folder_of_a_living_one_ends_with_64_and_its_name(
    tmp_path: Path,
) -> None:
    shared = tmp_path / "checkpoints"
    with job(tmp_path / "one", shared) as first:
        first.running(nproc=1)
        with job(tmp_path / "two", shared) as second:
            assert second.wait() == 64
            assert "another job saves into the checkpoint folder: run " in second.err
            assert f"process {first.process.pid} on " in second.err
            assert second.events("rank.start") == []
        finish_file(tmp_path / "one").touch()
        assert first.wait() == 0
    newest = LeaseFiles(shared).newest()
    assert newest is not None and newest.lease is not None and newest.lease.released


def test_after_the_kill_of_a_run_the_next_one_starts_at_once(tmp_path: Path) -> None:
    shared = tmp_path / "checkpoints"
    with job(tmp_path / "one", shared) as first:
        first.running(nproc=1)
        first.signal(signal.SIGKILL)
    finish_file(tmp_path / "two").parent.mkdir()
    finish_file(tmp_path / "two").touch()
    with job(tmp_path / "two", shared) as second:
        assert second.wait() == 0
        assert "looking whether that still lives" not in second.err


def test_a_run_that_lost_its_folder_says_so(tmp_path: Path) -> None:
    shared = tmp_path / "checkpoints"
    with job(tmp_path / "one", shared) as first:
        first.running(nproc=1)
        theirs = msgspec.structs.replace(lease.of_process("theirs", 1, 1000.0), host="far")
        assert LeaseFiles(shared).create(2, theirs)
        first.until(lambda: "taken over by run 'theirs' on far" in first.err, "the loss is told")
        finish_file(tmp_path / "one").touch()
        assert first.wait() == 0


def test_under_another_launcher_a_run_that_lost_its_folder_ends(tmp_path: Path) -> None:
    with Watched(tmp_path, ["100000"]) as run:
        folder = run.run_dir / "checkpoints"
        run.until(lambda: LeaseFiles(folder).numbers() == [1], "the folder is held")
        theirs = msgspec.structs.replace(lease.of_process("theirs", 1, 1000.0), host="far")
        assert LeaseFiles(folder).create(2, theirs)
        assert run.wait() == 64
        assert "taken over by run 'theirs' on far" in run.ending
