"""A clock that moves only when it is told to. Runs in tests."""

from __future__ import annotations


class FakeClock:
    """Implements ``clock.Clock``; ``sleep`` returns at once and moves both clocks.

    Args:
        wall: Seconds since the epoch to begin with.
        mono: Seconds of the monotonic clock to begin with.
    """

    def __init__(self, wall: float = 1_700_000_000.0, mono: float = 1000.0) -> None:
        self._wall = wall
        self._mono = mono
        self.slept: list[float] = []
        """Lengths of all sleeps, in seconds."""

    def wall(self) -> float:
        """Seconds since the epoch."""
        return self._wall

    def mono(self) -> float:
        """Seconds of a clock that never goes back."""
        return self._mono

    def sleep(self, seconds: float) -> None:
        """Note the sleep and move on by ``seconds`` (not back, as a real sleep)."""
        self.slept.append(seconds)
        self.advance(max(0.0, seconds))

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back by {-seconds} s; use set_wall for a bad clock")
        self._wall += seconds
        self._mono += seconds

    def set_wall(self, wall: float) -> None:
        """Put the wall clock elsewhere, also back, as a time service may; ``mono`` goes on."""
        self._wall = wall
