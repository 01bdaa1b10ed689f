"""Where a Job reports to: the launcher's board and event ring, or nowhere in a plain script.

Runs in the rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from keepstep import events
from keepstep.clock import SYSTEM
from keepstep.ports import Heartbeat
from keepstep.rank.runtime import Runtime
from keepstep.shm import Phase
from keepstep.wire.messages import StopAck, StopAt


class Progress(Protocol):
    """What a Job tells about itself."""

    def begin_step(self, step: int | None) -> None:
        """``step`` is in progress; None: the loop is over and what follows is not a step."""

    def end_step(self, step: int, loss: float | None) -> None:
        """``step`` is completed."""

    def section(self, name: str) -> AbstractContextManager[None]:
        """A named span."""

    def stop_due(self, step: int, round: int) -> bool:
        """Whether the run stops after ``step``, agreed by all ranks."""


class NoProgress:
    """A script without launcher."""

    def begin_step(self, step: int | None) -> None:
        """Nobody watches."""

    def end_step(self, step: int, loss: float | None) -> None:
        """Nobody watches."""

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Nobody watches."""
        yield

    def stop_due(self, step: int, round: int) -> bool:
        """Nobody asks for a stop."""
        return False


class LaunchedProgress:
    """A rank of ``keepstep run``; ``heartbeat`` is the engine's."""

    def __init__(self, runtime: Runtime, heartbeat: Heartbeat) -> None:
        self._runtime = runtime
        self._heartbeat = heartbeat
        runtime.control.on_stop = self._answer

    def begin_step(self, step: int | None) -> None:
        """``step`` is in progress; None: no step's limit applies any more."""
        self._runtime.driven = True  # a Job counts: optimizer steps no longer do
        if step is None:
            self._heartbeat.close()
        else:
            self._heartbeat.beat(step)

    def end_step(self, step: int, loss: float | None) -> None:
        """``step`` is completed; a fault due in it that no optimizer step met fires first."""
        self._runtime.fire_due_faults(step)
        self._runtime.end_step(step, loss)

    def section(self, name: str) -> AbstractContextManager[None]:
        """A named span with its own limit and category."""
        return self._heartbeat.section(name)

    def stop_due(self, step: int, round: int) -> bool:
        """Whether the run stops after ``step``; waits until all ranks agree on the step."""
        stop = self._runtime.control.stop
        if stop is None or step < stop.step:
            return False
        self._runtime.enter(Phase.WAIT)
        agreed = self._runtime.control.wait_stop(step, round)
        return agreed is not None and agreed.step <= step

    def _answer(self, stop: StopAt) -> None:
        """Control thread: tell where this rank is."""
        if not stop.final:
            runtime = self._runtime
            ack = StopAck(inc=runtime.start.inc, step=stop.step, live=runtime.board.step)
            runtime.control.send(ack)


class SaveEvents:
    """Begin and end events around a copy of the state or a restore."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @contextmanager
    def saving(self, step: int, size: list[int]) -> Iterator[None]:
        """Around the staging copy of ``step``; ``size`` gets the bytes appended inside."""
        runtime = self._runtime
        begun = SYSTEM.mono()
        runtime.recorder.emit(events.CheckpointBegin(), step=step)
        runtime.enter(Phase.SAVE)
        yield
        stall = round(SYSTEM.mono() - begun, 6)
        runtime.recorder.emit(events.CheckpointStaged(stall_s=stall, bytes=sum(size)), step=step)

    @contextmanager
    def restoring(self, step: int, size: list[int]) -> Iterator[None]:
        """Around loading ``step`` from storage."""
        runtime = self._runtime
        begun = SYSTEM.mono()
        runtime.recorder.emit(events.RestoreBegin(tier="storage"), step=step)
        runtime.enter(Phase.LOAD)
        yield
        seconds = round(SYSTEM.mono() - begun, 6)
        runtime.recorder.emit(
            events.RestoreEnd(tier="storage", s=seconds, bytes=sum(size)), step=step
        )
