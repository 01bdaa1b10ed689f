"""One failure from its first evidence to the next round: what was reported, what it was, and what
the launcher made of it. Pure."""

from __future__ import annotations

from collections.abc import Collection

from keepstep import policy
from keepstep.events import Event, RankFailed


def failed_report(rank: int, event: Event, data: RankFailed) -> policy.Report:
    """What a rank told of itself."""
    kind = data.failure if data.failure in policy.KINDS else "exception"
    return policy.Report(
        rank=rank,
        t=event.mono,
        kind=kind,
        error=data.error,
        location=data.location,
        step=event.step or 0,
        fresh=data.fresh,
        fatal=data.fatal,
        seqs=data.seqs,
        node=event.node,
    )


def ended_report(
    rank: int, code: int, *, oom: bool, step: int, fresh: bool, now: float
) -> policy.Report:
    """A process that ended by itself; ``fresh``: before it joined."""
    kind = "oom" if oom else ("killed" if code < 0 else "exit")
    return policy.Report(
        rank=rank,
        t=now,
        kind=kind,
        code=code,
        step=step,
        fresh=fresh,
        error=f"exit code {code} before the run was over" if kind == "exit" else "",
    )


def silent_report(rank: int, step: int, now: float) -> policy.Report:
    """The launcher began anew, and no rank has said why."""
    return policy.Report(rank=rank, t=now, kind="timeout", step=step)


class Episode:
    """Reports of one failed round.

    Args:
        report: The first evidence. stack: where the rank stood, if known. now: when it came.
        round: the round that failed. pids: the processes in it, by rank.
        seqs: collectives entered by rank and group, as the boards show it.
    """

    def __init__(
        self,
        report: policy.Report,
        stack: str,
        now: float,
        *,
        round: int,
        pids: dict[int, int],
        seqs: dict[int, dict[str, int]],
    ) -> None:
        self.reports = [report]
        self.first_t = now
        self.round = round
        self.pids = pids
        self._seqs = seqs
        self._stacks = {report.rank: stack} if stack else {}
        self.found: policy.Attribution | None = None
        """The cause, once it is settled."""
        self.told = False
        """Whether cause and level were written down."""

    def add(self, report: policy.Report, stack: str) -> None:
        """More evidence; too late for the cause once that is settled."""
        if self.found is None:
            self.reports.append(report)
        if stack:
            self._stacks.setdefault(report.rank, stack)

    def settle(
        self, world: int, accounted: Collection[int], now: float, settle_s: float, *, force: bool
    ) -> policy.Attribution | None:
        """The cause, at the moment at which it can be decided; ``force``: now."""
        ready = force or policy.settled(self.reports, world, accounted, now, self.first_t, settle_s)
        if self.found is not None or not ready:
            return None
        self.found = policy.attribute(self.reports, world=world, seqs=self._seqs, settle_s=settle_s)
        return self.found

    def stack(self, guilty: int) -> str:
        """Where the guilty rank stood."""
        return self._stacks.get(guilty, "")

    @property
    def oldest_step(self) -> int:
        """The oldest step that a rank which reported was in."""
        return min(report.step for report in self.reports)
