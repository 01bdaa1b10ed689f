"""What is known about a run: its launches, their rounds, and the restarts between them.

Pure; used by accounting and the list of faults. Times are integer nanoseconds since the epoch.

A *launch* is one start of the launcher in the folder; a round *ran* if it became ready. What agent
and coordinator did not write is inferred from the ranks: a round is ready when its last rank
joined, and a restart begins with the first failure or the first join of the next round.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.events import RestartCause


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of time inside a round."""

    begin: int
    end: int
    name: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Something that showed at ``t`` that ``rank`` failed, at ``since`` at the latest; ``cause`` in
    the words of ``restart.cause``."""

    t: int
    rank: int | None
    cause: str
    since: int


@dataclass(slots=True, eq=False)
class Injected:
    """A drill's fault that fired. ``matched``: a restart was found to answer it; ``found`` is what
    showed it, where that is known and it is not what the restart was begun for."""

    t: int
    rank: int | None
    step: int | None
    round: int
    kind: str
    matched: bool = False
    found: Evidence | None = None


@dataclass(slots=True, eq=False)
class Restart:
    """One failure and its answer.

    ``begin`` is when it was known, ``fault`` when it happened (as early as the evidence goes),
    ``round`` the round that failed, ``cause_t`` when the cause was written. ``injected`` is the
    drill's fault behind it, ``also`` those that the same restart answered too. ``inferred``: no
    coordinator wrote it down.
    """

    begin: int
    round: int | None
    first_kind: str
    cause: RestartCause | None = None
    cause_t: int = 0
    fault: int = 0
    injected: Injected | None = None
    also: list[Injected] = field(default_factory=list)
    inferred: bool = False


@dataclass(slots=True, eq=False)
class Round:
    """What is known about one round of one launch.

    ``ends``: for each step, the lowest rank that completed it and when. ``newest``: the newest step
    completed by each rank. ``firsts``: begin and end of each rank's first step. ``spans``: sections
    and checkpoint stalls by rank. ``restores``: those of all ranks; ``loading`` began and did not
    end. ``restored`` is the step restored.
    """

    number: int
    ready: int | None = None
    resume: int | None = None
    pids: dict[int, int] = field(default_factory=dict)
    told: bool = False
    world: int = 0
    seen: set[int] = field(default_factory=set)
    joined: dict[int, int] = field(default_factory=dict)
    ends: dict[int, tuple[int, int]] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)
    firsts: dict[int, tuple[int, int]] = field(default_factory=dict)
    spans: dict[int, list[Span]] = field(default_factory=dict)
    open_sections: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    restores: list[Span] = field(default_factory=list)
    loading: dict[int, int] = field(default_factory=dict)
    restored: int | None = None
    last_seen: dict[int, int] = field(default_factory=dict)

    def expected(self) -> set[int]:
        """The ranks that belong to the round."""
        if self.told:
            return set(self.pids)
        return set(range(self.world)) or self.seen

    def reference_spans(self) -> list[Span]:
        """Spans of the rank whose timeline stands for the world's: the lowest that made a step."""
        rank = min(self.newest or self.seen, default=-1)
        return self.spans.get(rank, [])

    def start_of_steps(self) -> int | None:
        """When the last rank began its first step; without any step, when the last load ended."""
        if self.firsts:
            latest = max(begin for begin, _ in self.firsts.values())
            return min(latest, self.ends[min(self.ends)][1])
        if self.restores and not self.loading:
            return max(span.end for span in self.restores)
        return None

    def first_completed(self) -> int | None:
        """When the last rank completed its first step; None if one never did."""
        ranks = self.expected()
        if not ranks or not ranks <= set(self.firsts):
            return None
        return max(self.firsts[rank][1] for rank in ranks)

    def resumed_from(self) -> int | None:
        """The step that the round went on from; None if nothing says so."""
        if self.resume is not None:
            return self.resume
        if self.restored is not None:
            return self.restored
        return min(self.ends) - 1 if self.ends else None

    def completed(self) -> int:
        """The newest step that every rank completed (0: none)."""
        return min((self.newest.get(rank, 0) for rank in self.expected()), default=0)

    def first_work(self) -> int | None:
        """When a rank first loaded or stepped; None if none did."""
        begins = [span.begin for span in self.restores] + list(self.loading.values())
        begins += [begin for begin, _ in self.firsts.values()]
        return min(begins, default=None)


@dataclass(slots=True, eq=False)
class Launch:
    """One start of the launcher. ``exit_code`` is None where its end was not written.

    ``ran`` are the rounds that became ready, in time order. ``evidence`` of failures: errors,
    hangs, and ends of processes that nobody asked for.
    """

    begin: int
    end: int
    exit_code: int | None = None
    engine: str = ""
    run: str = ""
    rounds: dict[int, Round] = field(default_factory=dict)
    ran: list[Round] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    last_rank_event: int = 0

    def round(self, number: int) -> Round:
        """The round of that number, made if it is new."""
        return self.rounds.setdefault(number, Round(number))

    def round_before(self, t: int) -> Round | None:
        """The newest round that was ready at ``t``."""
        return next((r for r in reversed(self.ran) if r.ready is not None and r.ready <= t), None)

    def round_after(self, t: int) -> Round | None:
        """The first round that became ready after ``t``."""
        return next((r for r in self.ran if r.ready is not None and r.ready > t), None)
