"""Whatever is killed, nothing of the run stays behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.process.job import GONE_S, LIMIT_S, LOOP, Job, finish_file, lives, wait_until

# Each rank starts a child of its own, one in a session of its own, and one that is orphaned there.
_FAMILY = (
    """
import os, subprocess, sys
sleep = ["sleep", "1000"]
own = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
orphan = subprocess.run(["setsid", "sh", "-c", "sleep 1000 >&2 & echo $!"], stdout=subprocess.PIPE)
own.append(int(orphan.stdout))
print("family", *own)
"""
    + LOOP
)


def _family(job: Job, rank: int, incarnation: int = 0) -> list[int]:
    """The processes that a rank started."""

    def look() -> list[int]:
        try:
            words = job.log(rank, incarnation).split()
        except FileNotFoundError:
            return []
        return [int(word) for word in words[1:4]] if len(words) >= 4 else []

    return job.until(look, f"rank {rank} has started its children")


def _job(folder: Path, method: str = "fork") -> Job:
    flags = ["--start-method", method]
    return Job(folder, _FAMILY, flags=flags, arguments=[str(finish_file(folder))])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_nothing_outlives_an_agent_that_was_killed(tmp_path: Path, method: str) -> None:
    with _job(tmp_path, method) as job:
        ranks = job.running()
        family = [pid for rank in (0, 1) for pid in _family(job, rank)]
        helpers = [job.helper(name) for name in ("coordinator", "rank.zygote", "checkpoint.writer")]
        everything = set(job.pids())
        assert everything >= {*ranks, *family, *helpers, job.process.pid}
        job.signal(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        wait_until(lambda: not any(map(lives, everything)), "all have ended", GONE_S)


def test_a_writer_that_was_killed_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    with _job(tmp_path) as job:
        ranks = job.running()
        first = job.helper("checkpoint.writer")
        os.kill(first, signal.SIGKILL)
        job.until(lambda: "another one takes over" in job.err, "the agent says so")
        second = job.helper("checkpoint.writer")
        assert second != first
        finish_file(tmp_path).touch()
        assert job.wait() == 0
        assert job.rank_pids() == ranks
        assert not lives(second)


@pytest.mark.parametrize("helper", ["coordinator", "rank.zygote"])
def test_a_helper_that_was_killed_ends_the_job_as_a_bug_and_everything_with_it(
    tmp_path: Path, helper: str
) -> None:
    with _job(tmp_path) as job:
        ranks = job.running()
        family = [pid for rank in (0, 1) for pid in _family(job, rank)]
        os.kill(job.helper(helper), signal.SIGKILL)
        assert job.wait() == 70
        assert [pid for pid in (*ranks, *family) if lives(pid)] == []
    name = helper.split(".")[-1]
    assert f"the {name} process ended before the job did" in job.ending
    assert "Traceback" not in job.err
    assert len(job.data("rank.exit")) == 2


def test_what_a_rank_started_does_not_outlive_the_rank(tmp_path: Path) -> None:
    with _job(tmp_path) as job:
        ranks = job.running()
        family = [_family(job, rank) for rank in (0, 1)]
        os.kill(ranks[1], signal.SIGKILL)
        job.running(2)
        wait_until(lambda: not any(map(lives, family[1])), "its children have ended", GONE_S)
        assert all(map(lives, family[0]))  # nobody else's
        family[1] = _family(job, 1, 1)
        finish_file(tmp_path).touch()
        assert job.wait() == 0
        assert [pid for pid in (*family[0], *family[1]) if lives(pid)] == []


def test_an_agent_that_is_killed_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    with _job(tmp_path) as job:
        job.until(lambda: len(job.pids()) >= 3, "its helpers are being started", LIMIT_S)
        job.signal(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL


def test_the_ranks_of_a_run_listen_on_no_port_and_name_no_shared_memory(tmp_path: Path) -> None:
    with Job(tmp_path, LOOP, arguments=[str(finish_file(tmp_path))]) as job:
        before = set(os.listdir("/dev/shm"))
        job.running()
        assert job.listening() == []
        assert {
            name for name in set(os.listdir("/dev/shm")) - before if "keepstep" in name
        } == set()
        finish_file(tmp_path).touch()
        assert job.wait() == 0
