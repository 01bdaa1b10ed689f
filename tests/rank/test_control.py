"""A rank's end of its control socket; the test plays the agent."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import pytest

from keepstep.errors import InternalError, NotEnoughMemory
from keepstep.rank.control import Control
from keepstep.wire.channel import Channel, pair
from keepstep.wire.messages import (
    FROM_RANK,
    TO_RANK,
    Abort,
    Finish,
    Go,
    Hello,
    SaveAnswer,
    SaveResult,
    SlotFree,
    SlotGrant,
    SlotsDenied,
    StopAt,
    StoreReply,
)

T = TypeVar("T")
_LIMIT_S = 30.0


class _Rank:
    """A ``Control`` in a thread pool, with the agent's end of its socket.

    The reader thread ends its process when the agent is gone; here that is recorded instead.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ended = threading.Event()
        self.codes: list[int] = []
        monkeypatch.setattr("keepstep.rank.control.os._exit", self._exit)
        ours, theirs = pair()
        self.agent: Channel[FROM_RANK] = Channel(ours, FROM_RANK, blocking=True)
        self.channel: Channel[TO_RANK] = Channel(theirs, TO_RANK, blocking=True)
        self.control = Control(self.channel)
        self._pool = ThreadPoolExecutor(2)

    def _exit(self, code: int) -> None:
        self.codes.append(code)
        self.ended.set()

    def waits(self, call: Callable[[], T]) -> Future[T]:
        """Call from another thread, as the main thread of a rank would."""
        return self._pool.submit(call)

    def close(self) -> None:
        """End the reader thread as the end of the agent would."""
        self.agent.close()
        self.control._thread.join(_LIMIT_S)
        self._pool.shutdown()
        self.channel.close()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Rank]:
    made = _Rank(monkeypatch)
    yield made
    made.close()


def _go(round: int) -> Go:
    return Go(term=1, round=round, resume=0, folder="")


def test_a_round_that_is_over_is_not_taken_for_the_next(rank: _Rank) -> None:
    rank.control.start()
    rank.agent.send(_go(1))
    assert rank.control.wait_go(0).round == 1
    next_round = rank.waits(lambda: rank.control.wait_go(1))
    rank.agent.send(_go(1))
    rank.agent.send(_go(3))
    assert next_round.result(_LIMIT_S).round == 3


def test_an_abort_is_carried_out_before_those_who_wait_for_it_go_on(rank: _Rank) -> None:
    seen: list[tuple[int, int, int]] = []
    control = rank.control

    def abort(message: Abort) -> None:
        seen.append((message.round, control.aborting_round, control.aborted_round))

    control.on_abort = abort
    control.start()
    finish = rank.waits(lambda: control.wait_finish(2))
    stop = rank.waits(lambda: control.wait_stop(5, 2))
    rank.agent.send(Abort(round=2, reason="rank 1 failed"))
    assert finish.result(_LIMIT_S) is None
    assert stop.result(_LIMIT_S) is None
    control.wait_abort(2)
    control.wait_abort(1)
    assert seen == [(2, 2, 0)]


def test_the_end_of_the_job_reaches_who_waits_for_it(rank: _Rank) -> None:
    rank.control.start()
    finish = rank.waits(lambda: rank.control.wait_finish(1))
    rank.agent.send(Finish(exit_code=75))
    found = finish.result(_LIMIT_S)
    assert found is not None
    assert found.exit_code == 75


def test_a_stop_is_waited_for_until_all_agree_or_it_moved_on(rank: _Rank) -> None:
    told: list[StopAt] = []
    rank.control.on_stop = told.append
    rank.control.start()
    final = rank.waits(lambda: rank.control.wait_stop(10, 1))
    rank.agent.send(StopAt(step=10, final=False))
    rank.agent.send(StopAt(step=10, final=True))
    assert final.result(_LIMIT_S) == StopAt(step=10, final=True)
    rank.agent.send(StopAt(step=12, final=False))
    moved = rank.waits(lambda: rank.control.wait_stop(11, 1))
    assert moved.result(_LIMIT_S) in (told[1], StopAt(step=12, final=False))
    assert [stop.final for stop in told[:2]] == [False, True]


