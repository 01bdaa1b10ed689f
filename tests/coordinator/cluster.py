"""Fake agents and ranks around a real ``Rounds``, and the rules that hold at every message.

Ranks do what real ones do (leave an aborted round, join, come up again), unless a test names them
in ``stuck``, ``deaf`` or ``down``. Time moves only by ``wait``.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any, TypeVar

from keepstep import events
from keepstep.config import Config
from keepstep.coordinator.rounds import Rounds
from keepstep.coordinator.saves import Saves
from keepstep.errors import KeepstepError
from keepstep.wire.messages import (
    FROM_COORDINATOR,
    Abort,
    Evidence,
    Failed,
    Finish,
    Go,
    JobEnd,
    Join,
    Kill,
    Message,
    Notice,
    RankDown,
    RankUp,
    Replace,
    Returned,
    Stalled,
    Stepped,
    StopAck,
    StopRequest,
    ToRank,
)
from keepstep.wire.types import Version

E = TypeVar("E", bound=events.EventData)
M = TypeVar("M", bound=Message)
RUN = "demo"


def config(**restart: Any) -> Config:
    """The defaults, with some restart settings changed."""
    base = Config()
    return dataclasses.replace(base, restart=dataclasses.replace(base.restart, **restart))


@dataclasses.dataclass(slots=True)
class Process:
    """A rank's process. ``state``: starting, joined, running, returned, dead."""

    inc: int
    pid: int
    state: str = "starting"
    round: int = 0
    left: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Emitted:
    data: events.EventData
    rank: int | None
    step: int | None
    round: int | None


class Storage:
    """Checkpoints as (step, folder), and the steps that rounds resumed from."""

    term = 1

    def __init__(self, checkpoints: list[tuple[int, str]]) -> None:
        self.checkpoints = checkpoints
        self.resumes: dict[int, int] = {}
        self.error: KeepstepError | None = None
        self.full: OSError | None = None

    def pick(self, exclude: frozenset[str]) -> tuple[int, str]:
        """The newest checkpoint that is not left out."""
        if self.error is not None:
            raise self.error
        usable = [entry for entry in self.checkpoints if entry[1] not in exclude]
        return max(usable, default=(0, ""))

    def went_on(self, round: int, resume: int) -> None:
        """A round began."""
        assert round not in self.resumes
        if self.full is not None:
            raise self.full
        self.resumes[round] = resume


