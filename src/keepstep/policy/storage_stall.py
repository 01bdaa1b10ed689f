"""Whether storage takes anything: from looks at a mark that moves while it does. Pure.

Used by the agent for its writer and its coordinator, and by a rank for a writer of its own.
"""

from __future__ import annotations

from typing import Literal

News = Literal["", "stalled", "moves"]


class Stall:
    """One thing that waits for storage.

    Args:
        limit_s: How long the mark may stand still.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._mark: object = None
        self._since: float | None = None
        self.told = False
        """Whether it stands still, as far as was said."""
        self.idle_s = 0.0
        """How long it has stood still; with news that it moves, how long it did."""

    def look(self, mark: object | None, now: float) -> News:
        """What is new at ``now``.

        Args:
            mark: Anything that changes as storage takes something; None: nothing is waited for.
        """
        if mark is not None and mark == self._mark and self._since is not None:
            self.idle_s = now - self._since
            if self.told or self.idle_s < self._limit_s:
                return ""
            self.told = True
            return "stalled"
        if self._since is not None:
            self.idle_s = now - self._since
        self._mark, self._since = mark, None if mark is None else now
        if not self.told:
            return ""
        self.told = False
        return "moves"
