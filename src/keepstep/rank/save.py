"""A save as its caller sees it: begun, or skipped because storage is behind. Runs in the ranks."""

from __future__ import annotations

from keepstep.errors import SaveFailed
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
        self._given_up: SaveFailed | None = None

    def staged(self) -> bool:
        """Whether the state may change again."""
        return self._pending is None or self._pending.staged()

    def done(self) -> bool:
        """Whether it is committed or has failed, or was never begun."""
        return self._pending is None or self._given_up is not None or self._pending.done()

    def wait(self, timeout_s: float) -> None:
        """Return when committed; at once if it was skipped.

        Raises:
            SaveFailed: it failed, or is not committed after ``timeout_s`` seconds.
        """
        if self._given_up is not None:
            raise self._given_up
        if self._pending is not None:
            self._pending.wait(timeout_s)

    # --- for who keeps account of saves -----------------------------------------------------------

    @property
    def in_work(self) -> bool:
        """Whether this rank has still to do something for it; looks at no storage if it can."""
        writing = getattr(self._pending, "writing", None)
        return not self.done() if writing is None else bool(writing)

    @property
    def failure(self) -> SaveFailed | None:
        """Why it failed, as far as this rank knows; looks at no storage if it can."""
        if self._given_up is not None or self._pending is None:
            return self._given_up
        if hasattr(self._pending, "error"):
            known: SaveFailed | None = self._pending.error
            return known
        if self._pending.done():
            try:
                self._pending.wait(0.0)
            except SaveFailed as error:
                return error
        return None

    def give_up(self, error: SaveFailed) -> None:
        """It failed on another rank: nobody waits for it any more."""
        self._given_up = self._given_up or error
        failed = getattr(self._pending, "failed", None)
        if failed is not None:
            failed(error)
