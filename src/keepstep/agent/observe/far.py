"""The other nodes of a job, as one observer deals with them. Part of its one thread; no waiting.

Node 0 decides for all: it takes what the other nodes' ranks do as it takes its own. Every other
node tells it what its ranks do, shows what node 0 says, and ends when node 0 has ended the run.
"""

from __future__ import annotations

import os

import msgspec

from keepstep import events, policy, shm
from keepstep.agent.launch_spec import Launch
from keepstep.agent.observe import others
from keepstep.agent.observe.others import Others, Told
from keepstep.agent.observe.rounds import Rounds
from keepstep.agent.observe.seats import Ended, Occupant, Seen, Started
from keepstep.agent.observe.seats import Told as Event
from keepstep.agent.observe.state import State
from keepstep.clock import SYSTEM
from keepstep.errors import ExitCode
from keepstep.wire.messages import JobEnd, Notice, Stalled

_SILENT_S = 90.0
"""Ranks that meet start together; shared storage may show the files of a node so much later."""
_STEPS = 3
_STEP_EVERY_S = 60.0
"""Of each process and round so many first steps are told, and then one now and then."""


class FarNodes:
    """What the other nodes tell, and what they are told.

    Args:
        spec: What is launched, with a node number. state: what is known of the run.
    """

    def __init__(self, spec: Launch, state: State) -> None:
        self._nproc, self._node = spec.nproc, spec.node_rank or 0
        self._run_dir = spec.run_dir
        self._state = state
        heard = [n for n in range(spec.nnodes) if n != self._node and (state.decides or n == 0)]
        self._others = Others(spec.run_dir, self._node, heard)
        self._boards: dict[tuple[int, int], shm.Board] = {}
        self._who: dict[tuple[int, int], Occupant] = {}
        self._tickets = 0
        self._steps: dict[int, tuple[int, int, int, float]] = {}
        self._alone_since = 0.0

    def close(self) -> None:
        """Say the last things."""
        self._others.close()
        for board in self._boards.values():
            board.close()

    # --- telling ----------------------------------------------------------------------------------

    def saw(self, one: Seen, now: float) -> None:
        """Something happened to a rank of this node."""
        if self._state.decides:
            return
        match one:
            case Started(who):
                self._others.tell(others.Began(rank=who.rank, pid=who.pid, inc=who.inc))
            case Event(who, event):
                if self._matters(who, event, now):
                    self._others.tell(others.Heard(event=event))
            case Ended(who, _, _):  # after the evidence, so that node 0 does not decide without
                self._others.tell(others.Over(rank=who.rank))

    def _matters(self, who: Occupant, event: events.Event, now: float) -> bool:
        kinds = (
            events.RankJoined,
            events.RankLeft,
            events.RestoreEnd,
            events.CheckpointCommit,
        )
        if event.kind in {kind.kind for kind in kinds}:
            return True
        if event.kind != events.StepEnd.kind:
            return False
        pid, round, count, at = self._steps.get(who.rank, (0, 0, 0, 0.0))
        if (pid, round) != (who.pid, event.round or 0):
            count = 0
        if count >= _STEPS and now - at < _STEP_EVERY_S:
            return False
        self._steps[who.rank] = (who.pid, event.round or 0, count + 1, now)
        return True

    def failed(self, report: policy.Report, stack: str, now: float) -> None:
        """A rank of this node has failed."""
        if not self._state.decides:
            report = msgspec.structs.replace(report, node=self._node)
            t = SYSTEM.wall() - (now - report.t)
            self._others.tell(others.Failure(report=report, stack=stack, t=t))

    def stalled(self, stalled: Stalled) -> None:
        """Somebody on this node stands still."""
        if self._state.running and not self._state.decides:
            self._others.tell(others.Standing(ranks=stalled.ranks))

    def went_on(self, ranks: list[int]) -> None:
        """These ranks of this node stood still and go on."""
        if not self._state.decides:
            for rank in ranks:
                self._others.tell(others.WentOn(rank=rank))

    def said(self, notice: Notice) -> None:
        """Node 0 says something of the run."""
        self._others.tell(others.Said(notice=notice))

    def ended(self, end: JobEnd) -> None:
        """Node 0 ends the run."""
        if self._state.decides:
            self._others.tell(others.RunOver(end=end))

    # --- hearing ----------------------------------------------------------------------------------

    def take(self, rounds: Rounds, now: float) -> list[Notice | JobEnd]:
        """Hear the others; returns what node 0 says, on the other nodes."""
        said: list[Notice | JobEnd] = []
        for node, message in self._others.take():
            match message:
                case others.Said(notice=notice):
                    said.append(notice)
                case others.RunOver(end=end):
                    said.append(end)
                case _:
                    self._apply(node, message, rounds, now)
        self._look_for_silence(now)
        return said

    def _apply(self, node: int, message: Told, rounds: Rounds, now: float) -> None:
        match message:
            case others.Began(rank=rank, pid=pid, inc=inc):
                rounds.started(self._start(node, rank, pid, inc), now)
            case others.Heard(event=event):
                who = self._who.get((node, (event.rank or 0) % self._nproc))
                if who is not None and who.rank == event.rank:
                    rounds.told(who, event, now)
            case others.Over(rank=rank):
                if (who := self._who.get((node, rank % self._nproc))) is not None:
                    rounds.over_far(who, now)
            case others.Failure(report=report, stack=stack, t=t):
                at = now - max(0.0, SYSTEM.wall() - t)
                rounds.failed_far(msgspec.structs.replace(report, t=at), stack, now, t)
            case others.Standing(ranks=ranks):
                rounds.failures.stalled(Stalled(ranks=ranks), now)
            case others.WentOn(rank=rank):
                if (who := self._who.get((node, rank % self._nproc))) is not None:
                    rounds.went_on_far(who)

    def _start(self, node: int, rank: int, pid: int, inc: int) -> Occupant:
        """A process of another node; a launcher numbers the ranks of its node in a row."""
        seat = node, rank % self._nproc
        if seat not in self._boards:
            fd = shm.create()
            self._boards[seat] = shm.Board(fd)
            os.close(fd)
        self._tickets -= 1
        self._who[seat] = Occupant(
            ticket=self._tickets,
            rank=rank,
            inc=inc,
            pid=pid,
            board=self._boards[seat],
            file="",
            logs={},
            far=True,
        )
        return self._who[seat]

    def _look_for_silence(self, now: float) -> None:
        """All ranks of a round meet, so nodes that are not heard of write elsewhere."""
        state, silent = self._state, self._others.silent
        waits = bool(silent) and state.at_work
        self._alone_since = (self._alone_since or now) if waits else 0.0
        if waits and now - self._alone_since > _SILENT_S:
            names = ", ".join(map(str, silent))
            text = f"ranks train, but nothing is heard of node {names} in {self._run_dir}"
            advice = "all nodes need one run folder on shared storage (--run-dir)"
            state.end(ExitCode.USAGE, f"{text}: {advice}")
