"""A coordinator that does not answer, as when storage blocks it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.process.job import LOOP, Job, finish_file

pytestmark = pytest.mark.process


def job(folder: Path, *flags: str) -> Job:
    arguments = [str(finish_file(folder))]
    limits = ["--set", "checkpoint.stall_s=0.5", "--set", "rank.spares=0"]
    return Job(folder, LOOP, flags=[*limits, *flags], arguments=arguments, nproc=1)


def test_a_blocked_coordinator_is_told_of_and_the_run_goes_on_when_it_answers(
    tmp_path: Path,
) -> None:
    with job(tmp_path) as run:
        run.running(nproc=1)
        coordinator = run.helper("coordinator")
        os.kill(coordinator, signal.SIGSTOP)
        told = f"the coordinator, process {coordinator}, state T, has not answered"
        run.until(lambda: told in run.err, "it is told")
        (stalled,) = run.until(lambda: run.data("storage.stalled"), "there is an event")
        assert (stalled["process"], stalled["pid"]) == ("coordinator", coordinator)
        os.kill(coordinator, signal.SIGCONT)
        run.until(lambda: run.data("storage.moves"), "its end is told")
        finish_file(tmp_path).touch()
        assert run.wait() == 0


@pytest.mark.full
def test_a_coordinator_that_stays_blocked_does_not_hold_up_the_end_for_ever(tmp_path: Path) -> None:
    with job(tmp_path, "--set", "checkpoint.write_limit_s=2") as run:
        run.running(nproc=1)
        coordinator = run.helper("coordinator")
        os.kill(coordinator, signal.SIGSTOP)
        assert run.wait(120.0) == 65
        assert f"the coordinator, process {coordinator}, state T, has not answered" in run.ending
        assert "(checkpoint.write_limit_s)" in run.ending
