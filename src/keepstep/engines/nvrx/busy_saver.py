"""Saving and loading under NVRx's limits: neither is a step, both may take long. In the rank."""

from __future__ import annotations

from keepstep.engines import WhenBusy
from keepstep.engines.attached_saver import AttachedSaver
from keepstep.engines.nvrx.heartbeat import NvrxHeartbeat
from keepstep.rank.save import Save


class BusySaver:
    """Implements ``engines.Saver``; shows NVRx that the rank lives while another saver works.

    Args:
        saver: Does the work. heartbeat: the rank's.
    """

    def __init__(self, saver: AttachedSaver, heartbeat: NvrxHeartbeat) -> None:
        self._saver = saver
        self._heartbeat = heartbeat

    def prepare(self, state: dict[str, object]) -> None:
        """Make the memory for saves."""
        with self._heartbeat.busy():
            self._saver.prepare(state)

    def expect(self, step: int) -> None:
        """A save is due at the end of ``step``."""
        self._saver.expect(step)

    def mutates(self) -> None:
        """Return once the state may be changed by other means than an optimizer's step."""
        with self._heartbeat.busy():
            self._saver.mutates()

    def save(self, state: dict[str, object], step: int, when_busy: WhenBusy = "wait") -> Save:
        """Copy ``state`` and write it in the background, or skip that."""
        with self._heartbeat.busy():
            return self._saver.save(state, step, when_busy)

    def load(self, state: dict[str, object], *, strict: bool = True) -> int:
        """Fill ``state`` in place; returns the step it belongs to."""
        with self._heartbeat.busy():
            return self._saver.load(state, strict=strict)

    def poll(self) -> None:
        """A step was completed."""
        self._saver.poll()

    def finish(self, timeout_s: float) -> None:
        """Wait for the saves begun."""
        with self._heartbeat.busy():
            self._saver.finish(timeout_s)
