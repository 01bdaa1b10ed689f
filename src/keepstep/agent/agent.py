"""The agent: one per node, without torch. Starts ranks, watches them, ends and replaces them.

One thread, one selector: nothing here waits for storage, for a rank or for the coordinator.
"""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable
from typing import Any

from keepstep import events
from keepstep.agent import environment, processes
from keepstep.agent.children import Children
from keepstep.agent.console import Console
from keepstep.agent.files import EventFiles
from keepstep.agent.hangs import HangWatch
from keepstep.agent.launch_spec import Launch
from keepstep.agent.processes import RankProcess
from keepstep.agent.staging import Slots
from keepstep.agent.tail import Tails
from keepstep.clock import SYSTEM
from keepstep.config.load import encode
from keepstep.errors import ExitCode, InternalError
from keepstep.faults import cgroup
from keepstep.wire.channel import Channel, Closed
from keepstep.wire.messages import (
    FROM_COORDINATOR,
    FROM_RANK,
    FROM_WRITER,
    FROM_ZYGOTE,
    PROTOCOL,
    AgentHello,
    ChildExited,
    Committed,
    Failed,
    Hello,
    Join,
    JobEnd,
    Kill,
    KillTree,
    Notice,
    RankDown,
    RankEvent,
    RankUp,
    Replace,
    Returned,
    SaveBegun,
    ShardDone,
    ShardFailed,
    ShardWritten,
    SlotFree,
    SlotWanted,
    Spawned,
    Staged,
    Start,
    Stepped,
    StopAck,
    StopRequest,
    StoreCall,
    StoreForward,
    ToRank,
    ZygoteReady,
)

_TICK_S = 0.05
_LEAVE_S = 30.0


