"""Own staging slots and an own writer process, for a rank without an agent.

Runs in the rank. Slots are anonymous shared memory; the writer process gets their descriptors, so a
save goes on while training does, and is finished even if the rank dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from keepstep import linux, memory
from keepstep.checkpoint import layout
from keepstep.clock import SYSTEM, Clock
from keepstep.errors import InternalError, SaveFailed
from keepstep.policy.skipping import retry_line
from keepstep.policy.storage_stall import Stall
from keepstep.rank.shard_writer import Slot
from keepstep.rank.slots import HEADROOM, Made, SlotPool
from keepstep.wire.channel import Channel, Closed, pair
from keepstep.wire.messages import (
    FROM_WRITER,
    Committed,
    ShardFailed,
    ShardRetry,
    ShardWritten,
    WriteShard,
)
from keepstep.wire.types import Version

CLOSE_LIMIT_S = 600.0
EXIT_LIMIT_S = 30.0
POLL_S = 0.02
KILLED_S = 2.0
"""How long a killed process may take to be gone."""
STALL_S = 30.0
LOOK_S = 0.5
_ERRORS_SHOWN = 16_000


class LocalWrite:
    """A save of one rank; implements ``ports.PendingWrite``.

    Rank 0's writer commits and says so; the other ranks look for the manifest.
    """

    def __init__(self, version: Version, rank: int, root: Path, clock: Clock) -> None:
        self.version = version
        self.begun = clock.mono()
        self._rank = rank
        self._root = root
        self._clock = clock
        self._told = threading.Event()
        self._folder = ""
        self._error: SaveFailed | None = None

    def written(self, folder: str) -> None:
        """This rank's shard is durable in ``folder``."""
        self._folder = folder
        if self._rank != 0:
            self._told.set()

    def committed(self) -> None:
        """The manifest is published."""
        self._told.set()

    def failed(self, error: SaveFailed) -> None:
        """It will never be committed."""
        self._error = self._error or error
        self._told.set()

    @property
    def writing(self) -> bool:
        """Whether this rank has still to do something for it: on rank 0 until it is committed."""
        return not self._told.is_set()

    @property
    def error(self) -> SaveFailed | None:
        """Why it will never be committed, as far as this rank knows."""
        return self._error

    def staged(self) -> bool:
        """True from the start: ``submit`` is called after the copy."""
        return True

    def done(self) -> bool:
        """Whether it is committed or has failed."""
        return self._told.is_set() and (
            self._error is not None or self._rank == 0 or self._published()
        )

    def _published(self) -> bool:
        folder = self._root / self._folder
        # Retention removes a folder only after a newer commit, and that took all ranks.
        return (folder / layout.MANIFEST).exists() or not folder.exists()

    def wait(self, timeout_s: float) -> None:
        """Return when committed.

        Raises:
            SaveFailed: it failed, or is not committed after ``timeout_s`` seconds.
        """
        deadline = self._clock.mono() + timeout_s
        self._told.wait(timeout_s)
        while not self.done() and self._clock.mono() < deadline:
            self._clock.sleep(POLL_S)
        if not self.done():
            what = "is not committed" if self._told.is_set() else "is not written"
            raise SaveFailed(
                f"the save of step {self.version.step} {what} after {timeout_s:.3g} s",
                where=f"rank {self._rank}, {self._root}",
                done="it goes on in the background",
                advice="look for ranks that did not save this step, and at the speed of storage",
            )
        if self._error is not None:
            raise self._error


@dataclass(frozen=True)
class _Process:
    """A writer process, its channel, the thread that reads from it, and what it wrote to stderr.

    It has no descriptor of the script's output: where storage does not let it end, whoever reads
    that output to its end would wait as well.
    """

    popen: subprocess.Popen[bytes]
    channel: Channel[FROM_WRITER]
    reader: threading.Thread
    errors: BinaryIO