class Cluster:
    """One job of ``world`` ranks on one node.

    Args:
        world: Number of ranks. settings: the job's. checkpoints: (step, folder) on storage.
        adopted: Whether the script uses ``keepstep.run``: its ranks join.
        automatic: Whether ranks and agent react by themselves.
    """

    def __init__(
        self,
        world: int = 2,
        settings: Config | None = None,
        checkpoints: list[tuple[int, str]] | None = None,
        *,
        adopted: bool = True,
        automatic: bool = True,
    ) -> None:
        self.world = world
        self.settings = settings or Config()
        self.now = 100.0
        self.checkpoints = checkpoints or []
        self.adopted = adopted
        self.automatic = automatic
        self.stuck: set[int] = set()
        """Ranks that do not leave an aborted round."""
        self.deaf: set[int] = set()
        """Ranks whose new process never joins."""
        self.down: set[int] = set()
        """Ranks for which no new process comes up."""
        self.events: list[Emitted] = []
        self.sent: list[FROM_COORDINATOR] = []
        self.goes: dict[int, dict[int, tuple[int, Go]]] = {}
        """Go by round and rank, with the incarnation that it was sent to."""
        self.replaced: set[tuple[int, int]] = set()
        """Rank and incarnation of every Replace."""
        self.inbox: list[tuple[int, int, Any]] = []
        """Not automatic: what ranks have not read yet (rank, incarnation, message)."""
        self.orders: list[Kill | Replace] = []
        """Not automatic: what the agent has not done yet."""
        self._queue: deque[FROM_COORDINATOR] = deque()
        self._pumping = False
        self._next_pid = 1000
        self.processes: list[Process] = []
        self.saves = Saves(world, self.settings.checkpoint.write_limit_s)
        self.storage = Storage(self.checkpoints)
        self.rounds = Rounds(world, self.settings, self.saves, self._emit, self.storage)
        self.rounds.begin()
        for _ in range(world):
            self.processes.append(self._process(0))

    def _process(self, inc: int) -> Process:
        self._next_pid += 1
        return Process(inc, self._next_pid)

    def _emit(
        self,
        data: events.EventData,
        *,
        rank: int | None = None,
        step: int | None = None,
        round: int | None = None,
    ) -> None:
        number = self.rounds.round if round is None else round
        self.events.append(Emitted(data, rank, step, number))

    # --- what the world does ---------------------------------------------------------------------

    def start(self) -> Cluster:
        """Bring all ranks up and let them join; the first round begins."""
        for rank in range(self.world):
            self.up(rank)
        return self

    def up(self, rank: int) -> None:
        """The agent tells of the rank's process, which joins."""
        process = self.processes[rank]
        self.rounds.rank_up(RankUp(rank=rank, inc=process.inc, pid=process.pid), self.now)
        if self.adopted and self.automatic and rank not in self.deaf:
            self.join(rank)
        self.pump()

    def join(self, rank: int, inc: int | None = None, step: int = 0) -> None:
        process = self.processes[rank]
        if inc is None:
            process.state, process.left = "joined", process.round
        number = process.inc if inc is None else inc
        body = Join(inc=number, after_round=process.round, step=step)
        self.rounds.join(rank, body, self.now)
        self.pump()

    def fail(
        self,
        rank: int,
        failure: str = "exception",
        error: str = "ValueError: bad batch",
        *,
        step: int = 5,
        inc: int | None = None,
        **more: Any,
    ) -> None:
        process = self.processes[rank]
        values: dict[str, Any] = {"location": "train.py:9", "t": self.now, "fresh": False, **more}
        failed = Failed(
            inc=process.inc if inc is None else inc,
            round=process.round,
            failure=failure,
            error=error,
            step=step,
            **values,
        )
        self.rounds.rank_failed(rank, failed, self.now)
        self.pump()

    def die(
        self, rank: int, code: int = -9, *, step: int = 5, by_us: bool = False, **more: Any
    ) -> None:
        process = self.processes[rank]
        process.state = "dead"
        down = RankDown(
            rank=rank,
            inc=process.inc,
            code=code,
            oom=more.get("oom", False),
            by_us=by_us,
            step=step,
            t=more.get("t", self.now),
        )
        self.rounds.rank_down(down, self.now)
        self.pump()

    def finish(self, rank: int, *, saving: int = 0, step: int = 30) -> None:
        """The rank's ``main`` returns."""
        process = self.processes[rank]
        process.state = "returned"
        returned = Returned(inc=process.inc, round=process.round, step=step, saving=saving)
        self.rounds.returned(rank, returned, self.now)
        self.pump()

    def step(self, rank: int, step: int = 1) -> None:
        """The rank completes its first step."""
        process = self.processes[rank]
        number = process.round if self.adopted else 1
        self.rounds.stepped(Stepped(rank=rank, inc=process.inc, round=number, step=step), self.now)
        self.pump()

    def stall(self, *seen: Evidence) -> None:
        self.rounds.stalled(Stalled(ranks=list(seen)), self.now)
        self.pump()

    def evidence(self, rank: int, **values: Any) -> Evidence:
        """A rank that waits in a collective, unless ``values`` say otherwise."""
        usual: dict[str, Any] = {
            "idle_s": 40.0,
            "limit_s": 30.0,
            "beat_age_s": 0.1,
            "state": "S",
            "phase": "step",
            "step": 5,
            "seq": 100,
        }
        return Evidence(rank=rank, inc=self.processes[rank].inc, **{**usual, **values})

    def stop(self, live: int = 5) -> None:
        self.rounds.stop_request(StopRequest(signal="SIGTERM", live=live), self.now)
        self.pump()

    def ack(self, rank: int, step: int, live: int, inc: int | None = None) -> None:
        process = self.processes[rank]
        answer = StopAck(inc=process.inc if inc is None else inc, step=step, live=live)
        self.rounds.stop_ack(rank, answer, self.now)
        self.pump()

    def wait(self, seconds: float) -> None:
        """Let time pass in the steps of the coordinator's tick."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + max(0.05, seconds / 100))
            self.tick()

    def tick(self) -> None:
        self.saves.late(self.now)
        self.rounds.progress(self.now)
        self.pump()

    def stage(self, step: int, ranks: list[int] | None = None, round: int | None = None) -> Version:
        """Ranks stage their shards of ``step``."""
        number = self.rounds.round if round is None else round
        version = Version(run=RUN, term=1, round=number, step=step, world=self.world)
        for rank in range(self.world) if ranks is None else ranks:
            self.saves.staged(rank, version, self.now)
        return version

    def commit(self, version: Version) -> None:
        """All shards become durable and the manifest is published."""
        folder = f"step-{version.step:08d}"
        for rank in range(self.world):
            self.saves.durable(rank, version, folder, 10, self.now)
        if version.round == self.rounds.round:
            assert self.rounds.loaded()
        self.checkpoints.append((version.step, folder))
        self.saves.commit_done(version, self.now)
        self.tick()

    # --- what the coordinator answers ------------------------------------------------------------

    def pump(self) -> None:
        """Hand over the coordinator's messages; every one is checked."""
        self._queue.extend(self.rounds.take())
        if self._pumping:
            return
        self._pumping = True
        while self._queue:
            message = self._queue.popleft()
            assert self.end is None, f"{message} after the end"
            self.sent.append(message)
            self._take(message)
        self._pumping = False

    def _take(self, message: FROM_COORDINATOR) -> None:
        match message:
            case ToRank(rank=rank, inc=inc, body=Go() as go):
                self._check_go(rank, inc, go)
                self._to_rank(rank, inc, go)
            case ToRank(rank=rank, inc=inc, body=body):
                self._to_rank(rank, inc, body)
            case Kill():
                self._order(message)
            case Replace(rank=rank, inc=inc):
                assert (rank, inc) not in self.replaced, f"{message} for the second time"
                assert self.processes[rank].inc == inc
                assert self.decided, "replaced before it was decided"
                self.replaced.add((rank, inc))
                self._order(message)
            case _:
                pass

    @property
    def decided(self) -> bool:
        """Whether the last failure has a cause by now."""
        kinds = [type(event.data) for event in self.events]
        begun = len(kinds) - kinds[::-1].index(events.RestartBegin)
        return events.RestartCause in kinds[begun:]

    def _check_go(self, rank: int, inc: int, go: Go) -> None:
        taken = self.goes.setdefault(go.round, {})
        assert rank not in taken, f"two Go for round {go.round} to rank {rank}"
        process = self.processes[rank]
        assert inc == process.inc, f"Go to incarnation {inc} of rank {rank}, not {process.inc}"
        assert (rank, inc) not in self.replaced, f"Go to rank {rank}, which is being replaced"
        unseen = process.state == "dead" and not self.automatic
        assert process.state == "joined" or unseen, f"Go to rank {rank}: {process.state}"
        taken[rank] = (inc, go)

    def _to_rank(self, rank: int, inc: int, body: Message) -> None:
        if not self.automatic:
            self.inbox.append((rank, inc, body))
        elif self.processes[rank].inc == inc:
            self.read(rank, body)

    def read(self, rank: int, body: Message) -> None:
        """A rank does what it is told."""
        process = self.processes[rank]
        match body:
            case Go(round=number) if process.state == "joined":
                process.state, process.round = "running", number
            case Abort(round=number) if process.state in ("running", "returned"):
                if rank not in self.stuck and process.round == number:
                    self.join(rank)
            case Finish() if process.state == "returned":
                process.state = "dead"
            case _:
                pass

    def _order(self, order: Kill | Replace) -> None:
        if self.automatic:
            self.obey(order)
        else:
            self.orders.append(order)

    def obey(self, order: Kill | Replace) -> None:
        """The agent ends a process, and gives its number to another."""
        rank, process = order.rank, self.processes[order.rank]
        if process.inc != order.inc:
            return
        if process.state != "dead":
            self.stuck.discard(rank)
            self.die(rank, by_us=True)
        if isinstance(order, Replace) and rank not in self.down and self.end is None:
            self.processes[rank] = self._process(order.inc + 1)
            self.up(rank)

    # --- what tests ask --------------------------------------------------------------------------

    def all(self, kind: type[M], *, to: int | None = None) -> list[M]:
        """Messages of ``kind`` sent so far (those for ranks: to rank ``to``)."""
        found: list[M] = []
        for message in self.sent:
            body: Any = message.body if isinstance(message, ToRank) else message
            wrong = isinstance(message, ToRank) and to is not None and message.rank != to
            if isinstance(body, kind) and not wrong:
                found.append(body)
        return found

    def emitted(self, kind: type[E]) -> list[E]:
        return [event.data for event in self.events if isinstance(event.data, kind)]

    @property
    def end(self) -> JobEnd | None:
        return next((message for message in self.sent if isinstance(message, JobEnd)), None)

    @property
    def cause(self) -> events.RestartCause:
        return self.emitted(events.RestartCause)[-1]

    @property
    def incs(self) -> list[int]:
        return [process.inc for process in self.processes]

    @property
    def running(self) -> int:
        """The round in which all ranks are, or 0."""
        numbers = {p.round if p.state == "running" else 0 for p in self.processes}
        return numbers.pop() if len(numbers) == 1 else 0

    def notices(self, kind: str) -> list[str]:
        return [m.text for m in self.sent if isinstance(m, Notice) and m.kind == kind]


def running(world: int = 2, settings: Config | None = None, **more: Any) -> Cluster:
    """A job in its first round."""
    job = Cluster(world, settings, **more).start()
    assert job.running == 1
    return job
