"""Which failure came first, and who only followed. Pure; the coordinator's process calls it.

The order of evidence is not the order of events. Three rules make up for that:

1. Kinds with a cause of their own (``DEFINITE``) beat ``timeout`` and ``peer_lost``, which only say
   that somebody else is missing.
2. Nobody else's failure can SIGKILL a process, so a rank killed from outside (or by the kernel for
   memory) is a cause. Its death is seen late: peers learn of it when its sockets close, the agent
   only when the kernel has freed all its memory, on the GPU too. An exception or exit of another
   rank up to ``settle_s`` before is therefore a consequence. An earlier exception is one too where
   a third rank had lost a peer before it: an exception closes no sockets, so somebody had died.
   Where this is wrong (an error of the script just before an unrelated kill) a user's error is
   taken for a consequence, and shows up again in the next round; the other mistake would end the
   job for an error that nobody made.
3. SIGABRT is what a library does to its own process when a peer is gone, so it counts as an exit.

With time-outs alone, their order and collective sequence numbers decide; where these do not name
one rank, nobody is blamed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

SYMPTOMS = frozenset({"timeout", "peer_lost"})
DEFINITE = frozenset(
    {"exception", "killed", "oom", "exit", "hang", "checkpoint", "save"},
)
KINDS = SYMPTOMS | DEFINITE
PROCESS_GONE = frozenset({"killed", "oom", "exit", "hang"})
SAME_TIME_S = 0.1
"""Time-outs this close together, in seconds, do not tell who began to wait first."""
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's failure as one process saw it.

    ``t`` in seconds of one clock for all reports: when the rank failed, when its death was seen, or
    for a hang when its progress stopped. ``location`` is file:line of the user's code. ``fresh``:
    the process had not been restarted in place and failed in its first call. ``code`` is the exit
    code, or minus the signal. ``fatal`` is an exit code where a restart cannot help, else 0.
    ``seqs`` are collective sequence numbers by group. Deaths by our own hand are not reported.

    Raises:
        ValueError: ``kind`` is not one of ``KINDS``.
    """

    rank: int
    t: float
    kind: str
    error: str = ""
    location: str = ""
    step: int = 0
    fresh: bool = False
    code: int = 0
    fatal: int = 0
    seqs: dict[str, int] = {}
    node: int = 0
    phase: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a failure is one of {', '.join(sorted(KINDS))}, not {self.kind!r}")

    @property
    def key(self) -> FailureKey:
        """What makes two failures the same one."""
        return FailureKey.of(self.kind, self.error, self.location, self.step, self.code)


class FailureKey(NamedTuple):
    """Identity of a failure, the same for every rank and process that it hits."""

    kind: str
    error: str
    location: str
    step: int
    code: int

    @classmethod
    def of(cls, kind: str, error: str, location: str, step: int, code: int) -> FailureKey:
        """Reduce ``error`` to its first line, without addresses: they change with each process."""
        return cls(kind, _ADDRESS.sub("0x..", first_line(error)), location, step, code)


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """What a failure was found to be.

    ``guilty`` is -1 where nobody is blamed (``cause`` is then ``unknown``). ``same`` are the ranks
    that reported this very failure, ``dead`` those whose process ended or hangs, ``consequences``
    those that failed because of the cause. ``fresh`` is true if any of ``same`` was fresh. ``line``
    is for people; ``reason`` says how the cause was found.
    """

    cause: str
    guilty: int
    step: int
    line: str
    reason: str
    error: str = ""
    location: str = ""
    fresh: bool = False
    code: int = 0
    fatal: int = 0
    same: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    consequences: tuple[int, ...] = ()

    @property
    def key(self) -> FailureKey:
        """What makes two failures the same one."""
        return FailureKey.of(self.cause, self.error, self.location, self.step, self.code)


