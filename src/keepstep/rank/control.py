"""A rank's end of its control socket: a reader thread, and what the main thread waits for.

The reader thread runs the abort at once (the main thread may be blocked in a collective) and hands
everything else to whoever waits. If the agent is gone, the process ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from keepstep.clock import SYSTEM
from keepstep.errors import InternalError, NotEnoughMemory
from keepstep.wire.channel import Channel, Closed
from keepstep.wire.messages import (
    FROM_RANK,
    TO_RANK,
    Abort,
    Finish,
    Go,
    SaveAnswer,
    SaveResult,
    SlotFree,
    SlotGrant,
    SlotsDenied,
    StopAt,
    StoreReply,
)

T = TypeVar("T")


class Control:
    """The rank's connection to its agent.

    Args:
        channel: The blocking channel that Start came on.
    """

    def __init__(self, channel: Channel[TO_RANK]) -> None:
        self._channel = channel
        self._changed = threading.Condition()
        self._go: Go | None = None
        self._finish: Finish | None = None
        self._replies: dict[int, StoreReply] = {}
        self._waiting: set[int] = set()
        self._grants: list[tuple[int, int, int]] = []
        self._granted = 0
        """Slots that belong to the answer that is coming in."""
        self._denied = ""
        self._answers: dict[tuple[int, int], str] = {}
        self._next_call = 0
        self.aborting_round = 0
        """Newest round that is being aborted: whatever fails in it is a consequence."""
        self.aborted_round = 0
        """Newest round whose groups have been shut down."""
        self.stop: StopAt | None = None
        self.on_abort: Callable[[Abort], None] = lambda _: None
        self.on_slot_free: Callable[[int], None] = lambda _: None
        self.on_saved: Callable[[SaveResult], None] = lambda _: None
        self.on_stop: Callable[[StopAt], None] = lambda _: None
        self._thread = threading.Thread(target=self._run, name="keepstep-control", daemon=True)

    def start(self) -> None:
        """Start the reader thread; callbacks must be set before."""
        self._thread.start()

    def send(self, message: FROM_RANK) -> None:
        """Send to the agent; ends the process if the agent is gone."""
        try:
            self._channel.send(message)
        except Closed:
            os._exit(70)

    def _run(self) -> None:
        while self._channel.read():
            for message in self._channel.messages():
                self._handle(message)
        os._exit(70)

    def _handle(self, message: TO_RANK) -> None:
        if isinstance(message, Abort):
            self.aborting_round = max(self.aborting_round, message.round)
            self.on_abort(message)
            with self._changed:
                self.aborted_round = max(self.aborted_round, message.round)
        elif isinstance(message, StopAt):
            self.stop = message
            self.on_stop(message)
        elif isinstance(message, SlotFree):
            self.on_slot_free(message.slot)
        elif isinstance(message, SaveResult):
            self.on_saved(message)
        with self._changed:
            if isinstance(message, Go):
                self._go = message
            elif isinstance(message, Finish):
                self._finish = message
            elif isinstance(message, StoreReply):
                if message.id in self._waiting:
                    self._replies[message.id] = message
            elif isinstance(message, SlotGrant):
                self._granted = message.of
                self._grants.append((message.slot, message.size, self._channel.take_fd()))
            elif isinstance(message, SlotsDenied):
                self._denied = message.error
            elif isinstance(message, SaveAnswer):
                self._answers[message.round, message.step] = message.reason
            self._changed.notify_all()

    def _wait(self, take: Callable[[], T | None], timeout_s: float | None) -> T | None:
        """Wait until ``take`` (called under the lock) gives something."""
        deadline = None if timeout_s is None else SYSTEM.mono() + timeout_s
        with self._changed:
            while True:
                found = take()
                if found is not None:
                    return found
                left = None if deadline is None else deadline - SYSTEM.mono()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)

    def wake(self) -> None:
        """Let waiters look again."""
        with self._changed:
            self._changed.notify_all()

    def wait_go(self, after_round: int) -> Go:
        """Wait for a round later than ``after_round``."""

        def take() -> Go | None:
            return self._go if self._go and self._go.round > after_round else None

        go = self._wait(take, None)
        assert go is not None
        return go

    def wait_abort(self, round: int) -> None:
        """Wait until ``round`` is aborted."""
        self._wait(lambda: True if self.aborted_round >= round else None, None)

    def wait_finish(self, round: int) -> Finish | None:
        """Wait for the end of the job; None if ``round`` is aborted first."""

        def take() -> Finish | bool | None:
            return self._finish or (True if self.aborted_round >= round else None)

        found = self._wait(take, None)
        return found if isinstance(found, Finish) else None

    def wait_stop(self, step: int, round: int) -> StopAt | None:
        """Wait until everybody agreed on a stop step, or it moved past ``step``, or an abort."""

        def take() -> StopAt | bool | None:
            stop = self.stop
            if stop is not None and (stop.final or stop.step > step):
                return stop
            return True if self.aborted_round >= round else None

        found = self._wait(take, None)
        return found if isinstance(found, StopAt) else None

    def take_grants(self, timeout_s: float) -> list[tuple[int, int, int]]:
        """Wait for the staging slots that were asked for: (slot, size, descriptor).

        Raises:
            NotEnoughMemory: the node has no memory for them.
            InternalError: no answer came in time.
        """

        def take() -> tuple[list[tuple[int, int, int]], str] | None:
            if self._denied:
                error, self._denied = self._denied, ""
                return [], error
            if not self._granted or len(self._grants) < self._granted:
                return None
            taken, self._grants, self._granted = self._grants, [], 0
            return taken, ""

        found = self._wait(take, timeout_s)
        if found is None:
            raise InternalError(f"the agent gave no staging slots within {timeout_s:.0f} s")
        grants, error = found
        if error:
            raise NotEnoughMemory(error)
        return grants

    def wait_answer(self, round: int, step: int) -> str | None:
        """Wait for the answer to the SaveAsk of ``step``: why it is skipped, empty if it is not.

        None if ``round`` is aborted first. Answers of older rounds and steps are forgotten.
        """

        def take() -> str | bool | None:
            if (round, step) in self._answers:
                reason = self._answers[round, step]
                self._answers = {key: v for key, v in self._answers.items() if key > (round, step)}
                return reason
            return True if self.aborted_round >= round else None

        found = self._wait(take, None)
        return found if isinstance(found, str) else None

    def call_id(self) -> int:
        """A fresh id for a store call."""
        with self._changed:
            self._next_call += 1
            self._waiting.add(self._next_call)
            return self._next_call

    def wait_reply(self, call: int, timeout_s: float, stopped: Callable[[], bool]) -> StoreReply:
        """Wait for the reply to store call ``call``; an error reply if ``stopped`` turns true."""

        def take() -> StoreReply | None:
            if call in self._replies:
                return self._replies.pop(call)
            return StoreReply(id=call, error="the round was aborted") if stopped() else None

        reply = self._wait(take, timeout_s)
        with self._changed:
            self._waiting.discard(call)
            self._replies.pop(call, None)
        return reply or StoreReply(id=call, error=f"no answer within {timeout_s:.1f} s")
