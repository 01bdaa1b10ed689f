"""SIGTERM and Ctrl-C in every phase: one checkpoint of one step by all ranks, exit code 75, and the
next launch goes on exactly there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.training.gated_run import Launch, undisturbed


def _goes_on(tmp_path: Path, after: int) -> None:
    with Launch(tmp_path, "next") as job:
        assert job.end() == 0, job.ending
    assert job.resumes() == [after]
    assert job.digest == undisturbed()[0]


def _assert_stopped(job: Launch, name: str, step: int) -> None:
    """All ranks completed ``step`` and no more, committed it and left with 75."""
    assert job.commits()[-1:] == [step]
    assert job.ending.startswith(f"keepstep: stopped on {name}; step {step} is committed")
    for rank in (0, 1):
        done = [event.step or 0 for event in job.events("step.end") if event.rank == rank]
        assert done[-1] == step
    assert [data["code"] for data in job.data("rank.exit")] == [75, 75]
    assert "Traceback" not in job.err


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_in_mid_training_commits_the_agreed_step(tmp_path: Path, name: str) -> None:
    with Launch(tmp_path, closed=["step-12"]) as job:
        job.at("step-12")
        job.signal(signal.Signals[name])
        job.until(lambda: job.said("stopping after step 14"), "a step is agreed")
        job.open("step-12")
        assert job.end() == 75
    _assert_stopped(job, name, 14)
    assert job.commits() == [5, 10, 14]
    assert job.data("stop.notice") == [{"signal": name}]
    assert job.causes() == []
    if name == "SIGTERM":
        _goes_on(tmp_path, 14)


def test_a_signal_during_a_section_waits_for_its_end(tmp_path: Path) -> None:
    with Launch(tmp_path, closed=["eval"]) as job:
        job.at("eval")  # of step 1
        job.signal(signal.SIGTERM)
        job.until(lambda: job.said("stopping after step 3"), "a step is agreed")
        job.open("eval")
        assert job.end() == 75
    _assert_stopped(job, "SIGTERM", 3)
    assert len(job.events("section.end")) == 2


def test_a_signal_before_the_first_step_commits_an_early_one(tmp_path: Path) -> None:
    with Launch(tmp_path, closed=["start"]) as job:
        job.at("start")
        job.signal(signal.SIGTERM)
        job.until(lambda: job.said("stopping after step 2"), "a step is agreed")
        job.open("start")
        assert job.end() == 75
    _assert_stopped(job, "SIGTERM", 2)
    _goes_on(tmp_path, 2)


def test_a_signal_while_a_restart_loads_stops_a_little_after_the_checkpoint(
    tmp_path: Path,
) -> None:
    with Launch(tmp_path, closed=["step-12"], faults=["exception@12:1"]) as job:
        job.at("step-12")
        for reached in job.gates.glob("start.reached-*"):
            reached.unlink()
        job.close("start")
        job.open("step-12")
        job.at("start")  # again, in the second round
        job.signal(signal.SIGTERM)
        job.until(lambda: job.said("stopping after step 12"), "a step is agreed")
        job.open("start")
        assert job.end() == 75
    assert job.resumes() == [0, 10]
    assert job.commits() == [5, 10, 12]
    assert job.ending.startswith("keepstep: stopped on SIGTERM; step 12 is committed")
    _goes_on(tmp_path, 12)


def test_a_signal_while_ranks_are_being_freed_ends_the_run_at_the_last_commit(
    tmp_path: Path,
) -> None:
    flags = ["--set", "restart.abort_limit_s=50"]
    with Launch(tmp_path, closed=["step-12"], flags=flags) as job:
        job.at("step-12")
        job.committed_is(10)
        first, second = job.rank_pids()
        os.kill(first, signal.SIGSTOP)  # it cannot leave the round
        os.kill(second, signal.SIGKILL)
        job.until(lambda: job.data("restart.cause"), "the failure is understood")
        job.signal(signal.SIGTERM)
        assert job.end() == 75
    assert "stopped on SIGTERM during a restart; newest committed step 10" in job.ending
    job.open("step-12")
    _goes_on(tmp_path, 10)


def test_a_rank_that_is_killed_while_the_run_stops_does_not_start_it_again(
    tmp_path: Path,
) -> None:
    with Launch(tmp_path, closed=["step-12"], faults=["kill@13:1"]) as job:
        job.at("step-12")
        job.committed_is(10)
        job.signal(signal.SIGTERM)
        job.until(lambda: job.said("stopping after step 14"), "a step is agreed")
        job.open("step-12")
        assert job.end() == 75
    assert "stopped on SIGTERM after a failure; newest committed step 10" in job.ending
    assert job.resumes() == [0]
    _goes_on(tmp_path, 10)
