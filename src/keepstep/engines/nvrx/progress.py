"""Where a Job reports to in a rank that NVRx's launcher started. Runs in the rank."""

from __future__ import annotations

from contextlib import AbstractContextManager

from keepstep.ports import Heartbeat
from keepstep.rank.runtime import Runtime


class AttachedProgress:
    """Implements ``rank.progress.Progress``; the wish to stop comes by the board.

    The watching process writes the same step for all ranks, far enough ahead that none is past it.
    """

    def __init__(self, runtime: Runtime, heartbeat: Heartbeat) -> None:
        self._runtime = runtime
        self._heartbeat = heartbeat

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
        """A named span with its own category."""
        return self._heartbeat.section(name)

    def stop_due(self, step: int, round: int) -> bool:
        """Whether the run stops after ``step``."""
        stop = self._runtime.board.stop_step
        return 0 < stop <= step
