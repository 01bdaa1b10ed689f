"""In-process restart without processes: the test plays agent and coordinator on a socket."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep import shm
from keepstep.config import Config
from keepstep.errors import CheckpointMismatch
from keepstep.rank.control import Control
from keepstep.rank.restart import NativeRestarter, RunStopped
from keepstep.rank.runtime import Runtime
from keepstep.wire.channel import Channel, pair
from keepstep.wire.messages import (
    FROM_RANK,
    TO_RANK,
    Abort,
    Failed,
    Finish,
    Go,
    Join,
    Returned,
)
from keepstep.wire.types import World
from tests.rank.starts import start

_LEAVE_SIGNAL = signal.SIGRTMIN + 4


class _Groups:
    """Communication that records what is asked of it; a blocked rank waits for ``free``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.free = threading.Event()

    def form(self, world: World) -> None:
        self.free.clear()
        self.calls.append(f"form {world.round}")

    def abort(self) -> int:
        self.calls.append("abort")
        self.free.set()
        return 1

    def destroy(self) -> None:
        self.calls.append("destroy")

    def sequence_numbers(self) -> dict[str, int]:
        return {"default": len(self.calls)}


class _Agent:
    """Answers a rank's messages from a thread: each by what ``script`` says comes next."""

    def __init__(self, channel: Channel[FROM_RANK]) -> None:
        self._channel = channel
        self.got: list[FROM_RANK] = []
        self.answers: list[Callable[[FROM_RANK], list[TO_RANK]]] = []
        self._thread = threading.Thread(target=self._serve)

    def start(self) -> None:
        self._thread.start()

    def _serve(self) -> None:
        for answer in self.answers:
            message = self._channel.receive()
            self.got.append(message)
            for reply in answer(message):
                self._channel.send(reply)

    def join(self) -> None:
        self._thread.join(30.0)
        assert not self._thread.is_alive()


class _Rank:
    """A runtime with its agent."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = pair()
        self.channel: Channel[FROM_RANK] = Channel(ours, FROM_RANK, blocking=True)
        self.agent = _Agent(self.channel)
        control: Channel[TO_RANK] = Channel(theirs, TO_RANK, blocking=True)
        self._control = control
        fd = shm.create()
        self.board = shm.Board(fd)
        os.close(fd)
        self.runtime = Runtime(start(folder), Config(), Control(control), self.board)
        self.groups = _Groups()

    def run(self, attempt: Callable[[World], object]) -> object:
        """The restarter's run, with the agent answering."""
        self.agent.start()
        self.runtime.control.start()
        self.restarter = NativeRestarter(self.runtime, self.groups, lambda: 40)
        return self.restarter.run(attempt)

    def close(self) -> None:
        self.agent.join()
        self.channel.close()
        self.runtime.control._thread.join(30.0)
        self._control.close()
        self.board.close()


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Rank]:
    # The reader thread ends its process when the agent is gone.
    monkeypatch.setattr("keepstep.rank.control.os._exit", lambda code: None)
    with contextlib.closing(_Rank(tmp_path)) as made:
        yield made


def _go(round: int, resume: int = 0) -> Callable[[FROM_RANK], list[TO_RANK]]:
    folder = f"step-{resume:08d}" if resume else ""
    return lambda _: [Go(term=1, round=round, resume=resume, folder=folder)]


def _abort(round: int) -> Callable[[FROM_RANK], list[TO_RANK]]:
    return lambda _: [Abort(round=round, reason="rank 0 failed")]


def _finish(_: FROM_RANK) -> list[TO_RANK]:
    return [Finish(exit_code=0)]


def test_the_result_comes_back_when_every_rank_has_returned(rank: _Rank) -> None:
    rank.agent.answers = [_go(1, 30), _finish]
    worlds: list[World] = []

    def attempt(world: World) -> str:
        worlds.append(world)
        return "trained"

    before = signal.getsignal(_LEAVE_SIGNAL)
    assert rank.run(attempt) == "trained"
    rank.agent.join()
    [world] = worlds
    assert (world.rank, world.size, world.round, world.resume) == (1, 2, 1, 30)
    assert world.folder == "step-00000030"
    assert rank.agent.got[0] == Join(inc=0, after_round=0, seqs={})
    assert rank.agent.got[1] == Returned(inc=0, round=1, step=30, saving=40)
    assert rank.groups.calls == ["form 1", "destroy"]
    assert signal.getsignal(_LEAVE_SIGNAL) == before
    assert rank.restarter.exit_code == 0


