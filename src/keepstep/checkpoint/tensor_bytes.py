"""The bytes of whole tensors, put together from the parts that a source has of them.

Used by the command line, for exports; needs no torch. Memory stays small: tensors whose parts lie
one behind the other are read in pieces, others are put together one at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from keepstep.checkpoint.shard_file import ITEM_BYTES
from keepstep.checkpoint.source import Source, Span, StoredChunk, StoredTensor
from keepstep.errors import CheckpointCorrupt

PIECE = 16 << 20
"""Bytes that are read at once."""


def nbytes(tensor: StoredTensor) -> int:
    """Bytes of the whole tensor."""
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def in_rows(tensor: StoredTensor) -> bool:
    """Whether the tensor's parts lie one behind the other in its row-major order."""
    return all(
        chunk.shape[1:] == tensor.shape[1:] for chunk in tensor.chunks if math.prod(chunk.shape)
    )


class TensorBytes:
    """Reads from the files of ``source``, which stay open until ``close``."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._files: dict[str, tuple[int, Path, Mapping[str, Span]]] = {}

    def span(self, tensor: StoredTensor) -> tuple[Path, int] | None:
        """The file that holds the whole tensor as one part, and its first byte there; else None."""
        if len(tensor.chunks) != 1 or tensor.chunks[0].shape != tensor.shape:
            return None
        chunk = tensor.chunks[0]
        _, path, spans = self._file(chunk.file)
        return path, spans[chunk.key][0]

    def parts(self, tensor: StoredTensor) -> Iterator[memoryview]:
        """The tensor's bytes in row-major order; each part is valid until the next is taken.

        Raises:
            CheckpointCorrupt: a file is shorter than it was.
            OSError: it cannot be read.
        """
        chunks = [chunk for chunk in tensor.chunks if math.prod(chunk.shape)]
        if in_rows(tensor):
            for chunk in sorted(chunks, key=lambda one: one.offsets):
                yield from self.pieces(chunk)
            return
        whole = bytearray(nbytes(tensor))
        with memoryview(whole) as view:
            for chunk in chunks:
                data = b"".join(self.pieces(chunk))
                _place(view, tensor, chunk, memoryview(data))
            for at in range(0, len(whole), PIECE):
                yield view[at : at + PIECE]

    def pieces(self, chunk: StoredChunk) -> Iterator[memoryview]:
        """The bytes of one chunk. As ``parts``."""
        fd, path, spans = self._file(chunk.file)
        at, stop = spans[chunk.key]
        with memoryview(bytearray(min(PIECE, stop - at))) as buffer:
            while at < stop:
                count = os.preadv(fd, [buffer[: stop - at]], at)
                if not count:
                    raise CheckpointCorrupt(
                        f"the file ends at {at}, {stop - at} bytes more were committed",
                        where=str(path),
                        done="nothing was exported",
                        advice="use an older checkpoint",
                    )
                yield buffer[:count]
                at += count

    def _file(self, name: str) -> tuple[int, Path, Mapping[str, Span]]:
        if name not in self._files:
            info, spans = self._source.file(name)
            fd = os.open(info.path, os.O_RDONLY | os.O_CLOEXEC)
            self._files[name] = (fd, info.path, spans)
        return self._files[name]

    def close(self) -> None:
        """Close the files."""
        for fd, _, _ in self._files.values():
            os.close(fd)
        self._files.clear()


@contextlib.contextmanager
def opened(source: Source) -> Iterator[TensorBytes]:
    """The tensors' bytes of ``source``."""
    reader = TensorBytes(source)
    try:
        yield reader
    finally:
        reader.close()


def _place(whole: memoryview, tensor: StoredTensor, chunk: StoredChunk, data: memoryview) -> None:
    """Copy the bytes of ``chunk`` to where they belong in those of the whole tensor."""
    shape, part = tensor.shape, chunk.shape
    inner = len(shape)  # from this dimension on the part has all of the tensor
    while inner > 1 and part[inner - 1] == shape[inner - 1]:
        inner -= 1
    run = math.prod(part[inner - 1 :]) * ITEM_BYTES[tensor.dtype]
    strides = [math.prod(shape[dim + 1 :]) * ITEM_BYTES[tensor.dtype] for dim in range(len(shape))]
    first = chunk.offsets[inner - 1] * strides[inner - 1]
    outer = zip(chunk.offsets[: inner - 1], part[: inner - 1], strict=True)
    at = 0
    for place in itertools.product(*(range(begin, begin + size) for begin, size in outer)):
        start = first + sum(index * stride for index, stride in zip(place, strides, strict=False))
        whole[start : start + run] = data[at : at + run]
        at += run
