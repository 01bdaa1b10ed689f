"""The coordinator's loop: one channel to the agent, a commit thread, the state machines.

Own process on node 0 (``python -m keepstep.coordinator``), without torch. It holds soft state only
and ends when its agent is gone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
from pathlib import Path

from keepstep import events, linux
from keepstep.checkpoint.lineage import Lineage
from keepstep.checkpoint.resume import finder
from keepstep.checkpoint.retention import Keep
from keepstep.clock import SYSTEM
from keepstep.config import Config
from keepstep.coordinator.committer import Committer
from keepstep.coordinator.kv import Answer, KeyValue
from keepstep.coordinator.rounds import Rounds
from keepstep.coordinator.saves import Saves, Settled
from keepstep.errors import ExitCode
from keepstep.policy.skipping import skip_line
from keepstep.policy.storage_stall import Stall
from keepstep.wire.channel import Channel, Closed
from keepstep.wire.loop import Loop
from keepstep.wire.messages import (
    TO_COORDINATOR,
    AgentHello,
    Failed,
    Join,
    Notice,
    Ping,
    Pong,
    RankDown,
    RankEvent,
    RankUp,
    Returned,
    SaveAnswer,
    SaveAsk,
    SaveBegun,
    SaveResult,
    ShardDone,
    SlotsMade,
    Stalled,
    Stepped,
    StopRequest,
    StoreForward,
    ToRank,
)

_TICK_S = 0.05


class EventFile:
    """Appends event lines from a thread of its own: storage may be slow."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="keepstep-events", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Append ``line``; never blocks."""
        self._lines.put(line)

    def close(self) -> None:
        """Write what is queued."""
        self._lines.put(None)
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        waiting = bytearray()
        with self._path.open("ab", buffering=0) as file:
            while (line := self._lines.get()) is not None:
                waiting += line
                # A full disk must not end a run: what it does not take is tried again next time.
                with contextlib.suppress(OSError):
                    while waiting:
                        del waiting[: file.write(waiting)]