def attribute(
    reports: Sequence[Report],
    *,
    world: int,
    seqs: Mapping[int, Mapping[str, int]] | None = None,
    settle_s: float = 1.0,
) -> Attribution:
    """Find the cause of one failure.

    Args:
        reports: Everything reported since the round began to fail, in any order.
        world: Number of ranks.
        seqs: Sequence numbers of ranks that sent no report, by rank and group. A rank's own report
            wins, the latest if there are several.
        settle_s: How much later than its consequences, in seconds, a death may be seen.
    """
    definite = [report for report in reports if report.kind in DEFINITE]
    if definite:
        return _known(_first(definite, reports, settle_s), reports)
    known = {rank: dict(by_group) for rank, by_group in (seqs or {}).items()}
    in_time = sorted(reports, key=lambda report: report.t)
    known |= {report.rank: report.seqs for report in in_time if report.seqs}
    guilty, finding = _laggard(reports, known, world)
    if guilty < 0:
        return _unknown(reports, finding)
    step = max(r.step for r in reports)
    node = next((f" (node {r.node})" for r in reports if r.rank == guilty), "")
    return Attribution(
        cause="timeout",
        guilty=guilty,
        step=step,
        error=finding,
        line=f"rank {guilty}{node} {finding}, at step {step}",
        reason="the only rank that lags in a group in which others waited until the time limit",
        fresh=any(r.fresh for r in reports if r.rank == guilty),
        same=(guilty,),
        consequences=_ranks(r for r in reports if r.rank != guilty),
    )


def settled(
    reports: Sequence[Report],
    world: int,
    accounted: Collection[int],
    now: float,
    first_t: float,
    settle_s: float,
) -> bool:
    """Whether the cause can be decided.

    At once for a failure that cannot be a consequence. An exception or exit can be one, so it waits
    for the other ranks; that costs nothing, since the next round needs them anyway.

    Args:
        reports: What was reported so far.
        world: Number of ranks.
        accounted: Ranks that have joined the next round, failed or died.
        now: The time; ``first_t`` when the first evidence came, ``settle_s`` the longest wait, all
            in seconds of one clock.
    """
    if any(report.kind in DEFINITE and not _may_follow(report) for report in reports):
        return True
    known = set(accounted) | {report.rank for report in reports}
    return known >= set(range(world)) or now - first_t >= settle_s


def first_line(text: str) -> str:
    """The first line of ``text`` that is not blank."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _may_follow(report: Report) -> bool:
    """Whether another rank's death can be behind ``report``."""
    aborted = report.kind == "killed" and report.code == -signal.SIGABRT
    return report.kind in ("exception", "exit") or aborted


def _first(definite: Sequence[Report], reports: Sequence[Report], settle_s: float) -> Report:
    deaths = [r for r in definite if r.kind in ("killed", "oom") and not _may_follow(r)]

    def follows(report: Report) -> bool:
        return _may_follow(report) and any(
            death.rank != report.rank
            and (
                report.t >= death.t - settle_s
                or (report.kind == "exception" and _witnessed(report, death, reports))
            )
            for death in deaths
        )

    causes = [report for report in definite if not follows(report)]
    return min(causes, key=lambda report: (report.t, _may_follow(report), report.rank))


def _witnessed(report: Report, death: Report, reports: Sequence[Report]) -> bool:
    """Whether a third rank had lost a peer before ``report``."""
    return any(
        other.kind == "peer_lost" and other.t <= report.t and other.rank != report.rank
        for other in reports
        if other.rank != death.rank
    )


def _known(cause: Report, reports: Sequence[Report]) -> Attribution:
    same = [report for report in reports if report.key == cause.key]
    own = {r.rank for r in reports if r.kind in DEFINITE and not _may_follow(r)}
    others = [r for r in reports if r.rank != cause.rank and r.rank not in own]
    return Attribution(
        cause=cause.kind,
        guilty=cause.rank,
        step=cause.step,
        error=cause.error,
        location=cause.location,
        code=cause.code,
        fatal=cause.fatal,
        line=_line(cause),
        reason=f"the first failure with a cause of its own, of {len(reports)} reported",
        fresh=any(report.fresh for report in same),
        same=_ranks(same),
        dead=_ranks(r for r in reports if r.kind in PROCESS_GONE),
        consequences=_ranks(others),
    )


