"""One failure from its first evidence to the decision: what was reported, and what it was. Pure."""

from __future__ import annotations

from keepstep import policy
from keepstep.wire.messages import Failed, RankDown

_TOO_EARLY = "exit code {} before the run was over"


def failed_report(rank: int, failed: Failed) -> policy.Report:
    """What a rank told of itself."""
    return policy.Report(
        rank=rank,
        t=failed.t,
        kind=failed.failure,
        error=failed.error,
        location=failed.location,
        step=failed.step,
        fresh=failed.fresh,
        fatal=failed.fatal,
        seqs=failed.seqs,
    )


def ended_report(down: RankDown, *, fresh: bool) -> policy.Report:
    """A process that ended by itself; ``fresh``: before it joined."""
    kind = "oom" if down.oom else ("killed" if down.code < 0 else "exit")
    return policy.Report(
        rank=down.rank,
        t=down.t,
        kind=kind,
        code=down.code,
        step=down.step,
        fresh=fresh,
        error=_TOO_EARLY.format(down.code) if kind == "exit" else "",
    )


def early_report(rank: int, now: float) -> policy.Report:
    """A process that ended well, but before it joined as others do."""
    return policy.Report(rank=rank, t=now, kind="exit", error=_TOO_EARLY.format(0), fresh=True)


class Episode:
    """Reports of one failed round.

    Args:
        report: The first evidence. stack: where the rank stood, if known. now: when it came.
    """

    def __init__(self, report: policy.Report, stack: str, now: float) -> None:
        self.reports = [report]
        self.first_t = now
        self._stacks = {report.rank: stack} if stack else {}

    def add(self, report: policy.Report, stack: str) -> None:
        """More evidence."""
        self.reports.append(report)
        if stack:
            self._stacks.setdefault(report.rank, stack)

    def settled(self, world: int, accounted: set[int], now: float, settle_s: float) -> bool:
        """Whether the cause can be decided."""
        return policy.settled(self.reports, world, accounted, now, self.first_t, settle_s)

    def attribute(
        self, world: int, seqs: dict[int, dict[str, int]], settle_s: float
    ) -> policy.Attribution:
        """The cause."""
        return policy.attribute(self.reports, world=world, seqs=seqs, settle_s=settle_s)

    def stack(self, guilty: int) -> str:
        """Where the guilty rank stood."""
        return self._stacks.get(guilty, "")
