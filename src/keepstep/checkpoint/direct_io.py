"""Writes memory to a new file at the disk's own speed. Runs in the writer process.

Writes are direct where storage allows it: large, aligned, several in flight, past the page cache.
Each thread hashes a block and then writes it, so that one hashes while another waits for the disk;
both release the interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from keepstep.checkpoint import blocks

ALIGNMENT = 4096
"""Direct writes start and end at multiples of this."""
THREADS = 3
"""Blocks of one file that are in flight; more did not make storage faster."""
_FLUSH_EVERY = 16
"""Blocks between two requests to write the page cache out, where writes are not direct."""
_NOT_OFFERED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENODEV}
"""Errors by which a file system says that it cannot reserve space."""


def open_new(path: Path) -> int:
    """Open a new file for direct writes, or for buffered ones where storage refuses those.

    Raises:
        OSError: it cannot be made, or is there already.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # some file systems refuse only after they made the file
        return os.open(path, flags, 0o644)


def reserve(fd: int, size: int) -> None:
    """Take ``size`` bytes of space for the file, where storage can do that.

    A full disk is found before anything is written, and direct writes into space that is there
    need not wait for each other.

    Raises:
        OSError: there is not so much space.
    """
    # Not os.posix_fallocate: where storage refuses, that writes a byte into each block by itself.
    if _fallocate()(fd, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number not in _NOT_OFFERED:
            raise OSError(number, os.strerror(number))


@cache
def _fallocate() -> Any:
    function = ctypes.CDLL(None, use_errno=True).fallocate
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


def write_image(
    image: memoryview, fd: int, meanwhile: Callable[[], object] | None = None
) -> list[bytes]:
    """Write all of ``image`` to the new file ``fd``; it is not durable yet.

    Args:
        image: What the file is to hold; its memory is aligned.
        fd: From ``open_new``.
        meanwhile: Something else to do while the disk writes.

    Returns:
        xxh3-128 of each block of ``blocks.BLOCK_BYTES`` bytes, 16 bytes each.

    Raises:
        OSError: storage refused a part of it.
    """
    if image:
        reserve(fd, -(-len(image) // ALIGNMENT) * ALIGNMENT)
    failed = threading.Event()

    def write_block(index: int) -> bytes:
        if failed.is_set():
            return b""  # the error of the other block is raised
        try:
            return hash_and_write(index)
        except BaseException:
            failed.set()
            raise

    def hash_and_write(index: int) -> bytes:
        start, stop = blocks.span(index, len(image), blocks.BLOCK_BYTES)
        with image[start:stop] as block:
            digest = blocks.digest(block)
            _write_at(fd, block, start)
        if index % _FLUSH_EVERY == _FLUSH_EVERY - 1 and not _is_direct(fd):
            os.fdatasync(fd)  # else all of it waits in memory, and the disk, for the end
        return digest

    number = blocks.count(len(image), blocks.BLOCK_BYTES)
    if number > 1:
        with ThreadPoolExecutor(min(THREADS, number), "block") as pool:
            results = pool.map(write_block, range(number))
            try:
                if meanwhile is not None:
                    meanwhile()
            except BaseException:
                failed.set()
                raise
            digests = list(results)
    else:
        digests = [write_block(index) for index in range(number)]
        if meanwhile is not None:
            meanwhile()
    if len(image) % ALIGNMENT:
        os.ftruncate(fd, len(image))
    return digests


@contextlib.contextmanager
def syncing(fd: int, size: int) -> Iterator[Callable[[], None]]:
    """Begin to make the file durable; what is given waits until it is, and raises OSError."""
    if size <= blocks.BLOCK_BYTES:  # not worth a thread
        yield lambda: os.fsync(fd)
        return
    with ThreadPoolExecutor(1, "sync") as pool:
        yield pool.submit(os.fsync, fd).result


def _write_at(fd: int, block: memoryview, at: int) -> None:
    """Write ``block``, whose memory is aligned, to ``at``; an incomplete end is filled up."""
    whole = len(block) // ALIGNMENT * ALIGNMENT
    with block[:whole] as part:
        _write_all(fd, part, at)
    if whole < len(block):
        with block[whole:] as rest, mmap.mmap(-1, ALIGNMENT) as padded:  # anonymous: aligned
            padded[: len(rest)] = bytes(rest)
            with memoryview(padded) as end:
                _write_all(fd, end, at + whole)


def _write_all(fd: int, part: memoryview, at: int) -> None:
    done = 0
    while done < len(part):
        direct = _is_direct(fd)  # another thread may change that at any time
        with part[done:] as rest:
            try:
                done += os.pwrite(fd, rest, at + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                # The device wants larger blocks, or a short write left us between two of them.
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def _is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