def test_after_an_exception_the_attempt_is_called_again_in_the_next_round(
    rank: _Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    rank.agent.answers = [_go(1), _abort(1), _go(2, 10), _finish]
    rounds: list[int] = []

    def attempt(world: World) -> int:
        rounds.append(world.round)
        if world.round == 1:
            raise ValueError("a bad batch")
        return world.round

    assert rank.run(attempt) == 2
    rank.agent.join()
    assert rounds == [1, 2]
    failed = rank.agent.got[1]
    assert isinstance(failed, Failed)
    assert (failed.failure, failed.error) == ("exception", "ValueError: a bad batch")
    assert (failed.round, failed.fatal, failed.fresh) == (1, 0, True)
    assert failed.location.startswith(__file__)
    again = rank.agent.got[2]
    assert isinstance(again, Join)
    assert again.after_round == 1
    assert again.seqs == failed.seqs
    assert rank.groups.calls == ["form 1", "abort", "destroy", "form 2", "destroy"]
    assert capsys.readouterr().err.count("Traceback") == 1


def test_a_second_failure_in_the_same_process_is_not_a_fresh_one(rank: _Rank) -> None:
    rank.agent.answers = [_go(1), _abort(1), _go(2), _abort(2), _go(3), _finish]

    def attempt(world: World) -> None:
        if world.round < 3:
            raise ValueError("again")

    rank.run(attempt)
    rank.agent.join()
    fresh = [message.fresh for message in rank.agent.got if isinstance(message, Failed)]
    assert fresh == [True, False]


def test_a_rank_blocked_in_its_groups_comes_free_by_an_abort_and_reports_nothing(
    rank: _Rank,
) -> None:
    rank.agent.answers = [_go(1), _go(2), _finish]

    def attempt(world: World) -> str:
        if world.round == 1:
            rank.channel.send(Abort(round=1, reason="rank 0 failed"))
            rank.groups.free.wait()
            raise RuntimeError("Connection closed by peer")
        return "done"

    assert rank.run(attempt) == "done"
    rank.agent.join()
    assert [type(message).__name__ for message in rank.agent.got] == ["Join", "Join", "Returned"]


def test_a_rank_that_is_busy_elsewhere_is_urged_out_by_a_signal(rank: _Rank) -> None:
    rank.agent.answers = [_go(1), _go(2), _finish]
    cleaned: list[int] = []

    def attempt(world: World) -> str:
        if world.round == 1:
            rank.channel.send(Abort(round=1, reason="rank 0 failed"))
            try:
                with contextlib.suppress(Exception):  # must not swallow a restart
                    time.sleep(60)
            finally:
                cleaned.append(1)
        return "done"

    assert rank.run(attempt) == "done"
    rank.agent.join()
    assert cleaned == [1]
    assert [type(message).__name__ for message in rank.agent.got] == ["Join", "Join", "Returned"]


def test_a_round_that_was_aborted_before_the_rank_entered_it_is_not_begun(rank: _Rank) -> None:
    rank.agent.answers = [
        lambda _: [Abort(round=1, reason="rank 0"), Go(term=1, round=1, resume=0, folder="")],
        _go(2),
        _finish,
    ]
    rounds: list[int] = []

    def attempt(world: World) -> None:
        rounds.append(world.round)

    rank.run(attempt)
    rank.agent.join()
    assert rounds == [2]
    assert rank.groups.calls == ["destroy", "form 2", "destroy"]


def test_a_rank_that_has_returned_goes_back_when_another_failed_later(rank: _Rank) -> None:
    rank.agent.answers = [_go(1), _abort(1), _go(2), _finish]
    rounds: list[int] = []

    def attempt(world: World) -> None:
        rounds.append(world.round)

    rank.run(attempt)
    rank.agent.join()
    assert rounds == [1, 2]
    names = [type(message).__name__ for message in rank.agent.got]
    assert names == ["Join", "Returned", "Join", "Returned"]


def test_an_agreed_stop_counts_as_returned_with_the_exit_code_that_is_told(rank: _Rank) -> None:
    rank.agent.answers = [_go(1), lambda _: [Finish(exit_code=75)]]

    def attempt(world: World) -> None:
        raise RunStopped

    assert rank.run(attempt) is None
    rank.agent.join()
    assert rank.restarter.exit_code == 75


def test_an_exit_that_the_script_asks_for_is_its_own_business(rank: _Rank) -> None:
    rank.agent.answers = [_go(1)]

    def attempt(world: World) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit) as caught:
        rank.run(attempt)
    assert caught.value.code == 3
    assert [type(message).__name__ for message in rank.agent.got] == ["Join"]


def test_a_checkpoint_of_another_model_is_told_as_fatal(rank: _Rank) -> None:
    rank.agent.answers = [_go(1, 5), _abort(1), _go(2), _finish]

    def attempt(world: World) -> None:
        if world.round == 1:
            raise CheckpointMismatch("the model has 3 layers, the checkpoint 4")

    rank.run(attempt)
    rank.agent.join()
    failed = rank.agent.got[1]
    assert isinstance(failed, Failed)
    assert (failed.failure, failed.fatal) == ("checkpoint", 65)


def test_what_a_failed_attempt_held_is_let_go_before_the_next_begins(rank: _Rank) -> None:

    class Model:
        pass

    rank.agent.answers = [_go(1), _abort(1), _go(2), _finish]
    models: list[weakref.ref[Model]] = []

    def attempt(world: World) -> None:
        assert [model() for model in models] == [None] * len(models)
        model = Model()
        models.append(weakref.ref(model))
        if world.round == 1:
            try:
                raise KeyError("inner")
            except KeyError as inner:
                raise ValueError("outer") from inner

    rank.run(attempt)
    rank.agent.join()
    assert len(models) == 2


def test_a_module_being_imported_is_not_left_half_done_when_a_rank_is_urged_out(
    rank: _Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_import.py").write_text(
        "import signal, import_gate\n"
        "import_gate.free.wait()\n"
        "signal.raise_signal(signal.SIGRTMIN + 4)\n"
        "whole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "import_gate", rank.groups)
    rank.agent.answers = [_go(1), _go(2), _finish]
    whole: list[bool] = []

    def attempt(world: World) -> str:
        if world.round == 1:
            rank.channel.send(Abort(round=1, reason="rank 0 failed"))
            whole.append(importlib.import_module("slow_import").whole)
            signal.raise_signal(_LEAVE_SIGNAL)
            raise AssertionError("it was not urged out after the import")
        return "done"

    assert rank.run(attempt) == "done"
    rank.agent.join()
    sys.modules.pop("slow_import")
    assert whole == [True]
