from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.checkpoint import catalog
from keepstep.checkpoint.retention import Keep
from keepstep.coordinator.committer import Committer, Done
from keepstep.coordinator.saves import Ready
from tests.checkpoint.shards import make_version, save, write


class Waiting:
    """A committer, and a way to wait for its results without looking at the clock."""

    def __init__(self, root: Path, keep_last: int = 0) -> None:
        self._woken = threading.Semaphore(0)
        self.committer = Committer(root, Keep(keep_last), self._woken.release)

    def results(self, count: int) -> list[Done]:
        done: list[Done] = []
        while len(done) < count:
            assert self._woken.acquire(timeout=30), f"{len(done)} of {count} results"
            done += self.committer.take()
        return done


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Waiting]:
    made = Waiting(tmp_path)
    yield made
    made.committer.close()


def shards(root: Path, step: int, ranks: tuple[int, ...] = (0, 1)) -> Ready:
    version = make_version(step)
    folder = ""
    for rank in ranks:
        _, folder = write(root, version, rank)
    return Ready(version, folder)


def test_what_is_put_in_is_published_and_reported(waiting: Waiting, tmp_path: Path) -> None:
    ready = shards(tmp_path, 5)
    assert catalog.newest(tmp_path) is None
    waiting.committer.put(ready)
    assert waiting.results(1) == [(make_version(5), "")]
    newest = catalog.newest(tmp_path)
    assert newest is not None and (newest.step, newest.folder) == (5, ready.folder)


def test_results_come_in_the_order_of_the_work(waiting: Waiting, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        waiting.committer.put(shards(tmp_path, step))
    assert [version.step for version, _ in waiting.results(3)] == [1, 2, 3]
    assert waiting.committer.take() == []


def test_a_version_with_a_missing_shard_is_refused_and_the_next_one_still_commits(
    waiting: Waiting, tmp_path: Path
) -> None:
    waiting.committer.put(shards(tmp_path, 5, ranks=(1,)))
    waiting.committer.put(shards(tmp_path, 6))
    (first, error), (second, none) = waiting.results(2)
    assert (first.step, second.step, none) == (5, 6, "")
    assert "1 of 2 shards are missing: of the ranks 0" in error
    assert [info.step for info in catalog.committed(tmp_path)] == [6]


def test_a_folder_that_is_gone_is_an_error_of_that_version_only(
    waiting: Waiting, tmp_path: Path
) -> None:
    waiting.committer.put(Ready(make_version(5), "step-00000005"))
    waiting.committer.put(shards(tmp_path, 6))
    (_, error), (_, none) = waiting.results(2)
    assert error and not none


def test_old_commits_go_once_a_newer_one_is_durable(tmp_path: Path) -> None:
    for number, step in enumerate((1, 2, 3)):
        save(tmp_path, make_version(step), at=1_700_000_000.0 + number)
    waiting = Waiting(tmp_path, keep_last=2)
    waiting.committer.put(shards(tmp_path, 4, ranks=(0,)))
    waiting.committer.put(shards(tmp_path, 5))
    waiting.results(2)
    waiting.committer.close()
    assert [info.step for info in catalog.committed(tmp_path)] == [5, 3]


def test_unfinished_folders_of_saves_in_flight_are_left_alone(tmp_path: Path) -> None:
    stale, flying = shards(tmp_path, 2, ranks=(0,)), shards(tmp_path, 3, ranks=(0,))
    ready = shards(tmp_path, 5)
    waiting = Waiting(tmp_path)
    waiting.committer.put(Ready(ready.version, ready.folder, frozenset({flying.folder})))
    waiting.results(1)
    waiting.committer.close()
    assert catalog.unfinished(tmp_path) == [flying.folder]
    assert stale.folder != flying.folder


def test_closing_finishes_what_is_queued(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path)
    for step in (1, 2):
        waiting.committer.put(shards(tmp_path, step))
    waiting.committer.close()
    assert [info.step for info in catalog.committed(tmp_path)] == [2, 1]
    assert len(waiting.committer.take()) == 2
