"""Goodput: splits the wall time of a run so that every instant is in exactly one category.

Pure. The rules, in the order in which they are applied:

- ``startup``: from the start of a launch until its last rank begins its first step.
- ``productive`` or ``lost_work``: steps, on the timeline of one reference rank (the lowest). A step
  is lost if a later round resumed below it, or if not every rank completed it.
- ``detect``: from the fault until it was known; ``restart``: from then until all ranks of the next
  round are told to go, and until they step, less ``restore``, the time in which any rank loads.
- ``checkpoint_stall`` and ``section:NAME`` of the reference rank are taken out of what they
  interrupt, whether that step was lost or not. Waiting for the last save at the end of a launch is
  ``checkpoint_stall`` too.
- ``idle``: between two launches, and while a launcher that has nothing left to do ends.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from keepstep.errors import ExitCode
from keepstep.events import Event
from keepstep.goodput.gather import STALL, gather
from keepstep.goodput.timeline import Launch, Restart, Round, Span

CATEGORIES = (
    "productive",
    "lost_work",
    "startup",
    "detect",
    "restart",
    "restore",
    STALL,
    "idle",
)
_SETTLED = (ExitCode.OK, ExitCode.STOPPED_ON_NOTICE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounting:
    """The split. ``categories_ns`` adds up to ``end_ns - begin_ns``; times are nanoseconds.

    Categories: those of ``CATEGORIES`` and one ``section:NAME`` for each section seen.
    """

    begin_ns: int
    end_ns: int
    categories_ns: dict[str, int]

    @property
    def wall_ns(self) -> int:
        """From the first to the last evidence."""
        return self.end_ns - self.begin_ns

    @property
    def goodput(self) -> float:
        """Productive share of the wall time, 0 to 1; 0 for a run without any length."""
        return self.categories_ns["productive"] / self.wall_ns if self.wall_ns else 0.0


def account(events: Iterable[Event]) -> Accounting:
    """Split the time from the first to the last evidence in ``events`` (in any order)."""
    return split(gather(events))


def split(launches: list[Launch]) -> Accounting:
    """The same for a timeline that was gathered already."""
    begin = min((launch.begin for launch in launches), default=0)
    end = max((launch.end for launch in launches), default=0)
    painter = _Painter(begin, end)
    kept = _kept_steps(launches)
    for launch in launches:
        painter.fill(launch.begin, "idle")
        _Walk(painter, launch, kept).run()
    painter.fill(end, "idle")
    return Accounting(begin_ns=begin, end_ns=end, categories_ns=painter.totals)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Up to which step a round's work was completed, and up to which it was kept."""

    completed: int
    kept: int


def _kept_steps(launches: list[Launch]) -> dict[int, _Kept]:
    """For each round that ran, by ``id``."""
    kept: dict[int, _Kept] = {}
    lowest: int | None = None
    following: int | None = None
    for launch in reversed(launches):
        for entry in reversed(launch.ran):
            newest = max(entry.newest.values(), default=0)
            completed = entry.completed()
            if following is not None:  # nobody resumes from a step that was not completed
                completed = max(completed, min(following, newest))
            if entry is launch.ran[-1] and launch.exit_code in _SETTLED:
                completed = newest
            kept[id(entry)] = _Kept(completed, completed if lowest is None else lowest)
            following = entry.resumed_from()
            if following is not None:
                lowest = following if lowest is None else min(lowest, following)
    return kept


class _Painter:
    """Fills the time from left to right, each instant once; never leaves ``begin`` to ``end``."""

    def __init__(self, begin: int, end: int) -> None:
        self.at = begin
        self._end = end
        self._over: deque[Span] = deque()
        self.totals = dict.fromkeys(CATEGORIES, 0)

    def overlay(self, spans: Iterable[Span]) -> None:
        """Spans that take precedence in what is filled next; where two overlap, the later begun."""
        self._over = deque(_flatten(spans))

    def fill(self, until: int, category: str, *, plain: bool = False) -> None:
        """Fill up to ``until``; with ``plain`` nothing takes precedence."""
        until = min(until, self._end)
        while self.at < until and self._over and self._over[0].begin < until:
            span = self._over[0]
            if not plain:
                self._add(span.begin, category)
                self._add(min(span.end, until), span.name)
            if span.end > until:
                break
            self._over.popleft()
        self._add(until, category)

    def _add(self, until: int, category: str) -> None:
        if until > self.at:
            self.totals[category] = self.totals.get(category, 0) + until - self.at
            self.at = until


