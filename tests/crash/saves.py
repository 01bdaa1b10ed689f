"""The save that crash tests strike, and what must hold whatever became of it.

One checkpoint is committed (``OLD``); a writer process is given both shards of ``NEW`` and commits
it. Torch has no part in it: shards are file images made here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keepstep.checkpoint import catalog, layout, writer_process
from keepstep.checkpoint.verify import verify
from keepstep.clock import SYSTEM
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
from tests.checkpoint.shards import image, make_version, staged
from tests.crash.forks import Forks

LIMIT_S = 20.0
WORLD = 2
PAD = 20_000
"""Bytes more in each shard: it takes a write of whole blocks and one of the rest."""
OLD = make_version(5, world=WORLD)
NEW = make_version(10, world=WORLD)
_NONE = make_version(0, world=1)
PRELOAD = "tests.crash.saves"


def shard(version: Version, rank: int) -> bytes:
    """What ``rank``'s file of ``version`` holds; no two versions or ranks have equal bytes."""
    return image(version, rank, fill=version.step * 16 + version.term * 4 + rank, pad=PAD)


def next_after(version: Version) -> Version:
    """What a job saves next that resumed from ``version`` after a crash."""
    return make_version(version.step + 5, term=2, round=1, world=WORLD)


def serve(fd: int) -> int:
    """A writer process; runs in a fork. One thread writes, so that all runs are alike."""
    writer_process.WRITERS = 1
    return writer_process.main(["--fd", str(fd), "--linger-s", "0"])


class Writer:
    """A forked writer process and the owner's end of its channel."""

    def __init__(self, forks: Forks, root: Path) -> None:
        self._forks = forks
        self._root = root
        ours, theirs = pair()
        with theirs:
            # The number that the descriptor has in the fork is passed on as the last argument.
            self.pid = forks.start("tests.crash.saves:serve", fds=(theirs.fileno(),))
        self._channel: Channel[FROM_WRITER] = Channel(ours, FROM_WRITER, blocking=True)
        ours.settimeout(LIMIT_S)
        self._wake()

    def _wake(self) -> None:
        """Have it refuse a shard without touching storage: what it does once is done then."""
        with staged(b"") as fd:
            message = WriteShard(ticket=0, rank=0, size=1, version=_NONE, root=str(self._root))
            self._channel.send(message, (fd,))
        answer = self._channel.receive()
        assert isinstance(answer, ShardFailed) and "header" in answer.error, answer

    def thread(self, number: int) -> int:
        """Id of one of its threads, in the order in which they were started."""
        return sorted(map(int, os.listdir(f"/proc/{self.pid}/task")))[number]

    def send(self, version: Version, rank: int, *, keep: int, retries: int = 0) -> None:
        """Give it a shard; the last rank's is the one that makes it commit."""
        data = shard(version, rank)
        message = WriteShard(
            ticket=rank,
            rank=rank,
            size=len(data),
            version=version,
            root=str(self._root),
            commit=rank == version.world - 1,
            keep_last=keep,
            retries=retries,
        )
        with staged(data) as fd:
            self._channel.send(message, (fd,))

    def save(self, version: Version, *, keep: int = 2, retries: int = 0) -> str:
        """Have it save ``version``; returns the error, or an empty text once it is committed.

        Raises:
            Closed: it was killed.
        """
        for rank in range(version.world):
            self.send(version, rank, keep=keep, retries=retries)
            answer = self._answer()
            if isinstance(answer, ShardFailed):
                return answer.error
            assert isinstance(answer, ShardWritten), answer
        committed = self._answer()
        assert isinstance(committed, Committed), committed
        return committed.error

    def _answer(self) -> FROM_WRITER:
        """What it says next, but for attempts that it makes once more."""
        began = SYSTEM.mono()
        try:
            while isinstance(answer := self._channel.receive(), ShardRetry):
                pass
            return answer
        except Closed:
            assert SYSTEM.mono() - began < LIMIT_S, "the writer lives and does not answer"
            raise

    def close(self) -> int:
        """Hang up and wait for its end; returns its exit status."""
        with_others = self._channel.sock
        with_others.shutdown(socket.SHUT_RDWR)
        self._channel.close()
        return self._forks.wait(self.pid)


@contextmanager
def writer(forks: Forks, root: Path) -> Iterator[Writer]:
    """A writer process that must end well."""
    one = Writer(forks, root)
    try:
        yield one
    finally:
        assert one.close() == 0


def newest(root: Path) -> Version:
    """The version that a restore takes; everything that is offered is whole and bit-equal."""
    infos = catalog.committed(root)
    for number, info in enumerate(infos):
        try:
            assert verify(root, info.folder) == []
            for rank in range(WORLD):
                data = (root / info.folder / layout.shard_name(rank)).read_bytes()
                assert data == shard(info.version, rank), (info.folder, rank)
        except (AssertionError, FileNotFoundError):
            # An older one may be removed at this moment: its manifest goes first.
            if number == 0 or layout.is_published(root / info.folder / layout.MANIFEST):
                raise
    return infos[0].version


def leftovers(root: Path) -> list[str]:
    """Files and folders that belong to no committed checkpoint."""
    good = {info.folder for info in catalog.committed(root)}
    files = {layout.MANIFEST, layout.VERSION_FILE}
    for rank in range(WORLD):
        files |= {layout.shard_name(rank), layout.receipt_name(rank)}
    found = [name for name in os.listdir(root) if name not in good]
    return found + [
        f"{folder}/{name}"
        for folder in good
        for name in os.listdir(root / folder)
        if name not in files
    ]


def save_again(forks: Forks, root: Path, *versions: Version) -> None:
    """A new writer saves ``versions``; afterwards the last is the newest and the folder is clean.

    The last is the next save after one that was struck: what is left of that must be gone then.
    """
    with writer(forks, root) as one:
        for version in versions:
            assert one.save(version) == ""
            assert newest(root) == version
    assert not leftovers(root), leftovers(root)
