"""Saves begun by this rank, and what all ranks agree on before the next: which of them failed, and
whether it is begun or skipped.

Runs in the ranks of a script without a coordinator. Without an agreement one rank would raise, or
skip, while the others go on, and their collectives would no longer match.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from keepstep.clock import Clock
from keepstep.errors import SaveFailed
from keepstep.policy.skipping import skip_reason
from keepstep.rank import exchange
from keepstep.rank.save import Save


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the others before a save, as a few numbers.

    ``failed`` is the number of its first failed save (0: none), ``open`` how many it has still to
    work for, ``oldest`` the number of the first of these (0: none), with its ``step`` and age.
    """

    failed: int
    open: int
    oldest: int
    step: int
    age_ms: int

    def numbers(self) -> list[int]:
        """As ``exchange.numbers`` takes them."""
        return [self.failed, self.open, self.oldest, self.step, self.age_ms]


@dataclass(frozen=True, slots=True)
class Admission:
    """The same on every rank: saves that ``failed`` (step and error), and why the next one is
    skipped (empty: it is not)."""

    failed: list[tuple[int, SaveFailed]]
    reason: str


@dataclass(frozen=True, slots=True)
class _Begun:
    number: int
    save: Save
    at: float


def busy(reports: Sequence[Report], slots: int) -> str:
    """Why no save should begin now, empty if one may. Pure.

    Args:
        reports: Of every rank, by rank. slots: staging copies that each rank has.
    """
    rank = max(range(len(reports)), key=lambda one: reports[one].open)
    worst = reports[rank]
    return skip_reason(worst.open, slots, worst.step, worst.age_ms / 1000)


class Account:
    """Saves of this rank that are neither known to be committed nor told to have failed.

    Args:
        clock: Where time comes from.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun: list[_Begun] = []
        self._count = 0

    def add(self, save: Save) -> None:
        """A save was begun, on every rank."""
        self._count += 1
        self._begun.append(_Begun(self._count, save, self._clock.mono()))

    @property
    def saves(self) -> list[Save]:
        """All of them, the oldest first."""
        return [one.save for one in self._begun]

    def drop(self, save: Save) -> None:
        """It is over and told."""
        self._begun = [one for one in self._begun if one.save is not save]

    def report(self) -> Report:
        """Where this rank is."""
        failed = [one.number for one in self._begun if one.save.failure is not None]
        work = [one for one in self._begun if one.save.in_work]
        oldest = work[0] if work else None
        return Report(
            failed=failed[0] if failed else 0,
            open=len(work),
            oldest=oldest.number if oldest else 0,
            step=oldest.save.step if oldest else 0,
            age_ms=round((self._clock.mono() - oldest.at) * 1000) if oldest else 0,
        )

    def agree(self, rank: int, world: int, slots: int, *, skip: bool) -> Admission:
        """Compare notes with the other ranks: one small collective, two where a save failed.

        Args:
            rank: This rank. world: Number of ranks; 1: nobody is asked.
            slots: Staging copies of a rank. skip: Whether a save may be skipped.
        """
        mine = self.report()
        reports = [mine]
        if world > 1:
            told = exchange.numbers(mine.numbers())
            reports = [Report(**dict(zip(Report.__struct_fields__, n, strict=True))) for n in told]
        failed = self._failed(rank, world) if any(one.failed for one in reports) else []
        self._forget(rank, reports[0].oldest)
        return Admission(failed, busy(reports, slots) if skip else "")

    def _forget(self, rank: int, oldest: int) -> None:
        """Rank 0 knows what is committed: everything below its ``oldest`` open save."""
        committed = self._count + 1 if oldest == 0 else oldest
        self._begun = [
            one
            for one in self._begun
            if one.number >= committed or (one.save.in_work and rank != 0)
        ]

    def _failed(self, rank: int, world: int) -> list[tuple[int, SaveFailed]]:
        """What failed on any rank, in the words of the first that knows; it is dropped here."""
        mine = [
            (one.number, str(error))
            for one in self._begun
            if (error := one.save.failure) is not None
        ]
        everybody = [mine]
        if world > 1:
            heard = exchange.gather(msgspec.json.encode(mine))
            everybody = [msgspec.json.decode(one, type=list[tuple[int, str]]) for one in heard]
        words: dict[int, tuple[int, str]] = {}
        for other, told in enumerate(everybody):
            for number, text in told:
                words.setdefault(number, (other, text))
        result: list[tuple[int, SaveFailed]] = []
        for one in [one for one in self._begun if one.number in words]:
            other, text = words[one.number]
            error = one.save.failure or _of_other(one.save.step, other, text)
            one.save.give_up(error)
            result.append((one.save.step, error))
            self.drop(one.save)
        return result


def _of_other(step: int, other: int, text: str) -> SaveFailed:
    return SaveFailed(f"the save of step {step} failed on rank {other}: {text.rstrip('.')}")