class Agent:
    """Runs one job on one node.

    Args:
        spec: What is launched. console: where people look.
    """

    def __init__(self, spec: Launch, console: Console) -> None:
        self._spec = spec
        self._console = console
        self._files = EventFiles(
            spec.run_dir / "events", f"agent-0-{int(SYSTEM.wall())}-{os.getpid()}.jsonl"
        )
        self.recorder = events.Recorder(
            self._files.put, run=spec.run_id, src="agent", world=spec.nproc
        )
        self._children = Children(spec)
        self._selector = selectors.DefaultSelector()
        self._processes: dict[int, RankProcess] = {}
        self._ranks: dict[int, RankProcess] = {}
        self._waiting: list[tuple[int, int, int]] = []  # rank, incarnation, round
        self._next_ticket = 0
        self._ports: dict[int, int] = {}
        self._slots = Slots(spec.config.checkpoint.dir)
        self._tails = Tails(console.show)
        self._watch = HangWatch(spec.config, spec.run_dir, _TICK_S)
        self._end: JobEnd | None = None
        self._end_at = 0.0
        self._failure: InternalError | None = None
        self._notice_at = 0.0
        self._signal = ""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._leftover: list[int] = []

    # --- life -----------------------------------------------------------------------------------------

    def run(self) -> JobEnd:
        """Run the job to its end; returns how it ended."""
        spec = self._spec
        self.recorder.emit(events.NodeBegin(pid=os.getpid(), local_world=spec.nproc))
        self._children.coordinator.send(AgentHello(node=0, local_world=spec.nproc))
        self._register(self._children.coordinator, self._from_coordinator)
        self._register(self._children.zygote, self._from_zygote)
        self._register(self._children.writer, self._from_writer)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._waiting = [(rank, 0, 1) for rank in range(spec.nproc)]
        for _ in range(spec.nproc + spec.config.rank.spares):
            self._spawn()
        try:
            while not self._over():
                self._turn()
        finally:
            self._close()
        assert self._end is not None
        return self._end

    def notice(self, number: int) -> None:
        """Signal handler: the run is asked to stop; a second Ctrl-C ends it at once."""
        name = signal.Signals(number).name
        if self._signal and number == signal.SIGINT and self._notice_at:
            self._notice_at = SYSTEM.mono() - self._spec.config.run.grace_s
        self._signal = self._signal or name
        os.write(self._wake_write, b"x")

    def _over(self) -> bool:
        return self._end is not None and not any(p.lives for p in self._processes.values())

    def _close(self) -> None:
        if any(p.lives for p in self._processes.values()):
            for process in self._processes.values():
                if process.lives and process.pid:
                    self._kill(process)
        for process in self._processes.values():
            self._forget_channel(process)
        for channel in (self._children.coordinator, self._children.zygote, self._children.writer):
            self._unregister(channel)
        self._children.close(limit_s=20.0)
        self._slots.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def close_files(self) -> None:
        """Write the last events."""
        self._files.close()

    # --- loop -----------------------------------------------------------------------------------------

    def _register(self, channel: Channel[Any], handler: Callable[[Any], None]) -> None:
        self._selector.register(channel, selectors.EVENT_READ, (channel, handler))

    def _unregister(self, channel: Channel[Any]) -> None:
        try:
            self._selector.unregister(channel)
        except (KeyError, ValueError):
            return

    def _turn(self) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                wants = selectors.EVENT_WRITE if key.data[0].wants_write else 0
                if key.events != selectors.EVENT_READ | wants:
                    self._selector.modify(
                        key.fileobj, selectors.EVENT_READ | wants, key.data
                    )
        for key, mask in self._selector.select(_TICK_S):
            if key.data is None:
                os.read(self._wake_read, 4096)
                continue
            channel, handler = key.data
            self._serve(channel, handler, mask)
        self._tick(SYSTEM.mono())

    def _serve(self, channel: Channel[Any], handler: Callable[[Any], None], mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                channel.flush()
            alive = not mask & selectors.EVENT_READ or channel.read()
            for message in channel.messages():
                handler(message)
        except Closed:
            alive = False
        if not alive:
            self._lost(channel)

    def _lost(self, channel: Channel[Any]) -> None:
        self._unregister(channel)
        names = {
            id(self._children.coordinator): "coordinator",
            id(self._children.zygote): "zygote",
            id(self._children.writer): "writer",
        }
        name = names.get(id(channel))
        if name is not None and self._end is None:
            text = f"the {name} process ended; see {self._spec.log_dir / name}.log"
            self._finish(JobEnd(exit_code=ExitCode.INTERNAL, reason=text, graceful=False))
        if name == "zygote":  # its ranks died with it
            for process in self._processes.values():
                if process.lives:
                    self._gone(process, -signal.SIGKILL, SYSTEM.mono())

    def _tick(self, now: float) -> None:
        self._tails.poll()
        ranks = [p for p in self._ranks.values() if p.state == "rank"]
        self._report_steps(ranks)
        if self._end is None:
            stalled, suspects = self._watch.look(ranks, now)
            for process, suspect in suspects:
                self.recorder.emit(suspect, rank=process.rank, step=process.board.step)
                self._console.say(
                    f"rank {process.rank} is suspect: no progress for {suspect.idle_s:.1f} s in "
                    f"{suspect.phase} (ended after {suspect.limit_s:.1f} s)"
                )
            if stalled is not None:
                self._children.coordinator.send(stalled)
        if self._signal and not self._notice_at:
            self._begin_stop(ranks, now)
        if self._notice_at and now - self._notice_at >= self._spec.config.run.grace_s:
            self._grace_over()
        if self._end is not None and now >= self._end_at:
            for process in self._processes.values():
                if process.lives and process.pid and not process.ended_by_us:
                    self._kill(process)
        self._show_progress(ranks, now)

    def _report_steps(self, ranks: list[RankProcess]) -> None:
        for process in ranks:
            board = process.board
            number = board.round if process.adopted else process.round
            if board.steps and number != process.stepped_round and board.step_s >= 0:
                if process.adopted and board.done <= process.resumed_at:
                    continue
                process.stepped_round = number
                self._children.coordinator.send(
                    Stepped(rank=process.rank, inc=process.inc, round=number, step=board.done)
                )

    def _show_progress(self, ranks: list[RankProcess], now: float) -> None:
        if ranks:
            first = min(ranks, key=lambda process: process.rank)
            board = first.board
            self._console.progress(board.done, board.step_s, board.loss, now)

    # --- making and ending processes --------------------------------------------------------------

    def _spawn(self) -> None:
        self._next_ticket += 1
        process = processes.make(self._next_ticket, self._spec.log_dir, self._children.zygote)
        self._processes[process.ticket] = process
        self._register(process.channel, lambda message: self._from_rank(process, message))

    def _assign(self) -> None:
        """Give waiting rank numbers to parked processes."""
        if self._end is not None:
            return
        parked = [p for p in self._processes.values() if p.state == "parked" and p.pid]
        for wanted in list(self._waiting):
            before = self._ranks.get(wanted[0])
            if before is not None and before.lives:
                continue  # its memory, on the GPU too, must be free first
            if not parked:
                return
            self._waiting.remove(wanted)
            self._start(parked.pop(0), *wanted)

    def _start(self, process: RankProcess, rank: int, inc: int, round: int) -> None:
        spec = self._spec
        process.state, process.rank, process.inc, process.round = "rank", rank, inc, round
        self._ranks[rank] = process
        processes.name_logs(process, spec.log_dir)
        self._follow(process)
        if round not in self._ports:
            self._ports[round] = spec.master_port or environment.free_port(spec.master_addr)
        start = Start(
            run=spec.run_id,
            rank=rank,
            local_rank=rank,
            world=spec.nproc,
            local_world=spec.nproc,
            node=0,
            inc=inc,
            round=round,
            env=environment.rank_environment(
                spec, rank=rank, round=round, port=self._ports[round], fresh_base=False
            ),
            mode=spec.mode,
            target=spec.target,
            args=spec.args,
            config=encode(spec.config),
            run_dir=str(spec.run_dir),
        )
        process.channel.send(start)
        name = f"rank-{rank:05d}-{int(SYSTEM.wall())}-{process.pid}.jsonl"
        self._files.add(process.board, name)
        self.recorder.emit(
            events.RankStart(
                pid=process.pid,
                incarnation=inc,
                method=spec.config.rank.start_method,
                spare=inc > 0,
            ),
            rank=rank,
            round=round,
        )
        self._children.coordinator.send(RankUp(rank=rank, inc=inc, pid=process.pid))

    def _follow(self, process: RankProcess) -> None:
        spec = self._spec
        chosen = spec.local_ranks_filter
        if chosen is not None and process.rank not in chosen:
            return
        hidden = spec.redirects.get(process.rank, 0)
        for stream in (1, 2):
            if not hidden & stream:
                prefix = f"[rank {process.rank}] " if spec.nproc > 1 else ""
                self._tails.add(process.ticket, stream, process.logs[stream], prefix)

    def _kill(self, process: RankProcess) -> None:
        process.ended_by_us = True
        try:
            self._children.zygote.send(KillTree(pid=process.pid))
        except Closed:
            self._lost(self._children.zygote)

    def _gone(self, process: RankProcess, code: int, now: float) -> None:
        was_rank = process.state == "rank"
        process.state = "gone"
        self._forget_channel(process)
        self._watch.forget(process)
        self._tails.end(process.ticket)
        self._slots.release(process.ticket)
        if not was_rank:
            process.board.close()
            processes.drop_parked_logs(process)
            if self._end is None and not process.ended_by_us:
                self._parked_died(code)
            return
        oom = bool(cgroup.collect(self._spec.run_id, process.pid)) and code == -signal.SIGKILL
        step = process.board.step
        self.recorder.emit(
            events.RankExit(
                pid=process.pid,
                incarnation=process.inc,
                code=code,
                oom=oom,
                by_us=process.ended_by_us,
            ),
            rank=process.rank,
            step=step,
        )
        self._files.end(process.board)
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
        if self._end is not None and self._end.graceful and not process.ended_by_us:
            if code not in (0, self._end.exit_code):
                self._leftover.append(process.rank)
        self._assign()

    def _parked_died(self, code: int) -> None:
        self._died_parked += 1
        if self._died_parked > 3:
            text = f"{self._died_parked} parked processes ended with {code} before they were used"
            self._finish(JobEnd(exit_code=ExitCode.INTERNAL, reason=text, graceful=False))
        else:
            self._spawn()

    _died_parked = 0

    def _forget_channel(self, process: RankProcess) -> None:
        if process.channel.fileno() >= 0:
            self._unregister(process.channel)
            process.channel.close()

    def _finish(self, end: JobEnd) -> None:
        if self._end is not None:
            return
        self._end = end
        self._end_at = SYSTEM.mono() + (_LEAVE_S if end.graceful else 0.0)
        for process in self._processes.values():
            if process.state in ("parked", "forking") and process.pid:
                self._kill(process)

    # --- messages -----------------------------------------------------------------------------------

    def _from_zygote(self, message: FROM_ZYGOTE) -> None:
        match message:
            case ZygoteReady(threads=threads, error=error):
                if error:
                    text = f"preloading failed: {error}"
                    self._finish(JobEnd(exit_code=ExitCode.USAGE, reason=text, graceful=False))
                elif threads > 1 and self._spec.config.rank.start_method == "fork":
                    self._console.say(
                        f"the preloaded process has {threads} threads; forking from it is not safe, "
                        "use --start-method spawn"
                    )
            case Spawned(ticket=ticket, pid=pid):
                self._processes[ticket].pid = pid
                if self._end is not None:
                    self._kill(self._processes[ticket])
                self._assign()
            case ChildExited(pid=pid, status=status, t=t):
                for process in self._processes.values():
                    if process.pid == pid and process.lives:
                        self._read_last(process)
                        self._gone(process, os.waitstatus_to_exitcode(status), t)
                        break

    def _read_last(self, process: RankProcess) -> None:
        """What the process sent before it ended counts as sent before it ended."""
        try:
            while process.channel.fileno() >= 0 and process.channel.read():
                before = False
                for message in process.channel.messages():
                    self._from_rank(process, message)
                    before = True
                if not before:
                    return
        except (Closed, InternalError):
            return

    def _from_writer(self, message: FROM_WRITER) -> None:
        match message:
            case ShardWritten():
                done = ShardDone(
                    rank=message.rank,
                    version=message.version,
                    folder=message.folder,
                    bytes=message.bytes,
                )
                self.recorder.emit(
                    events.CheckpointShard(bytes=message.bytes, write_s=message.write_s),
                    rank=message.rank,
                    step=message.version.step,
                    round=message.version.round,
                )
            case ShardFailed():
                done = ShardDone(
                    rank=message.rank,
                    version=message.version,
                    folder="",
                    bytes=0,
                    error=message.error,
                )
            case Committed():
                return
        freed = self._slots.written(message)
        if freed is not None:
            owner = self._processes[freed.owner]
            if owner.lives:
                self._to(owner, SlotFree(slot=freed.number))
        self._children.coordinator.send(done)

    def _from_rank(self, process: RankProcess, message: FROM_RANK) -> None:
        coordinator = self._children.coordinator
        match message:
            case Hello(protocol=protocol):
                if protocol != PROTOCOL:
                    raise InternalError(f"a rank speaks protocol {protocol}, not {PROTOCOL}")
                process.state = "parked"
                self._assign()
            case StoreCall():
                coordinator.send(StoreForward(rank=process.rank, call=message))
            case SlotWanted(size=size, count=count):
                for grant, fd in self._slots.grant(process.ticket, size, count):
                    process.channel.send(grant, (fd,))
            case Staged(version=version):
                if self._slots.write(process.rank, message, self._children.writer):
                    coordinator.send(SaveBegun(rank=process.rank, version=version))
            case Join() | Failed() | Returned() | StopAck():
                if isinstance(message, Join):
                    process.adopted = True
                coordinator.send(RankEvent(rank=process.rank, body=message))

    def _from_coordinator(self, message: FROM_COORDINATOR) -> None:
        match message:
            case ToRank(rank=rank, inc=inc, body=body):
                process = self._ranks.get(rank)
                if process is not None and process.inc == inc and process.lives:
                    process.note(body)
                    self._to(process, body)
            case Kill(rank=rank, inc=inc):
                process = self._ranks.get(rank)
                if process is not None and process.inc == inc and process.lives:
                    self._kill(process)
            case Replace(rank=rank, inc=inc, round=round):
                self._replace(rank, inc, round)
            case Notice():
                self._say(message)
            case JobEnd():
                self._finish(message)

    def _to(self, process: RankProcess, body: Any) -> None:
        try:
            process.channel.send(body)
        except Closed:
            return  # its exit is on the way

    def _replace(self, rank: int, inc: int, round: int) -> None:
        process = self._ranks.get(rank)
        if process is not None and process.inc == inc and process.lives:
            self._kill(process)
        self._waiting.append((rank, inc + 1, round))
        self._spawn()  # a parked process takes the number now; this one becomes the next spare
        self._assign()

    def _say(self, notice: Notice) -> None:
        if notice.kind == "commit":
            self._console.committed = max(self._console.committed, notice.step)
            return
        if notice.kind == "restart":
            self._console.restarts += 1
        if notice.kind == "go" and notice.step:
            self._console.committed = notice.step
        self._console.say(notice.text)

    # --- stopping on notice -------------------------------------------------------------------------

    def _begin_stop(self, ranks: list[RankProcess], now: float) -> None:
        self._notice_at = now
        self.recorder.emit(events.StopNotice(signal=self._signal))
        grace = self._spec.config.run.grace_s
        self._console.say(f"{self._signal}: ranks have {grace:.0f} s to commit a checkpoint")
        live = max((process.board.step for process in ranks), default=0)
        self._children.coordinator.send(StopRequest(signal=self._signal, live=live))
        for process in ranks:
            if not process.adopted:
                os.kill(process.pid, signal.Signals[self._signal])

    def _grace_over(self) -> None:
        number = int(signal.Signals[self._signal])
        text = f"{self._signal}: no checkpoint was committed within the grace period"
        self._finish(JobEnd(exit_code=128 + number, reason=text, graceful=False))

    @property
    def leftover(self) -> list[int]:
        """Ranks that ended with an unexpected exit code after the job was over."""
        return self._leftover
