"""That no attempt begins before it is decided that the run goes on; time is given, nothing runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist

from keepstep import shm
from keepstep.config import Config, EngineSettings
from keepstep.engines.nvrx import admission
from keepstep.engines.nvrx.admission import Admission
from keepstep.engines.nvrx.meeting import Turn
from keepstep.rank.runtime import Runtime
from keepstep.testing.clock import FakeClock
from tests.rank.starts import start

NVRX = EngineSettings(name="nvrx")
NATIVE = EngineSettings(restart="nvrx")


class _Clock(FakeClock):
    """``meanwhile`` is called at each sleep with its number."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeps = 0
        self.meanwhile: Callable[[int], None] = lambda number: None

    def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        self.advance(seconds)
        self.meanwhile(self.sleeps)


class _Job:
    """Ranks of one job in this process, which share a store."""

    def __init__(self, folder: Path, clock: _Clock) -> None:
        self.clock = clock
        self.store = dist.HashStore()  # type: ignore[attr-defined]
        self._folder = folder
        self.boards: list[shm.Board] = []

    def rank(
        self, rank: int, engine: EngineSettings = NVRX, *, nodes: int = 1, iteration: int = 0
    ) -> tuple[Admission, shm.Board]:
        """Rank ``rank`` of 2, both on one node or each on its own."""
        fd = shm.create()
        board = shm.Board(fd)
        os.close(fd)
        self.boards.append(board)
        place = start(self._folder)
        place = msgspec.structs.replace(
            place,
            rank=rank,
            local_rank=rank if nodes == 1 else 0,
            local_world=2 // nodes,
            node=rank if nodes > 1 else 0,
        )
        config = dataclasses.replace(Config(), engine=engine)
        runtime = Runtime(place, config, None, board)  # type: ignore[arg-type]
        turn = Turn("somewhere:1", 10.0, iteration, store=self.store)
        return Admission(runtime, turn), board


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Job]:
    clock = _Clock()
    made = _Job(tmp_path, clock)
    monkeypatch.setattr(admission, "SYSTEM", clock)
    monkeypatch.setattr(admission, "connect", lambda *_: made.store)
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    monkeypatch.setenv("MASTER_PORT", "7001")
    yield made
    for board in made.boards:
        board.close()


def test_where_it_is_decided_already_nobody_waits(job: _Job) -> None:
    rank, board = job.rank(1)
    board.admit(4)
    rank.wait(4)
    assert job.clock.sleeps == 0


def test_a_rank_waits_until_its_round_is_admitted(
    job: _Job, capsys: pytest.CaptureFixture[str]
) -> None:
    rank, board = job.rank(1)
    board.admit(3)
    job.clock.meanwhile = lambda number: board.admit(4) if number == 7 else None
    rank.wait(4)
    assert job.clock.sleeps == 7
    assert capsys.readouterr().err == ""


def test_where_nobody_decides_the_round_begins_after_a_while(
    job: _Job, capsys: pytest.CaptureFixture[str]
) -> None:
    rank, _ = job.rank(0)
    begun = job.clock.mono()
    rank.wait(2)
    assert job.clock.mono() - begun == pytest.approx(6.0, abs=0.1)
    assert "nobody decided in 6 s whether round 2 may begin" in capsys.readouterr().err


def test_another_node_is_told_by_the_first_rank_of_node_0(job: _Job) -> None:
    first, board = job.rank(0, nodes=2)
    other, theirs = job.rank(1, nodes=2)

    def decided(number: int) -> None:
        if number == 3:
            job.clock.meanwhile = lambda number: None
            board.admit(2)
            first.wait(2)

    theirs.admit(9)  # nobody decides there: it must not count
    job.clock.meanwhile = decided
    other.wait(2)
    assert job.clock.sleeps == 3


def test_what_was_said_of_another_turn_does_not_count(
    job: _Job, capsys: pytest.CaptureFixture[str]
) -> None:
    first, board = job.rank(0, nodes=2)
    board.admit(1)
    first.wait(1)
    other, _ = job.rank(1, nodes=2, iteration=1)
    other.wait(2)
    assert "nobody decided" in capsys.readouterr().err


def test_under_keepsteps_own_launcher_only_a_refusal_is_waited_out(
    job: _Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = job.rank(0, NATIVE)
    other, _ = job.rank(1, NATIVE)
    first.wait(1)
    assert job.clock.sleeps == 0
    other.refuse()
    first.wait(2)
    assert "nobody decided" in capsys.readouterr().err
    monkeypatch.setenv("MASTER_PORT", "7002")  # all ranks were started anew
    sleeps = job.clock.sleeps
    first.wait(3)
    assert job.clock.sleeps == sleeps
