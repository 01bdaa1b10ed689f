"""Whether a save copies while the next step computes, or at once: by what each costs here.

Pure; used in the ranks. The cost of a save is the time from one optimizer step to the next with the
save in between, over the usual time between two steps. So everything counts that training pays: the
stall at the call, cores and memory that the copy takes away, and waiting for its end. The first
saves try both ways in turn; then the cheaper one is taken, and the other is measured afresh, at
first soon and then more and more rarely.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import Literal

Mode = Literal["overlap", "blocking"]
"""``overlap``: while the next step computes. ``blocking``: at once, before training goes on."""
MINIMUM = 3
"""Saves of each kind that are measured before one is preferred, and steps without a save."""
WINDOW = 7
"""Saves of each kind that are remembered."""
STEPS = 64
"""Steps without a save that are remembered."""
WARM_UP = 2
"""Saves that are not measured: memory is still being made, and other things start too."""
AGAIN_AFTER = 10
"""Saves after which the other way is measured again for the first time; then after twice as many,
and so on up to ``AGAIN_MOST``."""
AGAIN_MOST = 320


@dataclass(frozen=True, slots=True)
class Choice:
    """How a save is copied, and why: ``reason`` is for people."""

    mode: Mode
    reason: str


class CopyPolicy:
    """Chooses for each save of a process.

    Args:
        wanted: What the user asked for.
    """

    def __init__(self, wanted: Literal["auto", "overlap", "blocking"] = "auto") -> None:
        self._wanted = wanted
        self._forbidden = ""
        self._costs: dict[Mode, deque[float]] = {
            "overlap": deque(maxlen=WINDOW),
            "blocking": deque(maxlen=WINDOW),
        }
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._warm_up = WARM_UP
        self._again_after = AGAIN_AFTER
        self._decided = 0
        """Saves since both ways were known."""
        self._last: float | None = None
        self._saves: list[Mode] = []
        self._excluded_s = 0.0

    def choose(self, *, beside: bool = False) -> Choice:
        """How the save that begins now is to be copied; ``beside``: it takes no core of the host.

        A copy that a GPU does by itself is not worth measuring: it costs next to nothing, and
        waiting for it costs all that the GPU has still to do.
        """
        if self._forbidden:
            return Choice("blocking", self._forbidden)
        if self._wanted != "auto":
            return Choice(self._wanted, f"checkpoint.copy is {self._wanted}")
        if beside:
            return Choice("overlap", "the GPU copies beside its other work")
        measured = self._measured()
        if measured is not None:
            return measured
        cost = {name: max(0.0, statistics.median(seen)) for name, seen in self._costs.items()}
        cheaper: Mode = "overlap" if cost["overlap"] <= cost["blocking"] else "blocking"
        self._decided += 1
        if self._decided >= self._again_after:
            self._decided = 0
            self._again_after = min(2 * self._again_after, AGAIN_MOST)
            self._costs["blocking" if cheaper == "overlap" else "overlap"].clear()
        what = "a save costs" if self.step_s else "a step with a save takes"
        in_ms = {name: f"{seconds * 1e3:.0f}" for name, seconds in cost.items()}
        found = f"{what} {in_ms['overlap']} ms with overlap and {in_ms['blocking']} blocking"
        return Choice(cheaper, found)

    def _measured(self) -> Choice | None:
        """What is to be measured next, if too little is known."""
        overlap, blocking = self._costs["overlap"], self._costs["blocking"]
        if min(len(overlap), len(blocking)) >= MINIMUM:
            return None
        mode: Mode = "overlap" if len(overlap) <= len(blocking) else "blocking"
        return Choice(mode, f"measuring, {len(self._costs[mode]) + 1} of {MINIMUM}")

    def began(self, mode: Mode, *, excluded_s: float = 0.0) -> None:
        """A save was begun in ``mode``.

        Args:
            mode: As chosen.
            excluded_s: Time in it that has nothing to do with copying: waiting for a free slot.
        """
        self._saves.append(mode)
        self._excluded_s += excluded_s

    def step(self, now: float) -> None:
        """An optimizer steps, and waits for no copy any more. ``now`` in seconds."""
        last, saves, excluded = self._last, self._saves, self._excluded_s
        self._last, self._saves, self._excluded_s = now, [], 0.0
        if last is None:
            return
        length = now - last - excluded
        if not saves:
            self._steps.append(length)
            if len(self._steps) == MINIMUM:  # until now the costs were whole steps
                for seen in self._costs.values():
                    seen.clear()
        elif self._warm_up:
            self._warm_up -= 1
        elif len(saves) == 1:
            self._costs[saves[0]].append(length - self.step_s)

    def pause(self) -> None:
        """What comes before the next step is not to be measured."""
        self._last = None

    def forbid_overlap(self, reason: str) -> None:
        """From now on every copy blocks, whatever was asked for."""
        self._forbidden = self._forbidden or reason

    @property
    def step_s(self) -> float:
        """The usual time between two steps, in seconds; 0 while it is not known."""
        known = len(self._steps) >= MINIMUM
        return statistics.median(self._steps) if known else 0.0