def _unknown(reports: Sequence[Report], finding: str) -> Attribution:
    step = max((report.step for report in reports), default=0)
    ranks = ", ".join(str(rank) for rank in _ranks(reports)) or "none"
    what = "waited in vain or lost a peer"
    return Attribution(
        cause="unknown",
        guilty=-1,
        step=step,
        line=f"cause unknown at step {step}: {what} (ranks {ranks}), and {finding}",
        reason=f"nobody is blamed: {finding}",
    )


def _laggard(
    reports: Sequence[Report], seqs: Mapping[int, Mapping[str, int]], world: int
) -> tuple[int, str]:
    """The one rank that others waited for, and how it is known; or -1 and why nobody is named.

    All ranks have the same time limit, so those that time out first began to wait first: they were
    held up by nobody who waits for them. Whoever had not entered the collective that they were in
    is what they waited for; later time-outs, in other groups, are its consequences. Where all timed
    out together, a single rank that is apart from two or more others is named.
    """
    times = {report.rank: report.t for report in reports if report.kind == "timeout"}
    if not times:
        return -1, "no rank that failed says why"
    silent = [rank for rank in range(world) if not seqs.get(rank)]
    if silent:
        missing = ", ".join(map(str, silent))
        return -1, f"how many collectives were entered is not known of ranks {missing}"
    first = min(times.values())
    waiters = {rank for rank, t in times.items() if t - first <= SAME_TIME_S}
    behind: dict[int, str] = {}
    alone: set[int] = set()
    ahead: set[int] = set()
    for group in sorted({name for by_group in seqs.values() for name in by_group}):
        entered = {rank: seqs[rank][group] for rank in range(world) if group in seqs[rank]}
        top = max(entered.values())
        if not any(entered.get(rank) == top for rank in waiters):
            continue
        late = [rank for rank, count in entered.items() if count < top]
        ahead.update(set(entered) - set(late) if late else ())
        if len(late) == 1 and len(entered) > 2:
            alone.update(late)
        for rank in late:
            text = f"had entered {entered[rank]} collectives of group {group}, the others {top}"
            behind.setdefault(rank, text)
    # A rank that is ahead in another group is held up there itself, however late it timed out.
    guilty = sorted(set(behind) - waiters - ahead)
    if not guilty:
        guilty = sorted(alone) if len(alone) == 1 else sorted(set(behind) - waiters)
    if len(guilty) == 1:
        return guilty[0], behind[guilty[0]]
    if guilty:
        return -1, f"ranks {', '.join(map(str, sorted(behind)))} lag behind the others"
    return -1, "no rank entered fewer collectives than those that waited"


def _line(cause: Report) -> str:
    who = f"rank {cause.rank} (node {cause.node})"
    error = first_line(cause.error)
    where = f" at step {cause.step}"
    phase = f" (last phase: {cause.phase})" if cause.phase else ""
    place = f" ({cause.location})" if cause.location else ""
    tail = f": {error}" if error else ""
    match cause.kind:
        case "killed":
            return f"{who} was killed by signal {-cause.code}{where}{phase}"
        case "oom":
            return f"{who} was killed by the kernel for lack of memory{where}{phase}"
        case "exit":
            return f"{who} ended with exit code {cause.code}{where}{phase}"
        case "hang":
            return f"{who} hangs{where}{phase}{tail}"
        case "checkpoint":
            return f"{who} cannot use the checkpoint{where}{tail}"
        case "save":
            return f"{who} cannot save{where}{tail}"
    return f"{who} raised {error or 'an exception'}{where}{place}"


def _ranks(reports: Iterable[Report]) -> tuple[int, ...]:
    return tuple(sorted({report.rank for report in reports}))
