"""Where a Job reports to in a rank that NVRx's launcher started. Runs in the rank."""

from __future__ import annotations

from contextlib import AbstractContextManager

from keepstep.engines.nvrx.stopping import StopAgreement
from keepstep.ports import Heartbeat
from keepstep.rank.runtime import Runtime
from keepstep.shm import Phase


class AttachedProgress:
    """Implements ``rank.progress.Progress``; the wish to stop comes by the board or from another
    node's rank, and the ranks agree on the step among themselves."""

    def __init__(self, runtime: Runtime, heartbeat: Heartbeat) -> None:
        self._runtime = runtime
        self._heartbeat = heartbeat
        self._stopping = StopAgreement(runtime)

    def begin_step(self, step: int | None) -> None:
        """``step`` is in progress; None: no step's limit applies any more."""
        runtime = self._runtime
        runtime.driven = True  # a Job counts: optimizer steps no longer do
        if step is None:
            self._stopping.leave()
            self._heartbeat.close()
            return
        if self._stopping.round != runtime.recorder.round:
            self._stopping.watch(runtime.recorder.round or 0)
        self._heartbeat.beat(step)

    def end_step(self, step: int, loss: float | None) -> None:
        """``step`` is completed; a fault due in it that no optimizer step met fires first."""
        self._runtime.fire_due_faults(step)
        self._runtime.end_step(step, loss)

    def section(self, name: str) -> AbstractContextManager[None]:
        """A named span with its own category."""
        return self._heartbeat.section(name)

    def stop_due(self, step: int, round: int) -> bool:
        """Whether the run stops after ``step``; once asked, waits until all ranks agree."""
        stopping = self._stopping
        if not stopping.asked:
            number = self._runtime.board.stop_signal
            if not number:
                return False
            stopping.ask(number)
        self._runtime.enter(Phase.WAIT)
        return stopping.agreed() <= step
