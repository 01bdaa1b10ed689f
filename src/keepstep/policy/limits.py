"""Time limits learned from what was seen, and forgiveness for a watcher that ran late.

Pure; the agent uses it. A limit has to stand far above anything usual, since ending a healthy rank
costs more than finding a hung one a little later. It allows for twelve times the median, so for the
first rare step that takes ten times as long, and for half as much again as the suspect limit, which
is three times the longest of the last ``WINDOW`` durations. A long outlier is forgotten after that
many.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

WINDOW = 256
MIN_SAMPLES = 3
SUSPECT_FACTOR = 3.0
SUSPECT_EXTRA_S = 1.0
KILL_OVER_SUSPECT = 1.5
KILL_OVER_MEDIAN = 12.0


class Limits(NamedTuple):
    """Seconds without progress until a rank is suspect, and until it is ended."""

    suspect_s: float
    kill_s: float


class Learned:
    """Durations of one phase, and the limits that follow from them."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=WINDOW)
        self._longest = self._typical = 0.0

    def add(self, seconds: float) -> None:
        """The phase took ``seconds`` and ended well."""
        self._seen.append(seconds)
        # Here, once a step, and not in ``limits``, which is asked for at every look.
        self._longest, self._typical = max(self._seen), statistics.median(self._seen)

    def __len__(self) -> int:
        return len(self._seen)

    def limits(self, floor_s: float, bound_s: float) -> Limits:
        """Both limits. The suspect limit is never above the other.

        Args:
            floor_s: Nobody is ended earlier.
            bound_s: The limit while fewer than ``MIN_SAMPLES`` durations are known, and the highest
                that is ever learned. A longer duration that ended well, or a higher floor, wins.
        """
        longest = self._longest
        suspect = kill = bound_s
        if len(self._seen) >= MIN_SAMPLES:
            suspect = SUSPECT_FACTOR * longest + SUSPECT_EXTRA_S
            usual = max(KILL_OVER_SUSPECT * suspect, KILL_OVER_MEDIAN * self._typical)
            kill = min(bound_s, usual)
        kill = max(floor_s, kill, longest)
        return Limits(min(suspect, kill), kill)

    def suspect_after(self, floor_s: float, bound_s: float) -> float:
        """Seconds without progress until a rank is suspect."""
        return self.limits(floor_s, bound_s).suspect_s

    def kill_after(self, floor_s: float, bound_s: float) -> float:
        """Seconds without progress until a rank is ended."""
        return self.limits(floor_s, bound_s).kill_s


class LearnedLimits:
    """What is known of every phase; sections learn under their own names.

    The first turn of a phase in a process (compilation, caches) is learned apart from the others:
    it neither raises their limit nor is held to it.
    """

    def __init__(self) -> None:
        self._phases: dict[tuple[str, str, bool], Learned] = {}

    def add(self, phase: str, seconds: float, *, label: str = "", first: bool = False) -> None:
        """A turn of ``phase`` (section ``label``) took ``seconds`` and ended well."""
        self._phases.setdefault((phase, label, first), Learned()).add(seconds)

    def of(
        self, phase: str, *, floor_s: float, bound_s: float, label: str = "", first: bool = False
    ) -> Limits:
        """The limits that hold in ``phase`` now; see ``Learned.limits``."""
        learned = self._phases.get((phase, label, first)) or Learned()
        return learned.limits(floor_s, bound_s)


def late(previous_tick: float, now: float, interval_s: float) -> float:
    """Seconds that must be forgiven because the watcher's last pause was too long.

    A machine that was frozen or overloaded held up the ranks too. A pause of up to twice the
    interval is usual and forgives nothing.
    """
    pause = now - previous_tick
    return pause - interval_s if pause > 2 * interval_s else 0.0


class Watch:
    """Idle times that leave out the spans in which the watcher itself did not run.

    Args:
        interval_s: How often ``tick`` is meant to be called.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._last: float | None = None
        self._missed: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def tick(self, now: float) -> float:
        """The watcher runs; returns the seconds that are forgiven for the pause before."""
        forgiven = 0.0 if self._last is None else late(self._last, now, self.interval_s)
        if forgiven:
            self._missed.append((now - forgiven, now))
        self._last = now
        return forgiven

    def idle(self, since: float, now: float) -> float:
        """Seconds from ``since`` to ``now`` in which the watcher ran."""
        missed = sum(max(0.0, min(end, now) - max(begin, since)) for begin, end in self._missed)
        return max(0.0, now - since - missed)
