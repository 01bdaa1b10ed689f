"""Reads pieces of files and verifies them on the way: each needed block once, with several threads.

Runs in the ranks; needs no torch. A block is read into a buffer, compared with its digest while it
is in the processor's cache, and only then given to the pieces that lie in it. What no other process
needs goes past the page cache; what others need too goes through it, so that storage is asked once
for all processes of a node.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from keepstep.checkpoint import blocks
from keepstep.checkpoint.source import StoredFile
from keepstep.errors import CheckpointCorrupt

UNIT = 8 << 20
"""Bytes of one read: a few blocks, so that each thread's buffer stays small."""
THREADS = 4
"""More do not make a read faster that storage limits."""
_BUFFERS = 64 << 20
_PAGE = 4096


class Piece(Protocol):
    """Bytes ``start`` to ``stop`` of a file that somebody wants."""

    @property
    def start(self) -> int:
        """The first byte."""

    @property
    def stop(self) -> int:
        """The byte after the last one."""

    @property
    def shared(self) -> bool:
        """Whether other processes of the node may want some of these bytes too."""

    def take(self, at: int, data: memoryview) -> None:
        """Copy ``data``, verified bytes from ``at`` on in the file, inside ``start`` to ``stop``.

        Called from several threads, once for each part; ``data`` is another's afterwards.
        """


Buffers = Callable[[int], memoryview]
"""Makes a buffer of so many bytes, page-aligned."""


def plain_buffer(size: int) -> memoryview:
    """Fresh anonymous memory."""
    return memoryview(mmap.mmap(-1, size))


@dataclass(frozen=True, slots=True)
class _Unit:
    """Neighbouring blocks of one file that are read at once; ``pieces`` lie in them in part."""

    file: _File
    start: int
    stop: int
    direct: bool
    pieces: Sequence[Piece]


@dataclass(slots=True, eq=False)
class _File:
    """A file being read: descriptors by whether they are direct, and units still to do."""

    info: StoredFile
    digests: tuple[bytes, ...]
    left: int = 0
    fds: dict[bool, int] = field(default_factory=dict)


