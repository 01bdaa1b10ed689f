"""Ranks that agree on the step to stop after, over a real store; a barrier for collectives."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch.distributed as dist

from keepstep import events
from keepstep.engines.nvrx.progress import AttachedProgress
from keepstep.ports import Heartbeat
from keepstep.rank.runtime import Runtime
from keepstep.shm import Phase

pytestmark = pytest.mark.process

WORLD = 3
_LIMIT_S = 60.0


class _Board:
    """What the agreement reads and writes of a board."""

    def __init__(self) -> None:
        self.step = self.stop_signal = 0


class _Runtime:
    """A rank's runtime, as far as it takes part."""

    def __init__(self, rank: int, store: str) -> None:
        self.board = _Board()
        self.store = store
        self.start = SimpleNamespace(rank=rank, world=WORLD, local_rank=0)
        self.told: list[events.EventData] = []
        self.recorder = SimpleNamespace(round=1, emit=self.told.append)
        self.driven = False

    def fire_due_faults(self, step: int) -> None:
        """None is due."""

    def end_step(self, step: int, loss: float | None) -> None:
        """Nothing is shown."""

    def enter(self, phase: Phase) -> None:
        """Nothing is shown."""


class _Rank:
    """One rank's loop in a thread. ``ask_at``: the step in which its node is asked to stop."""

    def __init__(self, rank: int, store: str, barrier: threading.Barrier, ask_at: int = 0) -> None:
        self.runtime = _Runtime(rank, store)
        heartbeat = SimpleNamespace(beat=self._beat, close=lambda: None)
        self.progress = AttachedProgress(cast(Runtime, self.runtime), cast(Heartbeat, heartbeat))
        self._barrier = barrier
        self._ask_at = ask_at
        self.stopped = 0
        self.done = 0
        self.thread = threading.Thread(target=self._run, args=(1, 10_000))

    def _beat(self, step: int) -> None:
        self.runtime.board.step = step

    def again(self, round: int, first: int, last: int) -> None:
        """Another round, in the same process."""
        self.runtime.recorder.round = round
        self.stopped = self.done = 0
        self.thread = threading.Thread(target=self._run, args=(first, last))

    def _run(self, first: int, last: int) -> None:
        round = self.runtime.recorder.round
        for step in range(first, last + 1):
            self.progress.begin_step(step)
            if step == self._ask_at:
                self.runtime.board.stop_signal = 15
            self._barrier.wait(_LIMIT_S)
            self.progress.end_step(step, None)
            self.done = step
            if self.progress.stop_due(step, round):
                self.stopped = step
                break
        self.progress.begin_step(None)


@pytest.fixture(scope="module", autouse=True)
def _opened() -> None:
    """What torch opens once a process is not left behind by a test."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


@pytest.fixture
def store() -> Iterator[str]:
    """The address of the store outside the ranks; the ranks' threads end with it."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield f"127.0.0.1:{host.port}"
    for round in (1, 2):
        host.set(f"keepstep/stop/{round}/asked", "")
    for thread in _listening():
        thread.join(_LIMIT_S)
    del host
    gc.collect()


def _listening() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "keepstep-stop"]


def _to_the_end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.thread.start()
    for rank in ranks:
        rank.thread.join(_LIMIT_S)
        assert not rank.thread.is_alive(), "a rank waits for ever"


@pytest.mark.parametrize("asked", [(0,), (2,), (0, 1, 2), (1, 2)])
def test_all_ranks_stop_after_the_same_step_whoever_is_asked(
    asked: tuple[int, ...], store: str
) -> None:
    barrier = threading.Barrier(WORLD)
    ranks = [
        _Rank(rank, store, barrier, ask_at=20 + rank if rank in asked else 0)
        for rank in range(WORLD)
    ]
    _to_the_end(ranks)
    steps = {rank.stopped for rank in ranks}
    assert len(steps) == 1
    assert steps.pop() > 20
    assert {rank.done for rank in ranks} == {ranks[0].stopped}


def test_the_watcher_of_a_node_that_was_not_asked_is_told(store: str) -> None:
    barrier = threading.Barrier(WORLD)
    ranks = [_Rank(rank, store, barrier, ask_at=5 * (rank == 1)) for rank in range(WORLD)]
    _to_the_end(ranks)
    notice = events.StopNotice(signal="SIGTERM")
    assert [rank.runtime.told for rank in ranks] == [[notice], [], [notice]]


def test_a_wish_of_a_round_that_failed_is_not_one_of_the_next(store: str) -> None:
    barrier = threading.Barrier(WORLD)
    ranks = [_Rank(rank, store, barrier, ask_at=5 * (rank == 1)) for rank in range(WORLD)]
    _to_the_end(ranks)
    ranks[1].runtime.board.stop_signal = ranks[1]._ask_at = 0  # another process has the board now
    for rank in ranks:
        rank.again(2, 3, 30)
    _to_the_end(ranks)
    assert [(rank.stopped, rank.done) for rank in ranks] == [(0, 30)] * WORLD
    assert len(_listening()) == WORLD


def test_a_wish_after_the_last_step_of_others_holds_nobody_up(store: str) -> None:
    barrier = threading.Barrier(WORLD)
    ranks = [_Rank(rank, store, barrier) for rank in range(WORLD)]
    for rank in ranks:
        rank.again(1, 1, 10)
    ranks[0]._ask_at = 10
    _to_the_end(ranks)
    assert {rank.done for rank in ranks} == {10}
    assert {rank.stopped for rank in ranks} == {0}
