"""Which saves are in flight, and when one may be committed. Pure; the coordinator owns it.

A version is committed when every rank's shard is durable. A restart closes every version above the
step it resumes from: what of it arrives later is dropped.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from keepstep.checkpoint.layout import folder_names
from keepstep.policy.skipping import skip_reason
from keepstep.wire.types import Version

_REMEMBERED = 16
"""Answers that are kept although every rank has them."""


@dataclass(slots=True)
class _Save:
    begun: float
    staged: set[int] = field(default_factory=set)
    durable: set[int] = field(default_factory=set)
    folder: str = ""
    bytes: int = 0
    committing: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """All shards of ``version`` are durable: publish its manifest.

    ``in_flight`` are folder names that unfinished saves may have: not to be cleaned up.
    """

    version: Version
    folder: str
    in_flight: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Settled:
    """The save of ``step`` is committed (``error`` empty) or failed."""

    step: int
    error: str
    bytes: int = 0
    save_s: float = 0.0
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """Whether the save of a step may begin: ``reason`` is empty, or says why it is skipped.

    ``first``: nobody has asked for it before, so this is when it was decided.
    """

    reason: str
    first: bool


@dataclass(slots=True)
class _Writing:
    """Slots in use: a version's shards that are staged and neither durable nor refused."""

    begun: float
    ranks: set[int] = field(default_factory=set)


class Saves:
    """State of all versions being saved by a world of ``world`` ranks.

    Args:
        world: Number of ranks. limit_s: how long a save may take.
        slots: Staging copies that a rank has.
    """

    def __init__(self, world: int, limit_s: float, slots: int = 2) -> None:
        self._world = world
        self._limit_s = limit_s
        self._slots = slots
        self._round = 1
        self._writing: dict[Version, _Writing] = {}
        self._admitted: dict[int, float] = {}
        """Steps of this round whose save may begin and has not: when that was said."""
        self._asked: dict[int, tuple[str, set[int]]] = {}
        """By step of this round what was answered, and to which ranks."""
        self._open: dict[Version, _Save] = {}
        self._closed_above: tuple[int, int] = (0, 0)
        self._failed: dict[Version, tuple[str, set[int]]] = {}
        """Failed saves that are still to be staged by some ranks: the error, and those ranks."""
        self.committed = 0
        """Newest step that is committed."""
        self.failed_in_a_row = 0
        """Saves that failed since the last one that worked."""

    def _save(self, version: Version, now: float) -> _Save | None:
        if self._closed(version):
            return None
        if version.round == self._round:
            self._admitted.pop(version.step, None)
        return self._open.setdefault(version, _Save(begun=now))

    def _closed(self, version: Version) -> bool:
        closed_round, resume = self._closed_above
        return version.round < closed_round and version.step > resume

    # --- skipping -------------------------------------------------------------------------------

    def limit_slots(self, slots: int) -> None:
        """Some rank has only ``slots`` staging copies."""
        self._slots = min(self._slots, slots)

    def ask(self, rank: int, round: int, step: int, now: float) -> Asked | None:
        """May the save that is due at ``step`` begin? Decided once, when the first rank asks.

        None for another round than the present one: its ranks are on their way out of it.
        """
        if round != self._round:
            return None
        first = step not in self._asked
        if first:
            reason = self._busy(now)
            self._asked[step] = (reason, set())
            if not reason:
                self._admitted[step] = now
            self._forget_answers()
        reason, told = self._asked[step]
        told.add(rank)
        return Asked(reason, first)

    def _busy(self, now: float) -> str:
        begun = {version: save.begun for version, save in self._open.items()}
        begun |= {version: one.begun for version, one in self._writing.items()}
        known = [(at, version.step) for version, at in begun.items()]
        known += [(at, step) for step, at in self._admitted.items()]
        at, step = min(known, default=(now, 0))
        return skip_reason(len(known), self._slots, step, now - at)

    def _forget_answers(self) -> None:
        """Drop the oldest answers that every rank has."""
        for step, (_, told) in list(self._asked.items())[:-_REMEMBERED]:
            if len(told) == self._world:
                del self._asked[step]

    def shard_over(self, rank: int, version: Version) -> None:
        """The writer is done with a rank's shard, well or not: its slot is free."""
        writing = self._writing.get(version)
        if writing is not None:
            writing.ranks.discard(rank)
            if not writing.ranks:
                del self._writing[version]

    # --- the course of a save -------------------------------------------------------------------

    def staged(self, rank: int, version: Version, now: float) -> str:
        """A rank has copied its shard; returns why the save failed before, if it did."""
        self._writing.setdefault(version, _Writing(begun=now)).ranks.add(rank)
        error, missing = self._failed.get(version, ("", set()))
        if rank in missing:
            # Its part of a save that is over: it must neither open it again nor count as another.
            missing.remove(rank)
            if not missing:
                del self._failed[version]
            return error
        save = self._save(version, now)
        if save is not None:
            save.staged.add(rank)
        return ""

    def durable(
        self, rank: int, version: Version, folder: str, size: int, now: float
    ) -> Ready | None:
        """A rank's shard is on storage; Ready when it was the last one."""
        self.shard_over(rank, version)
        save = self._open.get(version)
        if save is None:
            return None
        save.durable.add(rank)
        save.folder = folder
        save.bytes += size
        if len(save.durable) == self._world and not save.committing:
            save.committing = True
            return Ready(version, folder, self._in_flight())
        return None

    def _in_flight(self) -> frozenset[str]:
        names = (itertools.islice(folder_names(version), 4) for version in self._open)
        return frozenset(itertools.chain.from_iterable(names))

    def failed(self, version: Version, error: str) -> Settled | None:
        """A shard could not be written, or the manifest was refused."""
        save = self._open.pop(version, None)
        if save is None:
            return None
        missing = set(range(self._world)) - save.staged - save.durable
        if missing:
            self._failed[version] = (error, missing)
        self.failed_in_a_row += 1
        return Settled(version.step, error)

    def commit_done(self, version: Version, now: float) -> Settled | None:
        """The manifest is published."""
        save = self._open.pop(version, None)
        if not self._closed(version):
            self.committed = max(self.committed, version.step)
        self.failed_in_a_row = 0
        if save is None:
            return None
        return Settled(version.step, "", save.bytes, now - save.begun, save.folder)

    def late(self, now: float) -> list[Settled]:
        """Give up saves that are unfinished for too long."""
        over = [v for v, s in self._open.items() if now - s.begun > self._limit_s]
        error = f"not durable on all {self._world} ranks after {self._limit_s:.0f} s"
        return [s for v in over if (s := self.failed(v, error)) is not None]

    def will_finish(self) -> bool:
        """Whether a version is staged by every rank and so can still commit without them."""
        return any(len(s.staged | s.durable) == self._world for s in self._open.values())

    def pending(self, step: int) -> bool:
        """Whether the save of ``step`` is not settled yet."""
        return any(version.step == step for version in self._open)

    def resume(self, step: int, round: int) -> list[int]:
        """Round ``round`` resumes from ``step``: drop newer versions; returns their steps."""
        self._closed_above = (round, step)
        self._round = round
        self._admitted.clear()
        self._asked.clear()
        self.committed = step
        self._failed.clear()
        dropped = [version for version in self._open if version.step > step]
        for version in dropped:
            del self._open[version]
        return sorted({version.step for version in dropped})
