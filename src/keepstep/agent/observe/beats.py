"""How long ranks make no progress, against what their launcher allows. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.events import RankBeat
from keepstep.policy.nvrx_limits import NvrxLimits
from keepstep.shm import Board, Phase

EVERY_S = 10.0
"""A rank's longest silence is written down so often, and at once when it passes half the limit."""
_EARLY = 0.9
_EARLY_IN_PROCESS = 0.7
_STACK_S = 0.35
"""A rank hangs, to the observer, a tenth of the launcher's limit before that acts, and by the time
earlier that a stack needs to be written. In-process restart acts early itself: the time stamp by
which it judges a frozen rank is up to two of its intervals old, each a tenth of the limit."""
_UNLIMITED = (Phase.PARKED, Phase.WAIT)
_AS_SECTION = (Phase.SECTION, Phase.SAVE)
_NOT_LEARNED = (Phase.STEP, Phase.SAVE)


def limit_of(phase: Phase, limits: NvrxLimits, *, in_process: bool) -> float:
    """Seconds without progress in ``phase`` after which NVRx acts.

    Args:
        in_process: Whether NVRx's in-process restart watches the rank too.
    """
    if phase is Phase.STEP:
        return limits.soft if in_process else limits.ft_heartbeat
    return limits.ft_section if phase in _AS_SECTION else limits.ft_initial


def bounds(
    phase: Phase, limits: NvrxLimits, *, in_process: bool, floor_s: float
) -> tuple[float, float]:
    """Bounds of the observer's own limit in ``phase``; see ``agent.hangs.Bounds``.

    A step and a save have NVRx's limit, a little earlier, and nothing is learned. Other phases
    learn.
    """
    limit = limit_of(phase, limits, in_process=in_process)
    early = _EARLY_IN_PROCESS if in_process and phase is Phase.STEP else _EARLY
    bound = max(limit / 2, early * limit - _STACK_S)
    return (bound if phase in _NOT_LEARNED else min(floor_s, bound), bound)


@dataclass(slots=True)
class _Rank:
    told_at: float
    worst: RankBeat | None = None
    alarmed: float = 0.0  # the progress mark at which the half of the limit was told


class Beats:
    """The heartbeats of the node's ranks.

    Args:
        limits: NVRx's. in_process: Whether its in-process restart is used.
    """

    def __init__(self, limits: NvrxLimits, *, in_process: bool) -> None:
        self._limits = limits
        self._in_process = in_process
        self._ranks: dict[int, _Rank] = {}

    def look(self, rank: int, board: Board, now: float) -> RankBeat | None:
        """What is to be written down of ``rank`` now, if anything."""
        state = self._ranks.setdefault(rank, _Rank(told_at=now))
        phase, label, progress = board.phase, board.label, board.last_progress
        if phase in _UNLIMITED or not progress:
            return None
        beat = RankBeat(
            age_s=round(max(0.0, now - progress), 3),
            limit_s=round(limit_of(phase, self._limits, in_process=self._in_process), 3),
            section=f"section:{label}" if phase is Phase.SECTION else phase.name.lower(),
        )
        worst = state.worst
        if worst is None or beat.age_s * worst.limit_s >= worst.age_s * beat.limit_s:
            state.worst = worst = beat
        half = beat.age_s > beat.limit_s / 2 and state.alarmed != progress
        if not half and now - state.told_at < EVERY_S:
            return None
        if half:
            state.alarmed, worst = progress, beat
        state.told_at, state.worst = now, None
        return worst

    def last(self, rank: int) -> RankBeat | None:
        """What was not written down yet; the rank's process has ended."""
        state = self._ranks.pop(rank, None)
        return state.worst if state is not None else None