class LocalStaging:
    """Implements ``shard_writer.Staging`` with a writer process of this rank.

    Args:
        root: Folder of the checkpoints.
        rank: This rank; rank 0's writer commits.
        keep_last: Committed checkpoints to keep.
        keep_every_steps: Also keep those of steps that are a multiple of it; 0: none.
        retries: How often a shard that storage refused is written again.
        slots: Staging copies, of which one is written while the next is filled.
        clock: Where time comes from.
        on_commit: Told on rank 0, by a thread: version, folder, bytes of all ranks, seconds.
        close_limit_s: How long ``close`` waits for unfinished writes.
        lease: Number under which ``root`` is held; nothing is committed once it is lost. 0: none.
        stall_s: Storage that takes nothing for so long is told of.
    """

    def __init__(
        self,
        root: Path,
        *,
        rank: int,
        keep_last: int,
        keep_every_steps: int = 0,
        retries: int = 0,
        slots: int = 2,
        clock: Clock = SYSTEM,
        on_commit: Callable[[Version, str, int, float], None] | None = None,
        close_limit_s: float = CLOSE_LIMIT_S,
        lease: int = 0,
        stall_s: float = STALL_S,
    ) -> None:
        self._lease = lease
        self._stall = Stall(stall_s)
        self._on_commit = on_commit
        self._root = root
        self._rank = rank
        self._keep_last = keep_last
        self._keep_every_steps = keep_every_steps
        self._clock = clock
        self._close_limit_s = close_limit_s
        self._changed = threading.Condition()
        self._retries = retries
        self._count = slots
        self._checked = 0
        """Bytes of a slot for which all ranks of the node have found that there is memory."""
        self._made = 0
        self._pool = SlotPool(self._make, rank=rank, clock=clock)
        self._writing: dict[int, tuple[int, LocalWrite]] = {}  # by ticket: slot and save
        self._committing: dict[Version, LocalWrite] = {}
        self._tickets = 0
        self._process: _Process | None = None
        self._alive = False
        self._closed = False

    @property
    def writer_pid(self) -> int | None:
        """Process id of the writer, None if none was started."""
        return self._process.popen.pid if self._process else None

    @property
    def pool(self) -> SlotPool:
        """The slots."""
        return self._pool

    def prepare(self, size: int, slots: int) -> None:
        """Begin to make ``slots`` slots, of which it is known that there is memory for them."""
        self._count, self._checked = slots, size + HEADROOM
        self._pool.prepare(size, slots)

    def acquire(self, size: int, timeout_s: float) -> Slot:
        """A free slot of at least ``size`` bytes; waits while all are being written.

        Raises:
            SaveFailed: none became free within ``timeout_s`` seconds.
            NotEnoughMemory: there is no memory for one.
        """
        return self._pool.acquire(size, timeout_s, self._count)

    def release(self, slot: Slot) -> None:
        """Give back a slot that will not be submitted."""
        self._pool.release(slot)

    def _make(self, capacity: int, count: int) -> Made:
        """In a thread of the pool: slots, as far as there is memory for them."""
        if capacity - HEADROOM > self._checked:
            wanted, left = memory.Wanted(capacity, count, 1), memory.room()
            count = memory.fitting(wanted, left)
            if not count:
                raise memory.shortage(wanted, left)
        made: Made = []
        for _ in range(count):
            self._made += 1
            fd = os.memfd_create(f"keepstep-slot-{self._made}", os.MFD_CLOEXEC)
            made.append((self._made, capacity, fd))
            os.ftruncate(fd, capacity)
        return made

    def submit(self, slot: Slot, size: int, version: Version) -> LocalWrite:
        """Have the writer process write the first ``size`` bytes of ``slot``."""
        pending = LocalWrite(version, self._rank, self._root, self._clock)
        with self._changed:
            process = self._running()
            self._pool.written(slot.id)
            self._tickets += 1
            ticket = self._tickets
            self._writing[ticket] = (slot.id, pending)
            if self._rank == 0:
                self._committing[version] = pending
        message = WriteShard(
            ticket=ticket,
            rank=self._rank,
            size=size,
            version=version,
            root=str(self._root),
            commit=self._rank == 0,
            keep_last=self._keep_last,
            keep_every_steps=self._keep_every_steps,
            retries=self._retries,
            lease=self._lease,
        )
        try:
            process.channel.send(message, (self._pool.fd(slot.id),))
        except Closed:
            # The reader thread sees the same, and reports how the process ended.
            process.reader.join()
        return pending

    def _running(self) -> _Process:
        if self._process is not None and self._alive:
            return self._process
        if self._process is not None:
            self._process.channel.close()
            self._process.errors.close()
        ours, theirs = pair()
        errors = os.fdopen(os.memfd_create("keepstep-writer-errors", os.MFD_CLOEXEC), "w+b", 0)
        try:
            popen = subprocess.Popen(
                [
                    *(sys.executable, "-m", "keepstep.checkpoint.writer_process"),
                    *("--fd", str(theirs.fileno())),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,  # Ctrl-C must not end a save
            )
        except OSError as error:
            ours.close()
            errors.close()
            raise SaveFailed(
                f"the writer process could not be started: {error}",
                where=f"rank {self._rank}",
                done="this step was not saved",
                advice="check memory and the limit on processes",
            ) from error
        finally:
            theirs.close()
        channel: Channel[FROM_WRITER] = Channel(ours, FROM_WRITER, blocking=True)
        reader = threading.Thread(
            target=self._read,
            args=(popen, channel, errors),
            name="keepstep-writer-reader",
            daemon=True,
        )
        self._process = _Process(popen, channel, reader, errors)
        self._alive = True
        reader.start()
        return self._process

    # --- in the reader thread -----------------------------------------------------------------

    def _read(
        self, popen: subprocess.Popen[bytes], channel: Channel[FROM_WRITER], errors: BinaryIO
    ) -> None:
        try:
            alive = True
            while alive:
                if not select.select([channel], [], [], LOOK_S)[0]:
                    self._look_at_storage(popen.pid)
                    continue
                alive = channel.read()
                for message in channel.messages():
                    self._take(message)
        except InternalError:
            pass  # of no use any more
        _hang_up(channel)
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = popen.wait(EXIT_LIMIT_S)
        if status is None:
            popen.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = popen.wait(KILLED_S)
        if status:
            sys.stderr.write(os.pread(errors.fileno(), _ERRORS_SHOWN, 0).decode(errors="replace"))
        self._ended(popen.pid, status)

    def _look_at_storage(self, pid: int) -> None:
        with self._changed:
            steps = [pending.version.step for _, pending in self._writing.values()]
        mark = (tuple(steps), linux.written(pid)) if steps else None
        news = self._stall.look(mark, self._clock.mono())
        if news == "stalled":
            sys.stderr.write(
                f"keepstep: storage has taken nothing for {self._stall.idle_s:.0f} s: save of step "
                f"{steps[0]}, writer process {pid} of rank {self._rank}, state {linux.state(pid)}; "
                "training goes on\n"
            )
        elif news:
            sys.stderr.write(
                f"keepstep: storage goes on after {self._stall.idle_s:.0f} s in which the writer "
                f"of rank {self._rank} waited for it\n"
            )

    def _take(self, message: FROM_WRITER) -> None:
        if isinstance(message, ShardRetry):
            line = retry_line(message.version.step, self._rank, message.attempt, message.error)
            sys.stderr.write(f"keepstep: {line}\n")
            return  # the slot stays the writer's
        with self._changed:
            if isinstance(message, Committed):
                pending = self._committing.pop(message.version, None)
                if pending is not None and message.error:
                    pending.failed(self._refused(message.version, message.error))
                elif pending is not None:
                    pending.committed()
                    if self._on_commit is not None:
                        seconds = self._clock.mono() - pending.begun
                        self._on_commit(message.version, message.folder, message.bytes, seconds)
                self._changed.notify_all()
                return
            slot, pending = self._writing.pop(message.ticket)
            if isinstance(message, ShardFailed):
                self._committing.pop(message.version, None)
                pending.failed(self._refused(message.version, message.error))
            elif isinstance(message, ShardWritten):
                pending.written(message.folder)
            self._pool.freed(slot)
            self._changed.notify_all()

    def _refused(self, version: Version, error: str) -> SaveFailed:
        return SaveFailed(
            f"the save of step {version.step} failed: {error.rstrip('.')}",
            where=f"rank {self._rank}",
        )

    def _ended(self, pid: int, status: int | None) -> None:
        if status is None:
            how = f"is blocked by storage (state {linux.state(pid)}) and was given up"
        else:
            how = f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"
        with self._changed:
            self._alive = False
            left = [pending for _, pending in self._writing.values()]
            left += [pending for pending in self._committing.values() if pending not in left]
            for slot, _ in self._writing.values():
                self._pool.freed(slot)
            self._writing.clear()
            self._committing.clear()
            for pending in left:
                pending.failed(
                    SaveFailed(
                        f"the writer process {pid} {how} before step {pending.version.step} was "
                        "committed",
                        where=f"rank {self._rank}, {self._root}",
                        done="the next save starts a new writer",
                        advice="look for a kill for lack of memory in the kernel's log",
                    )
                )
            self._changed.notify_all()

    # --- the end ------------------------------------------------------------------------------

    def close(self, abort: bool = False) -> None:
        """End the writer process and free the slots.

        Without ``abort`` unfinished writes are waited for; with it the process is killed. One that
        storage blocks is left behind: it ends when storage lets it.
        """
        if self._closed:
            return
        self._closed = True
        process = self._process
        if process is not None:
            if abort:
                process.popen.kill()
            else:
                with self._changed:
                    self._changed.wait_for(lambda: not self._unfinished(), self._close_limit_s)
            _hang_up(process.channel)
            process.reader.join(KILLED_S if abort else EXIT_LIMIT_S + 2 * KILLED_S)
            process.channel.close()
            if not process.reader.is_alive():
                process.errors.close()
        self._pool.close()

    def _unfinished(self) -> bool:
        """Whether the writer has something to do that somebody waits for."""
        return bool(self._writing) or any(one.error is None for one in self._committing.values())


def _hang_up(channel: Channel[FROM_WRITER]) -> None:
    """End the connection for both sides, also where a forked child still has the descriptor."""
    with contextlib.suppress(OSError):
        channel.sock.shutdown(socket.SHUT_RDWR)