class BlockReader:
    """Reads what was added, once.

    Args:
        alone: Whether no other process reads these files.
        place: Number of this process among those that read; they begin at different places, so that
            each finds in the page cache what another has read.
        buffers: Makes the threads' buffers.
        emptied: Called in a thread before its buffer is used again, for copies that go on after
            ``Piece.take``.
    """

    def __init__(
        self,
        *,
        alone: bool,
        place: int = 0,
        buffers: Buffers = plain_buffer,
        emptied: Callable[[], None] = lambda: None,
    ) -> None:
        self._alone = alone
        self._place = place
        self._buffers = buffers
        self._emptied = emptied
        self._units: list[_Unit] = []
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._stopped = False
        self.bytes = 0
        """Bytes read."""

    def add(self, info: StoredFile, pieces: Sequence[Piece]) -> None:
        """Read ``pieces`` of a file with block digests, and its head.

        Raises:
            CheckpointCorrupt: a piece is not inside the file.
        """
        wanted = sorted((one for one in pieces if one.start < one.stop), key=lambda one: one.start)
        for piece in wanted:
            if piece.start < 0 or piece.stop > info.size:
                raise _corrupt(f"bytes {piece.start} to {piece.stop} are outside of it", info)
        file = _File(info, blocks.decode(info.blocks))
        units = list(_units(file, wanted, self._alone))
        file.left = len(units)
        self._units += units

    def run(self) -> None:
        """Read everything; returns when each piece has got all its bytes.

        Raises:
            CheckpointCorrupt: a block differs from its digest, or a file is too short. Pieces may
                have got a part of their bytes.
            OSError: a file cannot be read.
        """
        if not self._units:
            return
        largest = max(unit.stop - unit.start for unit in self._units)
        size = -(-largest // _PAGE) * _PAGE
        # Neighbours in rank begin far from each other: multiples of the golden ratio spread evenly.
        turn = 0 if self._alone else int(len(self._units) * (self._place * 0.6180339887 % 1.0))
        queue = itertools.chain(self._units[turn:], self._units[:turn])
        count = max(1, min(THREADS, len(self._units), _BUFFERS // size))
        threads = [
            threading.Thread(target=self._work, args=(queue, size), name="keepstep-read")
            for _ in range(count - 1)
        ]
        try:
            for thread in threads:
                thread.start()
            self._work(queue, size)
        except BaseException:
            self._stopped = True
            raise
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            for unit in self._units:
                self._close(unit.file)
            self._units = []
        if self._error is not None:
            raise self._error

    def _work(self, queue: Iterator[_Unit], size: int) -> None:
        try:
            buffer = self._buffers(size)
            while (unit := self._next(queue)) is not None:
                self._read(unit, buffer)
                self._emptied()
                self._done(unit)
        except Exception as error:  # noqa: BLE001 - raised by the thread that waits for all
            with self._lock:
                self._error = self._error or error

    def _next(self, queue: Iterator[_Unit]) -> _Unit | None:
        with self._lock:
            stop = self._stopped or self._error is not None
            return None if stop else next(queue, None)

    def _done(self, unit: _Unit) -> None:
        with self._lock:
            self.bytes += unit.stop - unit.start
            unit.file.left -= 1
            if not unit.file.left:
                self._close(unit.file)

    def _close(self, file: _File) -> None:
        while file.fds:
            os.close(file.fds.popitem()[1])

    # --- one unit ------------------------------------------------------------------------------

    def _read(self, unit: _Unit, buffer: memoryview) -> None:
        self._fill(unit, buffer)
        info, block_bytes = unit.file.info, unit.file.info.block_bytes
        for index in range(unit.start // block_bytes, blocks.count(unit.stop, block_bytes)):
            start, stop = blocks.span(index, info.size, block_bytes)
            data = buffer[start - unit.start : stop - unit.start]
            if blocks.digest(data) != unit.file.digests[index]:
                raise _corrupt(
                    f"bytes {start} to {stop} differ from what was committed: expected "
                    f"{unit.file.digests[index].hex()}, found {blocks.digest(data).hex()}",
                    info,
                )
            self._give(unit.pieces, start, data)

    def _give(self, pieces: Sequence[Piece], start: int, data: memoryview) -> None:
        stop = start + len(data)
        for piece in pieces:
            at, end = max(piece.start, start), min(piece.stop, stop)
            if at < end:
                piece.take(at, data[at - start : end - start])

    def _fill(self, unit: _Unit, buffer: memoryview) -> None:
        info, at, direct = unit.file.info, unit.start, unit.direct
        while at < unit.stop:
            # A direct read ends at a page, or at the end of the file.
            end = -(-unit.stop // _PAGE) * _PAGE if direct else unit.stop
            try:
                fd = self._open(unit.file, direct)
                got = os.preadv(fd, [buffer[at - unit.start : end - unit.start]], at)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:
                    direct = False  # the device wants larger units, or a short read left us in one
                    continue
                raise OSError(error.errno, error.strerror, str(info.path)) from error
            if not got:
                raise _corrupt(f"it ends at byte {at}, committed were {info.size}", info)
            at += got

    def _open(self, file: _File, direct: bool) -> int:
        with self._lock:
            if direct not in file.fds:
                flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
                fd = file.fds[direct] = os.open(file.info.path, flags)
                if not direct:
                    # What lies behind a block may be somebody else's, who reads it directly.
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            return file.fds[direct]


def _units(file: _File, pieces: Sequence[Piece], alone: bool) -> Iterator[_Unit]:
    """The needed blocks in file order, neighbours of the same kind together."""
    block_bytes, size = file.info.block_bytes, file.info.size
    wanted = _wanted(file.info, pieces)
    most = max(1, UNIT // block_bytes)
    indexes = sorted(wanted)
    waiting, near = list(reversed(pieces)), list[Piece]()
    at = 0
    while at < len(indexes):
        first = last = indexes[at]
        direct = alone or wanted[first]
        at += 1
        while (
            at < len(indexes)
            and indexes[at] == last + 1
            and last + 1 - first < most
            and (alone or wanted[last + 1]) == direct
        ):
            last += 1
            at += 1
        start, stop = first * block_bytes, blocks.span(last, size, block_bytes)[1]
        while waiting and waiting[-1].start < stop:
            near.append(waiting.pop())
        near = [piece for piece in near if piece.stop > start]
        yield _Unit(file, start, stop, direct, tuple(near))


def _wanted(info: StoredFile, pieces: Sequence[Piece]) -> dict[int, bool]:
    """The blocks that are needed, and whether nobody else can need a byte of them."""
    own: dict[int, int] = {}
    others: set[int] = set(range(blocks.count(min(info.head, info.size), info.block_bytes)))
    for piece in pieces:
        first, last = piece.start // info.block_bytes, (piece.stop - 1) // info.block_bytes
        if piece.shared:
            others.update(range(first, last + 1))
            continue
        for index in range(first, last + 1):
            start, stop = blocks.span(index, info.size, info.block_bytes)
            mine = min(piece.stop, stop) - max(piece.start, start)
            own[index] = own.get(index, 0) + mine
    result = {index: False for index in others}
    for index, mine in own.items():
        start, stop = blocks.span(index, info.size, info.block_bytes)
        result[index] = index not in others and mine == stop - start
    return result


def _corrupt(what: str, info: StoredFile) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        what,
        where=str(info.path),
        done="nothing of these bytes was restored",
        advice="use an older checkpoint; check the storage",
    )
