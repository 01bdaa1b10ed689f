"""The only place that reads time or sleeps."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from; tests pass a fake."""

    def wall(self) -> float:
        """Seconds since the epoch."""

    def mono(self) -> float:
        """Seconds of a clock that never goes back, the same for all processes of one machine."""

    def sleep(self, seconds: float) -> None:
        """Return after at least ``seconds``."""


class SystemClock:
    """The machine's clocks. ``mono`` is CLOCK_MONOTONIC, shared by all processes of the node."""

    def wall(self) -> float:
        return time.time()

    def mono(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


SYSTEM: Clock = SystemClock()
