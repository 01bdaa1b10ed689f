"""An attempt's surroundings: what is told of a failure, and to whom. Nothing is connected."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep import shm
from keepstep.config import Config, EngineSettings
from keepstep.engines.nvrx.admission import Admission
from keepstep.engines.nvrx.rounds import Rounds
from keepstep.errors import UsageError
from keepstep.rank.runtime import Runtime
from keepstep.wire.messages import Failed
from tests.rank.starts import start

NVRX = EngineSettings(name="nvrx")
NATIVE = EngineSettings(restart="nvrx")


class _Control:
    """What keepstep's own launcher is told."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class _Rank:
    """A rank whose groups and whose permission to begin are scripted."""

    def __init__(self, folder: Path, engine: EngineSettings) -> None:
        fd = shm.create()
        self.board = shm.Board(fd)
        os.close(fd)
        self.control = _Control()
        config = dataclasses.replace(Config(), engine=engine)
        self.runtime = Runtime(start(folder), config, self.control, self.board)  # type: ignore[arg-type]
        self.runtime.store = "somewhere:1"
        self.rounds = Rounds(self.runtime, lambda meet: self)
        self.error: Exception | None = None
        self.aborts = False

    def form(self, world: object) -> None:
        self.rounds.turn.round = 4
        self.rounds.turn.aborted = self.aborts
        if self.error is not None:
            raise self.error

    def abort(self) -> int:
        return 0

    def destroy(self) -> None:
        """There are none."""

    def sequence_numbers(self) -> dict[str, int]:
        return {}

    def told(self, kind: str) -> list[dict[str, Any]]:
        """The events of ``kind`` since the last call; all others are dropped."""
        lines = [msgspec.json.decode(line) for line in self.board.take_lines()]
        return [line for line in lines if line["kind"] == kind]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whatever is asked of the admission is noted here and granted."""
    asked: list[Any] = []
    monkeypatch.setattr(Admission, "wait", lambda self, number: asked.append(number))
    monkeypatch.setattr(Admission, "refuse", lambda self: asked.append("refused"))
    return asked


@pytest.fixture(params=[NVRX, NATIVE], ids=["nvrx", "native"])
def rank(request: pytest.FixtureRequest, tmp_path: Path, waits: list[Any]) -> Iterator[_Rank]:
    made = _Rank(tmp_path, request.param)
    yield made
    made.board.close()


def test_an_attempt_begins_when_its_round_may(rank: _Rank, waits: list[Any]) -> None:
    def attempt(world: Any) -> tuple[int, list[Any], int]:
        return world.round, list(waits), rank.board.round

    assert rank.rounds.run(attempt) == (4, [4], 4)
    [joined] = rank.told("rank.joined")
    assert joined["round"] == 4


def test_a_rank_that_may_not_begin_is_in_no_new_round(
    rank: _Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: Admission, number: int) -> None:
        raise SystemExit

    monkeypatch.setattr(Admission, "wait", never)
    begun: list[object] = []
    with pytest.raises(SystemExit):
        rank.rounds.run(begun.append)
    assert begun == []
    assert rank.board.round == 0


def test_what_a_connection_says_when_the_turn_is_aborted_is_no_failure_of_this_rank(
    rank: _Rank,
) -> None:
    rank.error, rank.aborts = RuntimeError("failed to recv, got 0 bytes"), True
    with pytest.raises(RuntimeError, match="aborted"):
        rank.rounds.run(lambda world: None)
    [failed] = rank.told("rank.failed")
    assert failed["data"]["failure"] == "peer_lost"
    rank.aborts = False
    with pytest.raises(RuntimeError, match="got 0 bytes"):
        rank.rounds.run(lambda world: None)
    [failed] = rank.told("rank.failed")
    assert failed["data"]["failure"] == "exception"


def test_a_failure_that_no_restart_helps_against_is_told_to_whoever_decides(
    tmp_path: Path, waits: list[Any]
) -> None:
    def wrong(world: object) -> None:
        raise UsageError("wrong use")

    watched, own = _Rank(tmp_path, NVRX), _Rank(tmp_path, NATIVE)
    for rank in (watched, own):
        with pytest.raises(UsageError):
            rank.rounds.run(wrong)
    [event] = watched.told("rank.failed")
    assert event["data"]["fatal"] == 64
    assert (watched.control.sent, own.told("rank.failed")) == ([], [])
    [message] = own.control.sent
    assert isinstance(message, Failed)
    assert (message.fatal, message.failure, message.inc) == (64, "exception", 0)
    assert waits == [4, 4, "refused"]
    for rank in (watched, own):
        rank.board.close()


def test_keepsteps_own_launcher_is_not_told_of_what_nvrx_mends(
    tmp_path: Path, waits: list[Any]
) -> None:
    def fails(world: object) -> None:
        raise ValueError("once")

    rank = _Rank(tmp_path, NATIVE)
    with pytest.raises(ValueError, match="once"):
        rank.rounds.run(fails)
    assert rank.control.sent == []
    assert [event["data"]["failure"] for event in rank.told("rank.failed")] == ["exception"]
    assert "refused" not in waits
    rank.rounds.unwound()
    assert [event["round"] for event in rank.told("rank.left")] == [4]
    rank.board.close()