class Coordinator:
    """Serves one agent on ``sock``.

    Args:
        sock: Connected to the agent. run, run_dir: the run. world: number of ranks.
        config: settings, with the checkpoint folder filled in.
        lease: the number under which the agent holds that folder; 0: it does not.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        run: str,
        run_dir: Path,
        world: int,
        config: Config,
        lease: int = 0,
    ) -> None:
        self._channel: Channel[TO_COORDINATOR] = Channel(sock, TO_COORDINATOR, blocking=False)
        self._root = Path(config.checkpoint.dir)
        self._run = run
        self._config = config
        self._loop = Loop()
        name = f"coordinator-0-{int(SYSTEM.wall())}-{os.getpid()}.jsonl"
        self._file = EventFile(run_dir / "events" / name)
        recorder = events.Recorder(self._file.put, run=run, src="coordinator", world=world)
        self._recorder = recorder
        checkpoint = config.checkpoint
        self._saves = Saves(world, checkpoint.write_limit_s, checkpoint.slots)
        elsewhere = finder(config.checkpoint.resume_from, self._damaged)
        self._lineage = Lineage(run_dir, run, self._root, self._damaged, elsewhere)
        self._rounds = Rounds(world, config, self._saves, self._emit, self._lineage)
        self._store = KeyValue()
        self._store_round = 0
        keep = Keep(config.checkpoint.keep_last, config.checkpoint.keep_every_steps)
        self._committer = Committer(self._root, keep, self._loop.wake, run_dir / "terms", lease)
        self._stall = Stall(config.checkpoint.stall_s)
        self._gone = False

    def _emit(
        self,
        data: events.EventData,
        *,
        rank: int | None = None,
        step: int | None = None,
        round: int | None = None,
    ) -> None:
        number = self._rounds.round if round is None else round
        self._recorder.emit(data, rank=rank, step=step, round=number)

    def serve(self) -> None:
        """Run until the job is over and the agent is gone."""
        self._rounds.begin()
        self._loop.add(self._channel, self._receive, self._lost)
        try:
            while not self._gone:
                self._loop.turn(_TICK_S)
                self._tick(SYSTEM.mono())
        except Closed:
            pass
        self._committer.close()
        self._lineage.close()
        self._file.close()

    def _receive(self, message: TO_COORDINATOR) -> None:
        self._handle(message, SYSTEM.mono())

    def _lost(self) -> None:
        self._gone = True

    def _tick(self, now: float) -> None:
        for version, error in self._committer.take():
            settled = (
                self._saves.failed(version, error)
                if error
                else self._saves.commit_done(version, now)
            )
            self._settled(settled)
        for settled in self._saves.late(now):
            self._settled(settled)
        self._look_at_commit(now)
        self._answer(self._store.expire(now))
        self._rounds.progress(now)
        self._send()

    def _look_at_commit(self, now: float) -> None:
        """Tell of a commit that storage blocks."""
        at, pid = self._committer.at, os.getpid()
        news, idle = self._stall.look(at, now), round(self._stall.idle_s, 3)
        if news == "stalled" and at is not None:
            state = linux.state(pid)
            stalled = events.StorageStalled(process="commit", pid=pid, state=state, idle_s=idle)
            self._emit(stalled, step=at[1])
            text = (
                f"storage has taken nothing for {idle:.0f} s: commit of step {at[1]}, process "
                f"{pid}, state {state}; training goes on"
            )
            self._channel.send(Notice(kind="fail", text=text, step=at[1]))
        elif news:
            self._emit(events.StorageMoves(process="commit", idle_s=idle))
            text = f"storage goes on after {idle:.0f} s in which a commit waited for it"
            self._channel.send(Notice(kind="fail", text=text))

    def _send(self) -> None:
        if self._rounds.opened_round != self._store_round:
            self._store_round = self._rounds.opened_round
            self._answer(self._store.open(self._store_round))
        for message in self._rounds.take():
            self._channel.send(message)

    def _answer(self, answers: list[Answer]) -> None:
        for answer in answers:
            self._channel.send(ToRank(rank=answer.rank, inc=answer.inc, body=answer.reply))

    def _handle(self, message: TO_COORDINATOR, now: float) -> None:
        rounds = self._rounds
        match message:
            case StoreForward(rank=rank, call=call):
                self._answer(self._store.call(rank, call, now))
            case RankUp():
                rounds.rank_up(message, now)
            case RankDown():
                rounds.rank_down(message, now)
            case RankEvent(rank=rank, body=body):
                self._rank_event(rank, body, now)
            case Stepped():
                rounds.stepped(message, now)
            case Stalled():
                rounds.stalled(message, now)
            case SaveBegun(rank=rank, version=version):
                error = self._saves.staged(rank, version, now)
                if error:
                    inc = self._rounds.incarnations()[rank]
                    result = SaveResult(step=version.step, error=error)
                    self._channel.send(ToRank(rank=rank, inc=inc, body=result))
            case ShardDone():
                self._shard_done(message, now)
            case SlotsMade(slots=slots):
                self._saves.limit_slots(slots)
            case StopRequest():
                rounds.stop_request(message, now)
            case Ping(number=number):
                self._channel.send(Pong(number=number))
            case AgentHello():
                pass
        self._send()

    def _rank_event(self, rank: int, body: object, now: float) -> None:
        match body:
            case Join():
                self._rounds.join(rank, body, now)
            case Failed():
                self._rounds.rank_failed(rank, body, now)
            case Returned():
                self._rounds.returned(rank, body, now)
            case SaveAsk():
                self._save_asked(rank, body, now)
            case _:
                self._rounds.stop_ack(rank, body, now)  # type: ignore[arg-type]

    # --- saves -----------------------------------------------------------------------------------

    def _damaged(self, folder: str, step: int, error: str) -> None:
        """A published checkpoint was passed over before any rank tried to load it."""
        self._emit(events.CheckpointUnusable(folder=folder, error=error), step=step)
        text = f"checkpoint {folder} is not usable: {error}"
        self._channel.send(Notice(kind="fail", text=text, step=step))

    def _save_asked(self, rank: int, ask: SaveAsk, now: float) -> None:
        asked = self._saves.ask(rank, ask.round, ask.step, now)
        inc = self._rounds.incarnations()[rank]
        if asked is None or ask.inc != inc:
            return
        if asked.reason and asked.first:
            self._emit(events.CheckpointSkip(reason=asked.reason), step=ask.step)
            text = skip_line(ask.step, asked.reason)
            self._channel.send(Notice(kind="skip", text=text, step=ask.step))
        body = SaveAnswer(round=ask.round, step=ask.step, reason=asked.reason)
        self._channel.send(ToRank(rank=rank, inc=inc, body=body))

    def _shard_done(self, done: ShardDone, now: float) -> None:
        if done.error:
            self._saves.shard_over(done.rank, done.version)
            self._settled(self._saves.failed(done.version, done.error))
            return
        ready = self._saves.durable(done.rank, done.version, done.folder, done.bytes, now)
        if ready is None:
            return
        of_this_round = done.version.round == self._rounds.round
        if not of_this_round or self._rounds.loaded():
            self._committer.put(ready)

    def _settled(self, settled: Settled | None) -> None:
        if settled is None:
            return
        step = settled.step
        if settled.error:
            self._emit(events.CheckpointFail(error=settled.error), step=step)
            text = f"checkpoint of step {step} was not committed: {settled.error}"
            self._channel.send(Notice(kind="fail", text=text, step=step))
        else:
            self._emit(
                events.CheckpointCommit(
                    folder=settled.folder, bytes=settled.bytes, save_s=round(settled.save_s, 6)
                ),
                step=step,
            )
            self._channel.send(Notice(kind="commit", text=settled.folder, step=step))
        for rank, inc in enumerate(self._rounds.incarnations()):
            body = SaveResult(step=step, error=settled.error)
            self._channel.send(ToRank(rank=rank, inc=inc, body=body))
        if self._saves.failed_in_a_row > self._config.checkpoint.max_failures:
            count = self._saves.failed_in_a_row
            text = f"{count} saves in a row failed, the last with: {settled.error}"
            self._rounds.fail(ExitCode.CHECKPOINT, text)


def ignore_terminal_signals() -> None:
    """Ctrl-C and SIGTERM are the agent's business; it tells the coordinator."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
