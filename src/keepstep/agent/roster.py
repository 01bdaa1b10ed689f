"""The ranks of a node and the processes behind them: parked, given a number, replaced, gone.

Part of the agent's one thread; every method returns at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from keepstep import events
from keepstep.agent import environment, processes
from keepstep.agent.children import Children
from keepstep.agent.files import EventFiles
from keepstep.agent.launch_spec import Launch
from keepstep.agent.processes import RankProcess
from keepstep.agent.staging import Slots
from keepstep.agent.tail import Tails
from keepstep.clock import SYSTEM
from keepstep.config.load import encode
from keepstep.faults import cgroup
from keepstep.wire.channel import Closed
from keepstep.wire.loop import Loop
from keepstep.wire.messages import KillTree, RankDown, RankUp, Start

_PARKED_DEATHS = 3


class Roster:
    """All processes under the node's zygote.

    Args:
        spec: What is launched. children, loop, files, recorder, slots, tails: the agent's.
        handler: Gets (process, message) of every rank.
    """

    def __init__(
        self,
        spec: Launch,
        children: Children,
        loop: Loop,
        files: EventFiles,
        recorder: events.Recorder,
        slots: Slots,
        tails: Tails,
        handler: Callable[[RankProcess, Any], None],
    ) -> None:
        self._spec = spec
        self._children = children
        self._loop = loop
        self._files = files
        self._recorder = recorder
        self._slots = slots
        self._tails = tails
        self._handler = handler
        self._next_ticket = 0
        self._parked_deaths = 0
        self._ports: dict[int, int] = {}
        self.processes: dict[int, RankProcess] = {}
        self.by_rank: dict[int, RankProcess] = {}
        self.waiting = [(rank, 0, 1) for rank in range(spec.nproc)]
        """Rank, incarnation and round of numbers that need a process."""
        self.closed = False
        """Whether the job is over: nobody is started any more."""
        self.on_gone: Callable[[RankProcess, int], None] = lambda process, code: None

    def begin(self) -> None:
        """Ask for the first processes: one for each rank, and the spares."""
        for _ in range(self._spec.nproc + self._spec.config.rank.spares):
            self.spawn()

    @property
    def ranks(self) -> list[RankProcess]:
        """Living processes that have a rank number, by rank."""
        living = (process for process in self.by_rank.values() if process.state == "rank")
        return sorted(living, key=lambda process: process.rank)

    @property
    def living(self) -> list[RankProcess]:
        """Every process that has not been seen to end."""
        return [process for process in self.processes.values() if process.lives]

    def find(self, rank: int, inc: int) -> RankProcess | None:
        """The living process of ``rank``, if it still is incarnation ``inc``."""
        process = self.by_rank.get(rank)
        return process if process and process.inc == inc and process.lives else None

    def spawn(self) -> None:
        """Ask the zygote for a parked process."""
        self._next_ticket += 1
        process = processes.make(self._next_ticket, self._spec.log_dir, self._children.zygote)
        self.processes[process.ticket] = process
        self._loop.add(
            process.channel, lambda message: self._handler(process, message), lambda: None
        )

    def spawned(self, ticket: int, pid: int) -> None:
        """The zygote made a process."""
        process = self.processes[ticket]
        process.pid = pid
        if self.closed:
            self.kill(process)
        self.assign()

    def assign(self) -> None:
        """Give waiting rank numbers to parked processes."""
        if self.closed:
            return
        parked = [p for p in self.processes.values() if p.state == "parked" and p.pid]
        for wanted in list(self.waiting):
            before = self.by_rank.get(wanted[0])
            if before is not None and before.lives:
                continue  # its memory, on the GPU too, must be free first
            if not parked:
                return
            self.waiting.remove(wanted)
            self._start(parked.pop(0), *wanted)

    def _start(self, process: RankProcess, rank: int, inc: int, round: int) -> None:
        spec = self._spec
        process.state, process.rank, process.inc, process.round = "rank", rank, inc, round
        self.by_rank[rank] = process
        processes.name_logs(process, spec.log_dir)
        self._follow(process)
        if round not in self._ports:
            self._ports[round] = spec.master_port or environment.free_port(spec.master_addr)
        self._files.add(process.board, f"rank-{rank:05d}-{int(SYSTEM.wall())}-{process.pid}.jsonl")
        method = spec.config.rank.start_method
        started = events.RankStart(pid=process.pid, incarnation=inc, method=method, spare=inc > 0)
        self._recorder.emit(started, rank=rank, round=round)
        process.channel.send(self._start_message(rank, inc, round))
        self._children.coordinator.send(RankUp(rank=rank, inc=inc, pid=process.pid))

    def _start_message(self, rank: int, inc: int, round: int) -> Start:
        spec = self._spec
        variables = environment.rank_environment(
            spec, rank=rank, round=round, port=self._ports[round]
        )
        return Start(
            run=spec.run_id,
            rank=rank,
            local_rank=rank,
            world=spec.nproc,
            local_world=spec.nproc,
            node=0,
            inc=inc,
            round=round,
            env=variables,
            mode=spec.mode,
            target=spec.target,
            args=spec.args,
            config=encode(spec.config),
            run_dir=str(spec.run_dir),
        )

    def _follow(self, process: RankProcess) -> None:
        spec = self._spec
        chosen = spec.local_ranks_filter
        if chosen is not None and process.rank not in chosen:
            return
        hidden = spec.redirects.get(process.rank, 0)
        prefix = f"[rank {process.rank}] " if spec.nproc > 1 else ""
        for stream in (1, 2):
            if not hidden & stream and process.logs[stream].exists():
                self._tails.add(process.ticket, stream, process.logs[stream], prefix)

    def kill(self, process: RankProcess) -> None:
        """End a process with all its descendants; its exit is reported later."""
        process.ended_by_us = True
        try:
            self._children.zygote.send(KillTree(pid=process.pid))
        except Closed:
            return  # the ranks died with it; the loop reports the loss

    def replace(self, rank: int, inc: int, round: int) -> None:
        """End what is left of ``rank`` and give its number away for ``round``."""
        process = self.find(rank, inc)
        if process is not None:
            self.kill(process)
        self._parked_deaths = 0
        self.waiting.append((rank, inc + 1, round))
        self.spawn()  # a parked process takes the number now; this one becomes the next spare
        self.assign()

    def stop_parked(self) -> None:
        """The job is over: end the processes that never became ranks."""
        self.closed = True
        for process in self.processes.values():
            if process.state in ("parked", "forking") and process.pid:
                self.kill(process)

    def exited(self, pid: int, code: int, now: float) -> None:
        """The zygote saw a process end."""
        for process in self.living:
            if process.pid == pid:
                self._read_last(process)
                self.gone(process, code, now)
                return

    def _read_last(self, process: RankProcess) -> None:
        """What the process sent before it ended counts as sent before it ended."""
        channel = process.channel
        for _ in range(64):
            if channel.fileno() < 0 or not channel.read():
                break
        for message in channel.messages():
            self._handler(process, message)

    def gone(self, process: RankProcess, code: int, now: float) -> None:
        """A process has ended with ``code`` (-N: by signal N)."""
        was_rank = process.state == "rank"
        process.state = "gone"
        self.forget_channel(process)
        self._tails.end(process.ticket)
        self._slots.release(process.ticket)
        if was_rank:
            self._rank_gone(process, code, now)
        else:
            process.board.close()
            processes.drop_parked_logs(process)
            if not self.closed and not process.ended_by_us:
                self._parked_deaths += 1
                if self._parked_deaths <= _PARKED_DEATHS:
                    self.spawn()
        self.on_gone(process, code)
        self.assign()

    @property
    def hopeless(self) -> bool:
        """Whether parked processes keep dying while a rank waits for one.

        Without need, spares that die are only no longer made, until a rank has to be replaced.
        """
        return self._parked_deaths > _PARKED_DEATHS and bool(self.waiting)

    def _rank_gone(self, process: RankProcess, code: int, now: float) -> None:
        killed = bool(cgroup.collect(self._spec.run_id, process.pid))
        oom = killed and code == -signal.SIGKILL
        step = process.board.step
        ended = events.RankExit(
            pid=process.pid,
            incarnation=process.inc,
            code=code,
            oom=oom,
            by_us=process.ended_by_us,
        )
        number = process.board.round if process.adopted else process.round
        self._recorder.emit(ended, rank=process.rank, step=step, round=number)
        self._files.end(process.board)
        try:
            self._children.coordinator.send(
                RankDown(
                    rank=process.rank,
                    inc=process.inc,
                    code=code,
                    oom=oom,
                    by_us=process.ended_by_us,
                    step=step,
                    t=now,
                )
            )
        except Closed:
            return  # the loop reports the loss of the coordinator

    def forget_channel(self, process: RankProcess) -> None:
        """Stop serving a process and close its socket."""
        if process.channel.fileno() >= 0:
            self._loop.remove(process.channel)
            process.channel.close()

    def pass_signal(self, number: int) -> None:
        """Send a signal to every rank whose script does not use keepstep.run."""
        for process in self.ranks:
            if not process.adopted:
                try:
                    os.kill(process.pid, number)
                except ProcessLookupError:
                    continue
