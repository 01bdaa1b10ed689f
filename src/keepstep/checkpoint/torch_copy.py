"""Tensors' bytes into a file image in memory, without holding the interpreter for long.

Runs in the ranks, also in threads beside training. Contiguous CPU tensors are copied by the C
library in chunks: that leaves the interpreter to the other threads and starts none of torch's own,
which would compete with those of the training step. Everything else goes through ``copy_``.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import xxhash

CHUNK_BYTES = 8 << 20
"""Bytes copied between two looks at ``called_off``; well below a millisecond."""


class Piece(NamedTuple):
    """A tensor whose bytes, in the order of its elements, go to ``start`` of an image."""

    name: str
    tensor: torch.Tensor
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.tensor.nbytes


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of ``tensor`` lie in host memory in the order of its elements."""
    return (
        tensor.is_cpu
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
    )


class ImageBytes:
    """The first ``size`` bytes of ``buffer``, which cannot be closed while this object lives.

    Raises:
        ValueError: ``buffer`` is smaller.
    """

    def __init__(self, buffer: mmap.mmap | bytearray | memoryview, size: int) -> None:
        self._whole = torch.frombuffer(buffer, dtype=torch.uint8, count=size)
        self.address = self._whole.data_ptr()

    def target(self, piece: Piece) -> torch.Tensor:
        """The place of ``piece`` as a tensor of its type and shape."""
        raw = self._whole[piece.start : piece.start + piece.nbytes]
        return raw.view(piece.tensor.dtype).view(piece.tensor.shape)

    def copy(
        self,
        pieces: Iterable[Piece],
        *,
        threads: int = 1,
        called_off: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Copy ``pieces`` into their places; returns when all is there, from a GPU too.

        Args:
            pieces: What to copy.
            threads: How many threads copy, this one included.
            called_off: Asked before each chunk, in any of the threads; True ends the copy.

        Returns:
            Whether everything was copied.
        """
        if threads == 1:
            return self._copy_alone(pieces, called_off)
        jobs = self._jobs(pieces)
        turn = threading.Lock()
        failures: list[BaseException] = []

        def work() -> None:
            while not failures and not called_off():
                with turn:
                    job = next(jobs, None)
                if job is None:
                    return
                job()

        def help_out() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                failures.append(error)

        helpers = [threading.Thread(target=help_out, daemon=True) for _ in range(threads - 1)]
        for helper in helpers:
            helper.start()
        try:
            work()
        finally:
            for helper in helpers:
                helper.join()
        if failures:
            raise failures[0]
        return next(jobs, None) is None

    def _copy_alone(self, pieces: Iterable[Piece], called_off: Callable[[], bool]) -> bool:
        move, address = ctypes.memmove, self.address
        for piece in pieces:
            if called_off():
                return False
            tensor, start = piece.tensor, piece.start
            if not is_plain(tensor):
                self._convert(piece)
                continue
            source, target, left = tensor.data_ptr(), address + start, tensor.nbytes
            while left > CHUNK_BYTES:
                move(target, source, CHUNK_BYTES)
                source, target, left = (
                    source + CHUNK_BYTES,
                    target + CHUNK_BYTES,
                    left - CHUNK_BYTES,
                )
                if called_off():
                    return False
            move(target, source, left)
        return True

    def _jobs(self, pieces: Iterable[Piece]) -> Iterator[Callable[[], object]]:
        for piece in pieces:
            nbytes = piece.nbytes
            if not is_plain(piece.tensor):
                yield functools.partial(self._convert, piece)
                continue
            source, target = piece.tensor.data_ptr(), self.address + piece.start
            for at in range(0, nbytes, CHUNK_BYTES):
                count = min(CHUNK_BYTES, nbytes - at)
                yield functools.partial(ctypes.memmove, target + at, source + at, count)

    def _convert(self, piece: Piece) -> None:
        with torch.no_grad():
            self.target(piece).copy_(piece.tensor)

    def digest(self, piece: Piece) -> int:
        """The xxh3-64 of what lies at the place of ``piece``."""
        return _digest(self.address + piece.start, piece.nbytes)


def digest(tensor: torch.Tensor) -> int:
    """The xxh3-64 of the bytes of ``tensor`` in the order of its elements."""
    with torch.no_grad():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return _digest(plain.data_ptr(), plain.nbytes)


def _digest(address: int, nbytes: int) -> int:
    if not nbytes:
        return xxhash.xxh3_64_intdigest(b"")
    return xxhash.xxh3_64_intdigest((ctypes.c_char * nbytes).from_address(address))
