"""Two real processes and one folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from keepstep.checkpoint import lease
from keepstep.checkpoint.lease import LeaseFiles
from keepstep.checkpoint.lease_keeper import LeaseKeeper
from keepstep.errors import CheckpointNotWritable, FolderInUse
from tests.process.job import wait_until

pytestmark = pytest.mark.process
LIMIT_S = 30.0


@contextmanager
def job(root: Path, run: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.storage.leases", str(root), run],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def keeper(root: Path, run: str = "mine", relieves: bool = False) -> LeaseKeeper:
    return LeaseKeeper(
        root,
        run,
        relieves=relieves,
        say=lambda text: None,
        expiry_s=1.0,
        beat_s=0.1,
        poll_s=0.05,
    )


def test_of_two_jobs_the_second_is_refused_with_the_firsts_name(tmp_path: Path) -> None:
    with job(tmp_path, "first") as first:
        assert line(first) == "held"
        with job(tmp_path, "second") as second:
            text = line(second)
            assert "another job saves into the checkpoint folder: run first" in text
            assert f"process {first.pid} on " in text
            assert second.wait(LIMIT_S) == 64


def test_a_job_that_lets_go_makes_room_at_once(tmp_path: Path) -> None:
    with job(tmp_path, "first") as first:
        assert line(first) == "held"
        first.communicate()
        newest = LeaseFiles(tmp_path).newest()
        assert newest is not None and newest.lease is not None and newest.lease.released
        with job(tmp_path, "second") as second:
            assert line(second) == "held"


def test_a_killed_job_makes_room_at_once_though_its_lease_never_expires(tmp_path: Path) -> None:
    with job(tmp_path, "first") as first:
        assert line(first) == "held"
        first.send_signal(signal.SIGKILL)
        first.wait(LIMIT_S)
        mine = LeaseKeeper(tmp_path, "mine", relieves=False, say=pytest.fail, expiry_s=1e9)
        assert mine.claim() == 2
        mine.close()


def test_the_holder_of_a_killed_job_ends(tmp_path: Path) -> None:
    with job(tmp_path, "first") as first:
        assert line(first) == "held"
        first.send_signal(signal.SIGKILL)
        first.wait(LIMIT_S)

    def released() -> bool:
        newest = LeaseFiles(tmp_path).newest()
        return newest is not None and newest.lease is not None and newest.lease.released

    wait_until(released, "the lease is released", LIMIT_S)


def _of_another_machine(root: Path, run: str) -> LeaseFiles:
    files = LeaseFiles(root)
    theirs = msgspec.structs.replace(lease.of_process(run, 1, 1000.0), boot="another", host="far")
    assert files.create(1, theirs)
    return files


def test_a_silent_holder_of_another_machine_is_waited_for_and_then_relieved(tmp_path: Path) -> None:
    _of_another_machine(tmp_path, "theirs")
    said: list[str] = []
    mine = LeaseKeeper(
        tmp_path, "mine", relieves=False, say=said.append, expiry_s=0.5, beat_s=0.1, poll_s=0.05
    )
    assert mine.claim() == 2
    mine.close()
    (text,) = said
    assert "run 'theirs' (process 1 on far" in text


def test_a_living_holder_of_another_machine_is_in_the_way(tmp_path: Path) -> None:
    files = _of_another_machine(tmp_path, "theirs")
    seen = files.newest()
    assert seen is not None and seen.lease is not None
    theirs = seen.lease

    def renew(text: str) -> None:
        files.write(1, msgspec.structs.replace(theirs, beat=1))

    mine = LeaseKeeper(
        tmp_path, "mine", relieves=False, say=renew, expiry_s=1e9, beat_s=0.1, poll_s=0.05
    )
    with pytest.raises(FolderInUse, match="run theirs, process 1 on far"):
        mine.claim()


def test_a_holder_whose_folder_was_taken_over_hears_of_it(tmp_path: Path) -> None:
    mine = keeper(tmp_path)
    assert mine.claim() == 1
    assert mine.lost() == ""
    theirs = msgspec.structs.replace(lease.of_process("theirs", 1, 1000.0), host="far")
    LeaseFiles(tmp_path).create(2, theirs)
    assert "taken over by run 'theirs' on far" in wait_until(mine.lost, "the loss is told")
    mine.close()
    newest = LeaseFiles(tmp_path).newest()
    assert newest is not None and newest.lease == theirs


def test_a_killed_holder_is_replaced_and_goes_on_with_the_same_lease(tmp_path: Path) -> None:
    mine = keeper(tmp_path)
    assert mine.claim() == 1
    (holder,) = (
        child.pid
        for child in psutil.Process().children()
        if "keepstep.checkpoint.lease_process" in child.cmdline()
    )
    os.kill(holder, signal.SIGKILL)

    def renewed() -> bool:
        assert mine.lost() == ""
        newest = LeaseFiles(tmp_path).newest()
        return newest is not None and newest.lease is not None and newest.lease.beat > 10**6

    wait_until(renewed, "the lease is renewed again")
    assert LeaseFiles(tmp_path).numbers() == [1]
    mine.close()
    newest = LeaseFiles(tmp_path).newest()
    assert newest is not None and newest.lease is not None and newest.lease.released


def test_the_same_process_can_claim_again(tmp_path: Path) -> None:
    first, second = keeper(tmp_path), keeper(tmp_path)
    assert (first.claim(), second.claim()) == (1, 2)
    second.close()
    first.close()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointNotWritable, match=r"(?s)lease.*Not a directory"):
        keeper(tmp_path / "file" / "checkpoints").claim()
