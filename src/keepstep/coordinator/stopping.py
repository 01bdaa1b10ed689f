"""Agreeing on the step to stop after: SIGTERM, eviction, Ctrl-C. Pure.

All ranks must complete the same step. One is named a little ahead of every rank's live step; if a
rank had passed it when it heard, a later one is named. Only when all have answered is it final.
"""

from __future__ import annotations

from keepstep.wire.messages import StopAck, StopAt


class StopVote:
    """One request to stop a world of ``world`` ranks.

    Args:
        signal: Name of the signal, for people.
    """

    def __init__(self, world: int, signal: str) -> None:
        self.signal = signal
        self._world = world
        self._margin = 2
        self._asked: StopAt | None = None
        self._live: dict[int, int] = {}

    def ask(self, live: int) -> StopAt:
        """Name a step ahead of ``live``; every call goes further ahead."""
        self._asked = StopAt(step=live + self._margin, final=False)
        self._margin *= 2
        self._live.clear()
        return self._asked

    def answered(self, rank: int, ack: StopAck) -> StopAt | None:
        """A rank told where it is; returns what all ranks must be told, if anything."""
        if self._asked is None or self._asked.final or ack.step != self._asked.step:
            return None
        self._live[rank] = ack.live
        if len(self._live) < self._world:
            return None
        newest = max(self._live.values())
        if newest > self._asked.step:
            return self.ask(newest)
        self._asked = StopAt(step=self._asked.step, final=True)
        return self._asked
