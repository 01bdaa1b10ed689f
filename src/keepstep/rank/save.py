"""A save as its caller sees it: begun, or skipped because storage is behind. Runs in the ranks."""

from __future__ import annotations

from keepstep.ports import PendingWrite


class Save:
    """Implements ``ports.PendingWrite``.

    Args:
        step: What was to be saved. pending: The save; None: it was skipped.
        reason: Why it was skipped.

    Attributes:
        step: The step.
        skipped: Whether nothing was begun. Then it is over at once, and not an error.
        reason: Why, in one sentence; empty if it was begun.
    """

    def __init__(self, step: int, pending: PendingWrite | None, reason: str = "") -> None:
        self.step = step
        self.skipped = pending is None
        self.reason = reason
        self._pending = pending

    def staged(self) -> bool:
        """Whether the state may change again."""
        return self._pending is None or self._pending.staged()

    def done(self) -> bool:
        """Whether it is committed or has failed, or was never begun."""
        return self._pending is None or self._pending.done()

    def wait(self, timeout_s: float) -> None:
        """Return when committed; at once if it was skipped.

        Raises:
            SaveFailed: it failed, or is not committed after ``timeout_s`` seconds.
        """
        if self._pending is not None:
            self._pending.wait(timeout_s)
