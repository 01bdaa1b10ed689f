"""Which rank a stall is the fault of. Pure; the coordinator's process calls it.

When one rank hangs, all ranks stand still soon: the others wait for it. The rules go from what is
certain to what is likely, and the first that finds somebody ends the search. Nobody is blamed by
guess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from keepstep.wire.messages import Evidence

SILENT_S = 2.0
"""A heartbeat younger than this is no evidence, however short the limit is."""


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """Who hangs. ``guilty`` is empty with the cause ``unknown``; ``reason`` is for people."""

    guilty: tuple[int, ...]
    cause: Literal["hang", "unknown"]
    reason: str


def blame(evidence: Sequence[Evidence]) -> Blame:
    """Find the ranks that a stall is the fault of.

    All ranks of a job are never guilty together, unless the job has only one.

    Args:
        evidence: How each rank of the round looks at one moment. A negative ``beat_age_s`` means
            that the rank has no heartbeat thread.
    """
    longest = max((seen.idle_s for seen in evidence), default=0.0)
    # A rank that moved in the second half of the longest stall is not part of it. Half, since those
    # who wait for a hung rank may have had up to a step's work left when it stopped.
    still = [seen for seen in evidence if seen.idle_s > longest / 2]
    rules: tuple[Callable[[], tuple[list[Evidence], str]], ...] = (
        lambda: ([s for s in still if s.state in ("T", "t")], "is stopped (SIGSTOP)"),
        lambda: (
            [s for s in evidence if _silent(s)],
            "holds the interpreter lock or is frozen (its heartbeat is silent)",
        ),
        lambda: (_alone(still), "makes no progress while the others do"),
        lambda: (_lagging(still), "entered fewer collectives than the others"),
        lambda: (_apart(evidence, still), "make no progress while the others do"),
    )
    for rule in rules:
        found, why = rule()
        if found and len(found) <= max(1, len(evidence) - 1):
            return _guilty(found, why)
        if found:
            return _nobody(f"all {len(evidence)} ranks look alike: each {why}")
    return _nobody("no rank differs from the others")


def _silent(seen: Evidence) -> bool:
    # In state D the kernel waits for a device: the interpreter is not to blame.
    return seen.state != "D" and seen.beat_age_s > max(SILENT_S, seen.limit_s / 2)


def _stalled(seen: Evidence) -> bool:
    return seen.idle_s > seen.limit_s


def _alone(still: Sequence[Evidence]) -> list[Evidence]:
    return list(still) if len(still) == 1 and _stalled(still[0]) else []


def _lagging(still: Sequence[Evidence]) -> list[Evidence]:
    """Ranks that entered fewer collectives than others and are ahead of nobody in any group.

    A rank that lags in one group and is ahead in another is held up itself, and so are those that
    it is ahead of: nothing is known then. Without numbers by group the sums are compared.
    """
    if not all(seen.seqs for seen in still):
        top = max((seen.seq for seen in still), default=0)
        return [seen for seen in still if seen.seq < top]
    behind: set[int] = set()
    ahead: set[int] = set()
    for group in {name for seen in still for name in seen.seqs}:
        entered = {seen.rank: seen.seqs[group] for seen in still if group in seen.seqs}
        top = max(entered.values())
        late = {rank for rank, count in entered.items() if count < top}
        behind |= late
        ahead |= set(entered) - late if late else set()
    return [seen for seen in still if seen.rank in behind - ahead]


def _apart(evidence: Sequence[Evidence], still: Sequence[Evidence]) -> list[Evidence]:
    return list(still) if len(still) < len(evidence) and all(map(_stalled, still)) else []


def _guilty(found: Sequence[Evidence], why: str) -> Blame:
    worst = max(found, key=lambda seen: seen.idle_s)
    ranks = tuple(sorted(seen.rank for seen in found))
    name = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    idle = f"no progress for {worst.idle_s:.1f} s (limit {worst.limit_s:.1f} s)"
    entered = f"{worst.seq} collectives entered"
    reason = f"{name} {why}: {idle} in phase {worst.phase} of step {worst.step}, {entered}"
    return Blame(guilty=ranks, cause="hang", reason=reason)


def _nobody(why: str) -> Blame:
    return Blame(guilty=(), cause="unknown", reason=f"cause unknown: {why}")
