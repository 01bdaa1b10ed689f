"""The faults of a run: what happened, how it was found and answered, what it cost. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from keepstep.events import Event
from keepstep.goodput.gather import gather
from keepstep.goodput.timeline import Injected, Launch, Restart, Round


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault. Seconds and steps are None where the events do not tell.

    ``kind`` is the injected fault's kind, else the cause that was found; ``rank`` the injected or
    guilty rank (None: nobody is blamed). ``step`` is the newest step that any rank had begun,
    ``level`` the rung of the recovery ladder (None: never detected). ``detect_s`` runs from the
    injection until the failure was known, ``recover_s`` from the fault until the last rank
    completed a step again. ``steps_lost`` counts the step that was cut off. ``survivors_kept`` is
    whether every rank that was not hit kept its process.
    """

    kind: str
    rank: int | None
    step: int | None
    level: str | None
    detect_s: float | None
    recover_s: float | None
    steps_lost: int | None
    survivors_kept: bool | None
    cause: str | None
    injected: bool
    consequences: list[int]
    reason: str
    line: str


def faults(events: Iterable[Event]) -> list[Fault]:
    """All faults in ``events`` (in any order), oldest first."""
    return listed(gather(events))


def listed(launches: list[Launch]) -> list[Fault]:
    """The same for a timeline that was gathered already."""
    entries: list[tuple[int, Fault]] = []
    for at, launch in enumerate(launches):
        later = [entry for following in launches[at + 1 :] for entry in following.ran]
        for restart in launch.restarts:
            if restart.inferred:
                continue
            t = restart.injected.t if restart.injected else restart.begin
            first = _answered(launch, restart, later)
            entries.append((t, first))
            entries += [(f.t, _also(launch, restart, f, first)) for f in restart.also]
        entries += [(f.t, _undetected(f)) for f in launch.injected if not f.matched]
    return [fault for _, fault in sorted(entries, key=lambda entry: entry[0])]


def _answered(launch: Launch, restart: Restart, later: list[Round]) -> Fault:
    cause, injected = restart.cause, restart.injected
    guilty = None if cause is None or cause.guilty < 0 else cause.guilty
    found = restart.first_kind if cause is None else cause.cause
    step = cause.step if cause else _newest_begun(launch, restart)
    after = launch.round_after(restart.begin)
    start = restart.fault if injected is None else injected.t
    return Fault(
        kind=injected.kind if injected else found,
        rank=injected.rank if injected else guilty,
        step=step,
        level=cause.level if cause else None,
        detect_s=max(0, restart.begin - injected.t) / 1e9 if injected else None,
        recover_s=_recovery(launch, restart, start),
        steps_lost=_lost(step, after or next(iter(later), None)),
        survivors_kept=_survivors_kept(launch, restart, after),
        cause=found,
        injected=injected is not None,
        consequences=list(cause.consequences) if cause else [],
        reason=cause.reason if cause else "",
        line=cause.line if cause else "",
    )


def _also(launch: Launch, restart: Restart, injected: Injected, first: Fault) -> Fault:
    """A fault that a restart answered, although it was begun for another one."""
    found = injected.found
    known = max(restart.begin, injected.t) if found is None else found.t
    died = found is not None and found.cause in ("killed", "oom", "exit", "hang")
    return replace(
        first,
        kind=injected.kind,
        rank=injected.rank,
        level="rank" if died and first.level in ("kept", "rerun") else first.level,
        detect_s=(known - injected.t) / 1e9,
        recover_s=_recovery(launch, restart, injected.t),
        cause=found.cause if found else first.cause,
        injected=True,
        line="",
    )


def _undetected(injected: Injected) -> Fault:
    return Fault(
        kind=injected.kind,
        rank=injected.rank,
        step=injected.step,
        level=None,
        detect_s=None,
        recover_s=None,
        steps_lost=None,
        survivors_kept=None,
        cause=None,
        injected=True,
        consequences=[],
        reason="",
        line="",
    )


def _newest_begun(launch: Launch, restart: Restart) -> int | None:
    """For a restart whose cause was never written: the step after the newest completed one."""
    before = launch.round_before(restart.begin)
    if before is None:
        return None
    return max(before.newest.values(), default=before.resumed_from() or 0) + 1


def _lost(step: int | None, after: Round | None) -> int | None:
    resume = after.resumed_from() if after else None
    return None if step is None or resume is None else max(0, step - resume)


def _recovery(launch: Launch, restart: Restart, start: int) -> float | None:
    """Seconds from ``start`` until all ranks of a following round completed a step."""
    for entry in launch.ran:
        completed = entry.first_completed()
        if entry.ready is not None and entry.ready > restart.begin and completed is not None:
            return max(0, completed - start) / 1e9
    return None


def _survivors_kept(launch: Launch, restart: Restart, after: Round | None) -> bool | None:
    """Whether all ranks but those hit in this recovery have the pid of the round before."""
    before = launch.round_before(restart.begin)
    if before is None or after is None or not before.pids or not after.pids:
        return None
    low, high = before.ready or 0, after.ready or 0
    hit: set[int | None] = {f.rank for f in launch.injected if low <= f.t <= high}
    for other in launch.restarts:
        if low <= other.begin <= high:
            hit.add(other.cause.guilty if other.cause else None)
    kept = [rank for rank in before.pids if rank not in hit]
    return all(before.pids[rank] == after.pids.get(rank) for rank in kept)
