"""What the observer knows of the run at one moment. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep import events, policy
from keepstep.agent.observe.seats import Occupant
from keepstep.config import Config
from keepstep.shm import Phase
from keepstep.wire.messages import JobEnd, Notice


@dataclass(frozen=True, slots=True)
class Hang:
    """A rank made no progress for nearly as long as the launcher allows.

    ``progress`` and ``round`` are what its board showed then.
    """

    report: policy.Report
    stack: str
    progress: float
    round: int


@dataclass(slots=True)
class Member:
    """The newest process of a rank."""

    who: Occupant
    since: float
    lives: bool = True
    unsure: bool = False
    """It has ended, and how is not known yet."""
    joined: int = 0
    """Newest round that it joined; 0: none."""
    left: int = 0
    """Newest round that it has left after a failure, alive; 0: none."""
    stepped: bool = False
    told: bool = False
    """It has reported an exception of its own."""
    hang: Hang | None = None

    @property
    def went_on(self) -> bool:
        """Whether it was found to hang and has made progress since by itself.

        That it has left its round is none: then the launcher, or another rank, has freed it.
        """
        who, hang = self.who, self.hang
        freed = who.phase in (Phase.WAIT, Phase.PARKED) or (hang and hang.round != who.round)
        return hang is not None and not freed and who.progress != hang.progress


@dataclass(slots=True)
class Forming:
    """A round that some ranks have joined, and when the last did (wall time)."""

    number: int
    joined: set[int]
    t: float = 0.0
    first: int | None = None
    """The first step that was completed in it."""
    restored: int | None = None


@dataclass(slots=True)
class State:
    """Of the ranks that this process knows of, ``world`` in number.

    ``decides``: whether this process is the one that says what happened (node 0). It knows of all
    ranks, those of other nodes by what these tell; other nodes know of their own.
    ``several``: whether the job has several nodes.
    """

    world: int
    config: Config
    decides: bool = True
    several: bool = False
    members: dict[int, Member] = field(default_factory=dict)
    adopted: bool = False
    """Whether the script uses ``keepstep.run``."""
    round: int = 0
    """The newest round that was ready; 0: none."""
    forming: Forming | None = None
    running: bool = False
    committed: int = 0
    highest: int = 0
    """The newest step that any rank is known to have begun."""
    signal: str = ""
    """The signal on which the run is to stop."""
    over: bool = False
    out: list[Notice | JobEnd] = field(default_factory=list)
    """What is to be said."""

    @property
    def in_process(self) -> bool:
        """Whether something restarts inside the processes."""
        return self.adopted and self.config.engine.parts.restart == "nvrx"

    @property
    def all_joined(self) -> bool:
        """Whether every rank has joined the round that forms."""
        return self.forming is not None and len(self.forming.joined) == self.world

    @property
    def at_work(self) -> bool:
        """Whether this node's ranks are in a round, or about to be: they can stop after a step."""
        own = {rank for rank, one in self.members.items() if one.lives and not one.who.far}
        forming = self.forming
        return self.running or (forming is not None and bool(own) and own <= forming.joined)

    @property
    def at_first_step(self) -> bool:
        """Whether a rank is in step 1 of the run."""
        boards = (member.who.board for member in self.members.values())
        return any(board.phase is Phase.STEP and board.step == 1 for board in boards)

    def pids(self) -> dict[int, int]:
        """The processes by rank."""
        return {rank: one.who.pid for rank, one in sorted(self.members.items())}

    def changed(self, pids: dict[int, int]) -> list[int]:
        """Ranks whose process in ``pids`` has ended."""
        return [
            rank
            for rank, one in self.members.items()
            if not one.lives or one.who.pid != pids.get(rank)
        ]

    def say(self, kind: str, text: str, step: int = 0) -> None:
        """A line for people; kinds as of ``Notice``."""
        self.out.append(Notice(kind=kind, text=text, step=step))

    def end(self, code: int, reason: str) -> None:
        """The run is over: the launcher must be stopped."""
        if not self.over:
            self.over = True
            self.out.append(JobEnd(exit_code=int(code), reason=reason, graceful=False))


def cause_event(
    found: policy.Attribution, level: str, reason: str, *, oldest: int, stack: str
) -> events.RestartCause:
    """What is written down of a failure; ``oldest`` is the step where nobody is blamed."""
    return events.RestartCause(
        cause=found.cause,
        guilty=found.guilty,
        step=found.step if found.cause in policy.DEFINITE else oldest,
        level=level,
        reason=reason,
        line=found.line,
        consequences=list(found.consequences),
        stack=stack,
    )
