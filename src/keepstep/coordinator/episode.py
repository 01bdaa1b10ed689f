"""One failure from its first evidence to the decision: what was reported, and what it was. Pure."""

from __future__ import annotations

from keepstep import policy


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

    @property
    def oldest_step(self) -> int:
        """The step that the world was in: a step is over only when every rank has completed it."""
        return min(report.step for report in self.reports)
