"""The agent: one per node, without torch. Starts ranks, watches them, ends and replaces them.

One thread, one loop: nothing here waits for storage, for a rank or for the coordinator.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from keepstep import events
from keepstep.agent.children import Children
from keepstep.agent.console import Console
from keepstep.agent.files import EventFiles
from keepstep.agent.hangs import HangWatch, bounds_of
from keepstep.agent.health_watch import HealthWatch
from keepstep.agent.launch_spec import Launch
from keepstep.agent.processes import RankProcess
from keepstep.agent.roster import Roster
from keepstep.agent.staging import Slots
from keepstep.agent.storage_watch import UNKNOWN, StorageWatch
from keepstep.agent.tail import Tails
from keepstep.checkpoint.storage import Rated
from keepstep.clock import SYSTEM
from keepstep.errors import ExitCode, NotEnoughMemory
from keepstep.policy.skipping import retry_line
from keepstep.ports import Finding, HealthCheck
from keepstep.shm import Phase
from keepstep.wire.channel import Channel, Closed
from keepstep.wire.loop import Loop
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
    JobEnd,
    Join,
    Kill,
    Message,
    Notice,
    Pong,
    RankEvent,
    Replace,
    Returned,
    SaveAsk,
    SaveBegun,
    ShardDone,
    ShardFailed,
    ShardRetry,
    SlotFree,
    SlotsDenied,
    SlotsMade,
    SlotWanted,
    Spawned,
    Staged,
    Stepped,
    StopAck,
    StopRequest,
    StoreCall,
    StoreForward,
    ToRank,
    Unstaged,
    ZygoteReady,
)

_TICK_S = 0.05
_LEAVE_S = 30.0
_CLOSE_S = 20.0
"""How long helpers may take to end, and ranks that were killed."""
_WRITERS_IN_VAIN = 3
"""Writers in a row that may end without having written a shard."""


class Agent:
    """Runs one job on one node.

    Args:
        spec: What is launched. console: where people look. checks: of the node's health.
        lost: Says, once another job has taken the folder of checkpoints, who it is.
        rated: What the file system of the checkpoints is rated for.
    """

    def __init__(
        self,
        spec: Launch,
        console: Console,
        checks: list[HealthCheck],
        lost: Callable[[], str] = str,
        rated: Rated = UNKNOWN,
    ) -> None:
        self._spec = spec
        self._console = console
        self._files = EventFiles(
            spec.run_dir / "events", f"agent-0-{int(SYSTEM.wall())}-{os.getpid()}.jsonl"
        )
        self.recorder = events.Recorder(
            self._files.put, run=spec.run_id, src="agent", world=spec.nproc
        )
        self._children = Children(spec)
        self._loop = Loop()
        self._slots = Slots(spec.config.checkpoint.dir, spec.config.checkpoint.retries)
        self._storage = StorageWatch(
            spec.config,
            spec.nproc,
            rated,
            emit=self.recorder.emit,
            say=console.say,
            tell=self._tell,
            lost=lost,
        )
        self._tails = Tails(console.show)
        self._health = HealthWatch(checks, self._loop.wake)
        self._watch = HangWatch[RankProcess](bounds_of(spec.config), spec.run_dir, _TICK_S)
        self._roster = Roster(
            spec,
            self._children,
            self._loop,
            self._files,
            self.recorder,
            self._slots,
            self._tails,
            self._from_rank,
        )
        self._roster.on_gone = self._gone
        self._end: JobEnd | None = None
        self._end_at = 0.0
        self._notice_at = 0.0
        self._signal = ""
        self._hurry = False
        self._writers_in_vain = 0
        self.failed_later: list[int] = []
        """Ranks that ended with an unexpected exit code after the job was over."""

    # --- life -----------------------------------------------------------------------------------

    def run(self) -> JobEnd:
        """Run the job to its end; returns how it ended."""
        spec, children = self._spec, self._children
        self.recorder.emit(events.NodeBegin(pid=os.getpid(), local_world=spec.nproc))
        children.coordinator.send(AgentHello(node=0, local_world=spec.nproc))
        self._serve("coordinator", children.coordinator, self._from_coordinator)
        self._serve("zygote", children.zygote, self._from_zygote)
        self._loop.add(children.writer, self._from_writer, self._lost_writer)
        self._roster.begin()
        try:
            while self._end is None or (self._roster.living and not self._stuck):
                self._loop.turn(_TICK_S)
                self._tick(SYSTEM.mono())
        finally:
            self._close()
        return self._end

    @property
    def _stuck(self) -> bool:
        """Whether ranks were killed and are still there: storage blocks them."""
        return SYSTEM.mono() >= self._end_at + _CLOSE_S

    def _serve(self, name: str, channel: Channel[Any], handler: Any) -> None:
        self._loop.add(channel, handler, lambda: self._lost(name))

    def _lost(self, name: str) -> None:
        """A helper process is gone, which must not happen before the end."""
        log = self._spec.log_dir / f"{name}.log"
        self._finish(
            JobEnd(
                exit_code=ExitCode.INTERNAL,
                reason=f"the {name} process ended before the job did; see {log}",
                graceful=False,
            )
        )
        if name == "zygote":  # its ranks died with it
            for process in self._roster.living:
                self._roster.gone(process, -signal.SIGKILL, SYSTEM.mono())

    def _lost_writer(self) -> None:
        """Start another one: the staged shards are still in our memory."""
        self._writers_in_vain += 1
        if self._end is not None or self._writers_in_vain > _WRITERS_IN_VAIN:
            self._lost("writer")
            return
        try:
            how = self._children.replace_writer()
            count = self._slots.write_again(self._children.writer)
        except (OSError, Closed):
            self._lost("writer")
            return
        self._loop.add(self._children.writer, self._from_writer, self._lost_writer)
        self._console.say(
            f"the writer process {how}; another one takes over, with {count} unfinished shards"
        )

    def notice(self, number: int) -> None:
        """Signal handler: the run is asked to stop; a second signal ends it at once."""
        self._hurry = bool(self._signal)
        self._signal = self._signal or signal.Signals(number).name
        self._loop.wake()

    def _close(self) -> None:
        for process in self._roster.processes.values():
            self._roster.forget_channel(process)
        for channel in (self._children.coordinator, self._children.zygote, self._children.writer):
            self._loop.remove(channel)
        for one in self._children.close(limit_s=_CLOSE_S):
            self._console.say(f"{one}, is left behind: it ends when storage lets it")
        self._health.close(limit_s=5.0)
        self._slots.close()
        self._loop.close()

    def close_files(self) -> bool:
        """Write the last events; False if storage does not take them."""
        return self._files.close()

    def _finish(self, end: JobEnd) -> None:
        if self._end is None:
            self._end = end
            self._end_at = SYSTEM.mono() + (_LEAVE_S if end.graceful else 0.0)
            self._roster.stop_parked()

    def _tell(self, message: Message) -> None:
        """Send to the coordinator; its loss is noticed by the loop."""
        try:
            self._children.coordinator.send(message)
        except Closed:
            return

    def found(self, finding: Finding) -> None:
        """Record a health finding; a node that must be replaced ends here."""
        self.recorder.emit(
            events.HealthFinding(check=finding.check, status=finding.status, detail=finding.detail)
        )
        if finding.status == "bad":
            self._console.say(f"health check {finding.check} is bad: {finding.detail}")
        if finding.action == "replace_node":
            text = f"this node is unhealthy: {finding.check}: {finding.detail}"
            self._finish(JobEnd(exit_code=ExitCode.NODE_UNHEALTHY, reason=text, graceful=False))

    # --- now and then ---------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        self._tails.poll()
        ranks = self._roster.ranks
        for process in ranks:
            step = process.first_step_done()
            if step:
                self._tell(
                    Stepped(
                        rank=process.rank, inc=process.inc, round=process.stepped_round, step=step
                    )
                )
        if self._end is None:
            self._look_for_hangs(ranks, now)
        for finding in self._health.take():
            self.found(finding)
        end = self._storage.look(
            self._slots,
            self._children.writer_process.pid,
            self._children.coordinator_process.pid,
            now,
        )
        if end is not None:
            self._finish(end)
        if self._roster.hopeless:
            logs = self._spec.log_dir / "parked-*.stderr.log"
            text = f"parked processes end before they are used; see {logs}"
            self._finish(JobEnd(exit_code=ExitCode.INTERNAL, reason=text, graceful=False))
        self._stop_on_notice(ranks, now)
        if self._end is not None and now >= self._end_at:
            for process in self._roster.living:
                if process.pid and not process.ended_by_us:
                    self._roster.kill(process)
        if ranks:
            board = ranks[0].board
            self._console.progress(board.done, board.step_s, board.loss, now)

    def _look_for_hangs(self, ranks: list[RankProcess], now: float) -> None:
        if any(one.board.phase == Phase.SAVE and self._slots.busy(one.ticket) for one in ranks):
            return  # it waits for storage and the others for it; the time is not counted after it
        stalled, suspects = self._watch.look(ranks, now)
        for process, suspect in suspects:
            self.recorder.emit(suspect, rank=process.rank, step=process.board.step)
            self._console.say(
                f"rank {process.rank} is suspect: no progress for {suspect.idle_s:.1f} s in "
                f"{suspect.phase}, step {process.board.step} (limit {suspect.limit_s:.1f} s)"
            )
        if stalled is not None:
            self._tell(stalled)

    def _stop_on_notice(self, ranks: list[RankProcess], now: float) -> None:
        if not self._signal or self._end is not None:
            return
        grace = self._spec.config.run.grace_s
        number = signal.Signals[self._signal]
        if not self._notice_at:
            self._notice_at = now
            self.recorder.emit(events.StopNotice(signal=self._signal))
            self._console.say(f"{self._signal}: ranks have {grace:.0f} s to commit a checkpoint")
            live = max((process.board.step for process in ranks), default=0)
            self._tell(StopRequest(signal=self._signal, live=live))
            self._roster.pass_signal(number)
        elif now - self._notice_at >= grace or self._hurry:
            waited = now - self._notice_at
            text = f"{self._signal}: ended after {waited:.0f} s without a checkpoint of that time"
            self._finish(JobEnd(exit_code=128 + number, reason=text, graceful=False))

    def _gone(self, process: RankProcess, code: int) -> None:
        self._watch.forget(process)
        end = self._end
        if end is None or not end.graceful or process.ended_by_us or process.rank < 0:
            return
        if code not in (0, end.exit_code):
            self.failed_later.append(process.rank)

    # --- messages -------------------------------------------------------------------------------

    def _from_zygote(self, message: FROM_ZYGOTE) -> None:
        match message:
            case ZygoteReady(threads=threads, error=error):
                if error:
                    text = f"preloading failed: {error}; set rank.preload"
                    self._finish(JobEnd(exit_code=ExitCode.USAGE, reason=text, graceful=False))
                elif threads > 1 and self._spec.config.rank.start_method == "fork":
                    self._console.say(
                        f"the preloaded process has {threads} threads; forking from it is not "
                        "safe, use --start-method spawn"
                    )
            case Spawned(ticket=ticket, pid=pid):
                self._roster.spawned(ticket, pid)
            case ChildExited(pid=pid, status=status, t=t):
                self._roster.exited(pid, os.waitstatus_to_exitcode(status), t)

    def _from_writer(self, message: FROM_WRITER) -> None:
        if isinstance(message, Committed):
            return  # only a writer without coordinator commits
        version = message.version
        if isinstance(message, ShardRetry):
            self.recorder.emit(
                events.CheckpointRetry(error=message.error, attempt=message.attempt),
                rank=message.rank,
                step=version.step,
                round=version.round,
            )
            line = retry_line(version.step, message.rank, message.attempt, message.error)
            self._console.say(line)
            return
        if isinstance(message, ShardFailed):
            done = ShardDone(
                rank=message.rank, version=version, folder="", bytes=0, error=message.error
            )
        else:
            self._writers_in_vain = 0
            done = ShardDone(
                rank=message.rank, version=version, folder=message.folder, bytes=message.bytes
            )
            self.recorder.emit(
                events.CheckpointShard(bytes=message.bytes, write_s=message.write_s),
                rank=message.rank,
                step=version.step,
                round=version.round,
            )
        freed = self._slots.written(message)
        if freed is not None:
            owner = self._roster.processes[freed.owner]
            if owner.lives:
                self._to(owner, SlotFree(slot=freed.number))
        self._tell(done)

    def _from_rank(self, process: RankProcess, message: FROM_RANK) -> None:
        match message:
            case Hello(protocol=protocol):
                if protocol != PROTOCOL:
                    text = f"a rank speaks protocol {protocol}, this agent {PROTOCOL}"
                    self._finish(JobEnd(exit_code=ExitCode.INTERNAL, reason=text, graceful=False))
                process.state = "parked"
                self._roster.assign()
            case StoreCall():
                self._tell(StoreForward(rank=process.rank, call=message))
            case SlotWanted():
                self._slots_wanted(process, message)
            case Unstaged(version=version, error=error):
                self._tell(SaveBegun(rank=process.rank, version=version))
                lost = ShardDone(
                    rank=process.rank, version=version, folder="", bytes=0, error=error
                )
                self._tell(lost)
            case Staged(version=version):
                if self._slots.write(process.rank, message, self._children.writer):
                    self._tell(SaveBegun(rank=process.rank, version=version))
                    self._storage.staged(version.step, message.size, process.board.step_s)
            case Join() | Failed() | Returned() | StopAck() | SaveAsk():
                process.adopted = process.adopted or isinstance(message, Join)
                self._tell(RankEvent(rank=process.rank, body=message))

    def _slots_wanted(self, process: RankProcess, wanted: SlotWanted) -> None:
        """Grant staging memory, if the node has it."""
        tickets = [one.ticket for one in self._roster.ranks]
        try:
            granted = self._slots.ask(process.ticket, wanted.size, wanted.count, tickets)
        except NotEnoughMemory as error:
            self._to(process, SlotsDenied(error=str(error)))
            return
        slots = len(granted.grants)
        self.recorder.emit(
            events.CheckpointMemory(
                slots=slots, slot_bytes=wanted.size, available_bytes=granted.left.available
            ),
            rank=process.rank,
        )
        if granted.line:
            self._console.say(granted.line)
        self._tell(SlotsMade(rank=process.rank, slots=slots, size=wanted.size))
        for grant, fd in granted.grants:
            process.channel.send(grant, (fd,))

    def _from_coordinator(self, message: FROM_COORDINATOR) -> None:
        match message:
            case ToRank(rank=rank, inc=inc, body=body):
                process = self._roster.find(rank, inc)
                if process is not None:
                    process.note(body)
                    self._to(process, body)
            case Kill(rank=rank, inc=inc):
                process = self._roster.find(rank, inc)
                if process is not None:
                    self._roster.kill(process)
            case Replace(rank=rank, inc=inc, round=round):
                self._roster.replace(rank, inc, round)
            case Pong(number=number):
                self._storage.answered(number)
            case Notice():
                self._say(message)
            case JobEnd():
                self._finish(message)

    def _to(self, process: RankProcess, body: Message) -> None:
        try:
            process.channel.send(body)
        except Closed:
            return  # its exit is on the way

    def _say(self, notice: Notice) -> None:
        if notice.kind == "restart":
            self._health.start()
        self._console.notice(notice)
