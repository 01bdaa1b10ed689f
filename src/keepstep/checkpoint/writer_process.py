"""The node's writer: persists staged shards, and commits where there is no coordinator.

Run as ``python -m keepstep.checkpoint.writer_process --fd N``, where N is one end of a unix socket
pair. It takes ``WriteShard`` messages, each with the descriptor of a staged image, and answers
``ShardWritten`` or ``ShardFailed``; before that ``ShardRetry`` each time that storage refused the
shard and it will try again. For a version of which it wrote a shard with ``commit`` set, it also
waits for the receipts of all ranks, publishes, applies retention and sends one ``Committed``.

A save in flight must outlive its owner: signals meant for the job are ignored, and when the socket
closes the writer finishes what it has, waits a bounded time for receipts of others, and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.checkpoint import lease, retention
from keepstep.checkpoint.commit import commit, missing_receipts, not_published
from keepstep.checkpoint.images import Images
from keepstep.checkpoint.manifest import Receipt
from keepstep.checkpoint.writer import was_refused, write_shard
from keepstep.clock import SYSTEM, Clock
from keepstep.errors import ExitCode, InternalError, KeepstepError, SaveFailed
from keepstep.wire.channel import Channel, Closed
from keepstep.wire.messages import (
    FROM_WRITER,
    TO_WRITER,
    Committed,
    ShardFailed,
    ShardRetry,
    ShardWritten,
    WriteShard,
)
from keepstep.wire.types import Version

WRITERS = 4
"""Shards written at the same time. Two are enough for a disk; one that waits to try again must not
keep the others waiting."""
POLL_S = 0.02
FIRST_DELAY_S = 0.5
"""Before the first retry; each further one waits twice as long."""
COMMIT_LIMIT_S = 600.0
LINGER_S = 10.0
_REMEMBERED = 16


@dataclass(kw_only=True)
class _Save:
    """What is known about one version here."""

    writing: int = 0
    folder: str = ""
    errors: dict[int, str] = field(default_factory=dict)
    request: WriteShard | None = None  # a written shard with ``commit``; None: nothing to publish
    missing: int = -1
    progress_at: float = 0.0
    settled: bool = False


class Writer:
    """Writes the shards that arrive on ``channel`` until it closes.

    Args:
        channel: The owner's end; blocking.
        clock: Where time comes from.
        commit_limit_s: How long a commit may wait for another receipt before it counts as failed.
        linger_s: The same once the channel is closed.
    """

    def __init__(
        self,
        channel: Channel[TO_WRITER],
        clock: Clock = SYSTEM,
        *,
        commit_limit_s: float = COMMIT_LIMIT_S,
        linger_s: float = LINGER_S,
    ) -> None:
        self._channel = channel
        self._clock = clock
        self._limit_s = commit_limit_s
        self._linger_s = linger_s
        self._changed = threading.Condition()
        self._images = Images()
        self._saves: dict[Version, _Save] = {}
        self._closed = False
        self._closed_at = 0.0

    def serve(self) -> ExitCode:
        """Work until the channel closes and everything begun is settled."""
        code = ExitCode.OK
        committer = threading.Thread(target=self._commit_loop, name="commit")
        committer.start()
        try:
            with ThreadPoolExecutor(WRITERS, "write") as pool:
                try:
                    self._read(pool)
                except InternalError:
                    code = ExitCode.INTERNAL  # what was begun is still finished
        finally:
            with self._changed:
                self._closed, self._closed_at = True, self._clock.mono()
                self._changed.notify_all()
            committer.join()
        return code

    def _read(self, pool: ThreadPoolExecutor) -> None:
        while self._channel.read():
            for message in self._channel.messages():
                fd = self._channel.take_fd()
                with self._changed:
                    self._saves.setdefault(message.version, _Save()).writing += 1
                pool.submit(self._write, message, fd)

    def _send(self, message: FROM_WRITER) -> None:
        with contextlib.suppress(Closed):  # the owner is gone; the save goes on without it
            self._channel.send(message)

    def _write(self, message: WriteShard, fd: int) -> None:
        began = self._clock.mono()
        folder, error = "", ""
        try:
            receipt, folder = self._write_patiently(message, fd)
        except SaveFailed as failure:
            error = str(failure)
        except Exception as failure:  # noqa: BLE001 - a bug must still settle the save
            error = str(InternalError(f"the writer failed: {failure!r}"))
        finally:
            os.close(fd)
        if error:
            self._send(
                ShardFailed(
                    ticket=message.ticket, rank=message.rank, version=message.version, error=error
                )
            )
        else:
            self._send(
                ShardWritten(
                    ticket=message.ticket,
                    rank=message.rank,
                    version=message.version,
                    folder=folder,
                    bytes=receipt.size,
                    write_s=self._clock.mono() - began,
                )
            )
        self._note(message, folder, error)

    def _write_patiently(self, message: WriteShard, fd: int) -> tuple[Receipt, str]:
        """Write a shard; the slot still has its bytes when storage refuses them."""
        attempt = 1
        while True:
            try:
                return write_shard(
                    fd,
                    message.size,
                    Path(message.root),
                    message.version,
                    message.rank,
                    self._images,
                )
            except SaveFailed as failure:
                if attempt > message.retries or not was_refused(failure):
                    raise
                self._send(
                    ShardRetry(
                        ticket=message.ticket,
                        rank=message.rank,
                        version=message.version,
                        error=str(failure),
                        attempt=attempt,
                    )
                )
            self._clock.sleep(FIRST_DELAY_S * 2 ** (attempt - 1))
            attempt += 1

    def _note(self, message: WriteShard, folder: str, error: str) -> None:
        """The answer is sent: the version may be committed from now on."""
        with self._changed:
            save = self._saves[message.version]
            save.writing -= 1
            if error:
                save.errors[message.rank] = error
            else:
                save.errors.pop(message.rank, None)
                save.folder = folder
                if message.commit:
                    save.request, save.settled = message, False
                    save.progress_at = self._clock.mono()
            self._forget()
            self._changed.notify_all()

    def _commit_loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting())
                waiting = self._waiting()
                if self._closed and not waiting:
                    return
                ready = [(version, save) for version, save in waiting if not save.writing]
            for version, save in ready:
                result = self._try_commit(version, save)
                if result is not None:
                    with self._changed:
                        save.settled = True
                    self._send(result)  # before old ones go: removing much takes long
                    if save.request is not None and not result.error:
                        self._clean(save.request)
            self._clock.sleep(POLL_S)

    def _waiting(self) -> list[tuple[Version, _Save]]:
        return [
            (version, save)
            for version, save in self._saves.items()
            if save.request is not None and not save.settled
        ]

    def _forget(self) -> None:
        """Drop what is long over, so that a long run does not grow."""
        idle = [v for v, s in self._saves.items() if not s.writing and (s.settled or not s.request)]
        for version in idle[:-_REMEMBERED]:
            del self._saves[version]

    def _try_commit(self, version: Version, save: _Save) -> Committed | None:
        """Commit if all receipts are there; None while they are awaited."""
        request = save.request
        assert request is not None
        root = Path(request.root)
        if save.errors:
            rank, error = min(save.errors.items())
            return _refused(version, save.folder, f"the shard of rank {rank} failed: {error}")
        try:
            missing = missing_receipts(root, save.folder, version.world)
            if missing:
                return self._await(version, save, missing)
            lease.check(root, request.lease)
            size = commit(root, save.folder, version, self._clock).nbytes
        except KeepstepError as failure:
            return _refused(version, save.folder, str(failure))
        except OSError as failure:
            return _refused(version, save.folder, not_published(failure, root / save.folder))
        return Committed(version=version, folder=save.folder, bytes=size)

    def _await(self, version: Version, save: _Save, missing: list[int]) -> Committed | None:
        now = self._clock.mono()
        if len(missing) != save.missing:
            save.missing, save.progress_at = len(missing), now
        limit = self._linger_s if self._closed else self._limit_s
        if now - max(save.progress_at, self._closed_at) < limit:
            return None
        error = f"no shard arrived for {limit:g} s; missing are those of the ranks {missing[:8]}"
        return _refused(version, save.folder, error)

    def _clean(self, request: WriteShard) -> None:
        root = Path(request.root)
        keep = retention.Keep(request.keep_last, request.keep_every_steps)
        with self._changed:
            busy = {
                save.folder
                for save in self._saves.values()
                if save.folder and not save.settled and (save.writing or not save.errors)
            }
            writing = any(save.writing and not save.folder for save in self._saves.values())
        # Old checkpoints that cannot be removed now are tried again after the next commit.
        with contextlib.suppress(KeepstepError, OSError):
            retention.apply(root, keep, request.version, exclude=busy)
            if keep.last > 0 and not writing:
                retention.sweep(root, exclude=busy)


def _refused(version: Version, folder: str, error: str) -> Committed:
    return Committed(version=version, folder=folder, bytes=0, error=error)


def _step_back() -> None:
    """Do not interrupt training each time that a piece of a shard is on the disk.

    A lower priority on top of that made no difference that could be measured to the steps of ranks
    that use all cores, and a save three to fifteen times as long.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="keepstep.checkpoint.writer_process")
    parser.add_argument("--fd", type=int, required=True, help="connected unix socket")
    parser.add_argument("--commit-limit-s", type=float, default=COMMIT_LIMIT_S)
    parser.add_argument("--linger-s", type=float, default=LINGER_S)
    arguments = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _step_back()
    channel: Channel[TO_WRITER] = Channel(
        socket.socket(fileno=arguments.fd), TO_WRITER, blocking=True
    )
    writer = Writer(channel, commit_limit_s=arguments.commit_limit_s, linger_s=arguments.linger_s)
    try:
        return int(writer.serve())
    finally:
        channel.close()


if __name__ == "__main__":
    sys.exit(main())