def test_slots_come_with_their_descriptors_in_order(rank: _Rank) -> None:
    rank.control.start()
    made = [os.memfd_create(f"test-{number}") for number in range(2)]
    for number, fd in enumerate(made):
        os.write(fd, b"%d" % number)
        rank.agent.send(SlotGrant(slot=number, size=1, of=2), (fd,))
        os.close(fd)
    grants = rank.control.take_grants(_LIMIT_S)
    contents = []
    for slot, size, fd in grants:
        contents.append((slot, size, os.pread(fd, 1, 0)))
        os.close(fd)
    assert contents == [(0, 1, b"0"), (1, 1, b"1")]
    with pytest.raises(InternalError, match="no staging slots within 0 s"):
        rank.control.take_grants(0.01)


def test_callbacks_get_freed_slots_and_results_of_saves(rank: _Rank) -> None:
    freed: list[int] = []
    saved: list[tuple[int, str]] = []
    rank.control.on_slot_free = freed.append
    rank.control.on_saved = lambda result: saved.append((result.step, result.error))
    rank.control.start()
    rank.agent.send(SlotFree(slot=4))
    rank.agent.send(SaveResult(step=9, error="disk full"))
    rank.agent.send(_go(1))
    rank.control.wait_go(0)
    assert freed == [4]
    assert saved == [(9, "disk full")]


def test_a_store_call_gets_its_own_reply_and_late_ones_are_dropped(rank: _Rank) -> None:
    control = rank.control
    control.start()
    first, second = control.call_id(), control.call_id()
    assert first != second
    rank.agent.send(StoreReply(id=second, values=[b"two"]))
    rank.agent.send(StoreReply(id=first, values=[b"one"]))
    assert control.wait_reply(first, _LIMIT_S, lambda: False).values == [b"one"]
    assert control.wait_reply(second, _LIMIT_S, lambda: False).values == [b"two"]
    late = control.call_id()
    assert control.wait_reply(late, 0.01, lambda: False).error == "no answer within 0.0 s"
    rank.agent.send(StoreReply(id=late, values=[b"late"]))
    rank.agent.send(_go(1))
    control.wait_go(0)
    assert control._replies == {}


def test_a_waiting_store_call_is_called_off_by_an_abort(rank: _Rank) -> None:
    control = rank.control
    aborted = threading.Event()
    control.start()
    call = control.call_id()
    reply = rank.waits(lambda: control.wait_reply(call, _LIMIT_S, aborted.is_set))
    aborted.set()
    control.wake()
    assert reply.result(_LIMIT_S).error == "the round was aborted"


def test_the_process_ends_when_its_agent_is_gone(rank: _Rank) -> None:
    rank.control.start()
    rank.agent.close()
    assert rank.ended.wait(_LIMIT_S)
    rank.control.send(Hello(pid=1))
    assert rank.codes == [70, 70]


def test_a_refusal_of_memory_is_raised_where_slots_are_awaited(rank: _Rank) -> None:
    rank.control.start()
    rank.agent.send(SlotsDenied(error="3 GB are needed"))
    with pytest.raises(NotEnoughMemory, match="3 GB are needed"):
        rank.control.take_grants(_LIMIT_S)
    with pytest.raises(InternalError):
        rank.control.take_grants(0.0)


def test_the_answer_about_a_save_is_taken_once_and_older_ones_are_forgotten(rank: _Rank) -> None:
    control = rank.control
    control.start()
    for step, reason in ((5, ""), (10, "busy"), (15, "")):
        rank.agent.send(SaveAnswer(round=2, step=step, reason=reason))
    rank.agent.send(SaveAnswer(round=3, step=1, reason="busy"))
    assert control.wait_answer(2, 10) == "busy"
    assert control.wait_answer(2, 15) == ""
    rank.agent.send(Abort(round=2, reason="rank 1 failed"))
    assert control.wait_answer(2, 5) is None
    assert control.wait_answer(2, 10) is None
    assert control.wait_answer(3, 1) == "busy"