def _flatten(spans: Iterable[Span]) -> list[Span]:
    """Disjoint pieces in time order; at each instant the span that began last wins."""
    ordered = sorted((s for s in spans if s.end > s.begin), key=lambda s: (s.begin, -s.end, s.name))
    cuts = sorted({t for span in ordered for t in (span.begin, span.end)})
    pieces: list[Span] = []
    open_spans: list[tuple[int, int, Span]] = []
    index = 0
    for begin, end in itertools.pairwise(cuts):
        while index < len(ordered) and ordered[index].begin <= begin:
            heapq.heappush(open_spans, (-ordered[index].begin, -index, ordered[index]))
            index += 1
        while open_spans and open_spans[0][2].end <= begin:
            heapq.heappop(open_spans)
        if open_spans:
            pieces.append(Span(begin, end, open_spans[0][2].name))
    return pieces


class _Walk:
    """Goes through one launch: prepare, step, detect, restart, and again."""

    def __init__(self, painter: _Painter, launch: Launch, kept: dict[int, _Kept]) -> None:
        self._painter = painter
        self._launch = launch
        self._kept = kept
        self._current: Round | None = None
        self._restarting = False
        self._prepare = "startup"

    def run(self) -> None:
        turns: list[tuple[int, int, int, Round | Restart]] = []
        for entry in self._launch.ran:
            turns.append((entry.ready or 0, entry.number, 0, entry))
        for at, restart in enumerate(self._launch.restarts):
            number = -1 if restart.round is None else restart.round
            turns.append((restart.begin, number, 1 + at, restart))
        for *_, turn in sorted(turns, key=lambda turn: turn[:3]):
            if isinstance(turn, Round):
                self._ready(turn)
            else:
                self._restart(turn)
        self._finish()

    def _ready(self, entry: Round) -> None:
        self._leave(entry.ready or 0)
        self._current, self._restarting = entry, False
        spans = list(entry.reference_spans())
        start = entry.start_of_steps()
        limit = self._launch.end if start is None else start
        loads = [*entry.restores, *(Span(t, limit, "restore") for t in entry.loading.values())]
        spans += [Span(load.begin, min(load.end, limit), load.name) for load in loads]
        self._painter.overlay(spans)

    def _restart(self, restart: Restart) -> None:
        self._leave(restart.fault)
        if not self._restarting:
            self._painter.fill(restart.begin, "detect", plain=True)
        self._current, self._restarting, self._prepare = None, True, "restart"
        self._painter.fill(restart.begin, "restart", plain=True)

    def _leave(self, fault: int) -> None:
        """Account for what went on until ``fault``."""
        if self._current is not None:
            self._steps(self._current, fault)
            self._painter.fill(fault, "lost_work")
        elif self._restarting:
            self._painter.fill(fault, "restart", plain=True)
        else:
            self._painter.fill(fault, "startup")

    def _steps(self, entry: Round, until: int) -> None:
        start = entry.start_of_steps()
        self._painter.fill(until if start is None else min(start, until), self._prepare)
        record = self._kept[id(entry)]
        for step in sorted(step for step in entry.ends if step <= record.completed):
            category = "productive" if step <= record.kept else "lost_work"
            self._painter.fill(entry.ends[step][1], category)

    def _finish(self) -> None:
        launch, painter = self._launch, self._painter
        if self._current is None:
            painter.fill(launch.end, "restart" if self._restarting else "startup", plain=True)
            return
        self._steps(self._current, launch.end)
        if launch.exit_code in _SETTLED:
            painter.fill(max(launch.commits, default=launch.begin), STALL)
        elif launch.exit_code is not None:
            painter.fill(launch.last_rank_event, "lost_work")
        else:  # killed, or still running: the step in progress counts once it is completed
            painter.fill(launch.end, "lost_work")
        painter.fill(launch.end, "idle")
