"""200 in-process restarts in one process: nothing of an attempt is left when the next begins."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tests.process.job import Job

SCRIPT = Path(__file__).with_name("restarts_job.py")
WORLD = 2
RESTARTS = 200
WARM = 10
"""Restarts after which caches, pools and lazily started threads are there."""
LIMIT_S = 110.0


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, int]]]:
    """By rank, what its process held at the start of each attempt; one run for all tests."""
    folder = tmp_path_factory.mktemp("restarts")
    flags = (
        *("--set", f"restart.max_without_progress={RESTARTS + 1}"),
        # gloo can forget a send whose connection is shut down, once in some thousand restarts: that
        # rank comes free by the time limit of its collective.
        *("--set", "restart.pg_timeout_s=10", "--set", "restart.abort_limit_s=30"),
    )
    arguments = (str(SCRIPT), str(RESTARTS))
    with Job(folder, flags=flags, arguments=arguments, nproc=WORLD, preload=True) as job:
        assert job.wait(LIMIT_S) == 0, job.story()
        assert job.causes() == [
            ("exception", attempt % WORLD, "rerun") for attempt in range(1, RESTARTS + 1)
        ]
        assert len(job.events("rank.start")) == WORLD, "a process was replaced"
        logs = [job.log(rank) for rank in range(WORLD)]
    lines = [line for log in logs for line in log.splitlines() if line.startswith("measured ")]
    by_rank: list[list[dict[str, int]]] = [json.loads(line.partition(" ")[2]) for line in lines]
    assert [len(attempts) for attempts in by_rank] == [RESTARTS + 1] * WORLD
    return by_rank


@pytest.mark.slow
@pytest.mark.parametrize("what", ["threads", "descriptors", "objects"])
def test_threads_descriptors_and_python_objects_do_not_grow(
    measured: list[list[dict[str, int]]], what: str
) -> None:
    for rank, attempts in enumerate(measured):
        counts = [attempt[what] for attempt in attempts]
        # Medians: a thread that is just ending is no growth.
        early, late = (
            statistics.median(part) for part in (counts[WARM : 2 * WARM], counts[-WARM:])
        )
        # An object now and then is a cache; one left by every fourth restart would be a leak.
        slack = RESTARTS // 4 if what == "objects" else 0
        assert late <= early + slack, f"rank {rank}: {counts}"


@pytest.mark.slow
def test_memory_grows_by_less_than_a_twentieth_over_the_second_half(
    measured: list[list[dict[str, int]]],
) -> None:
    for rank, attempts in enumerate(measured):
        sizes = [attempt["rss_bytes"] for attempt in attempts]
        half, last = sizes[RESTARTS // 2], sizes[RESTARTS]
        assert last < 1.05 * half, f"rank {rank}: {half} bytes, then {last}"


@pytest.mark.slow
def test_the_model_of_a_failed_attempt_is_freed_before_the_next_begins(
    measured: list[list[dict[str, int]]],
) -> None:
    for rank, attempts in enumerate(measured):
        alive = [attempt["alive"] for attempt in attempts]
        assert not any(alive), f"rank {rank}: {alive}"
