"""Where bytes of a stored chunk go in a tensor. Runs in the ranks.

A piece is the part of a stored chunk that one target tensor wants. If both are without gaps it is
a plain copy of bytes, which releases the interpreter; else the elements that a run of bytes holds
are cut into blocks, and torch copies each of them.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field

import torch

from keepstep.checkpoint.torch_flat import blocks


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a stored chunk: ``lengths`` elements at ``offsets`` of a chunk of ``shape``, whose
    first byte is ``begin`` in its file."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def span(self) -> tuple[int, int]:
        """The first byte in the file and the byte after the last one; between them may lie others.
        Equal if the region is empty."""
        if not math.prod(self.lengths):
            return self.begin, self.begin
        first = last = 0
        for size, offset, length in zip(self.shape, self.offsets, self.lengths, strict=True):
            first, last = first * size + offset, last * size + offset + length - 1
        item = self.dtype.itemsize
        return self.begin + first * item, self.begin + (last + 1) * item

    @property
    def gapless(self) -> bool:
        """Whether all bytes in its span belong to it."""
        start, stop = self.span()
        return stop - start == math.prod(self.lengths) * self.dtype.itemsize


def piece(region: Region, target: torch.Tensor, *, shared: bool) -> BytePiece | BlockPiece:
    """What fills ``target``, which has the region's shape, from the region's bytes.

    Args:
        region: Where the bytes lie.
        target: Where they go; any strides, any device.
        shared: Whether other processes of the node may want them too.
    """
    start, stop = region.span()
    if region.gapless and target.is_contiguous():
        return BytePiece(start, stop, shared, target)
    if region.begin % region.dtype.itemsize:
        # Elements lie across the ends of blocks: put together first what belongs together.
        whole = torch.empty(region.shape, dtype=region.dtype)
        begin, end = Region(
            region.begin, region.dtype, region.shape, (0,) * whole.dim(), region.shape
        ).span()
        return BytePiece(begin, end, True, whole, region, target)
    return BlockPiece(start, stop, shared or not region.gapless, region, target)


@dataclass(eq=False, slots=True)
class BytePiece:
    """Implements ``block_reader.Piece`` for a target without gaps.

    With ``region``, ``target`` is a whole stored chunk, and that region of it goes to ``final``.
    """

    start: int
    stop: int
    shared: bool
    target: torch.Tensor
    region: Region | None = None
    final: torch.Tensor | None = None
    _raw: torch.Tensor | None = field(default=None, init=False)
    _address: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.start == self.stop:
            return
        if self.target.device.type == "cpu":
            self._address = self.target.data_ptr()
        else:
            self._raw = self.target.detach().view(-1).view(torch.uint8)

    def take(self, at: int, data: memoryview) -> None:
        """Copy ``data`` to its place."""
        if self._raw is not None:
            part = self._raw.narrow(0, at - self.start, len(data))
            part.copy_(torch.frombuffer(data, dtype=torch.uint8), non_blocking=True)
            return
        source = (ctypes.c_char * len(data)).from_buffer(data)
        ctypes.memmove(self._address + at - self.start, source, len(data))

    def finish(self) -> None:
        """All bytes are there."""
        if self.region is not None and self.final is not None:
            part = self.target
            for dim, (offset, length) in enumerate(
                zip(self.region.offsets, self.region.lengths, strict=True)
            ):
                part = part.narrow(dim, offset, length)
            self.final.copy_(part)


@dataclass(eq=False, slots=True)
class BlockPiece:
    """Implements ``block_reader.Piece`` for any target and any region of aligned elements."""

    start: int
    stop: int
    shared: bool
    region: Region
    target: torch.Tensor

    def take(self, at: int, data: memoryview) -> None:
        """Copy those elements of ``data`` that belong to the region."""
        region = self.region
        values = torch.frombuffer(data, dtype=torch.uint8).view(region.dtype)
        first = (at - region.begin) // region.dtype.itemsize
        done = 0
        for offsets, sizes in blocks(region.shape, first, first + values.numel()):
            count = math.prod(sizes)
            part = values.narrow(0, done, count).view(sizes)
            self._copy(part, offsets, sizes)
            done += count

    def _copy(self, part: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        target = self.target
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            low = max(offset, self.region.offsets[dim])
            high = min(offset + size, self.region.offsets[dim] + self.region.lengths[dim])
            if low >= high:
                return
            part = part.narrow(dim, low - offset, high - low)
            target = target.narrow(dim, low - self.region.offsets[dim], high - low)
        target.copy_(part, non_blocking=True)

    def finish(self) -> None:
        """Nothing is left to do."""
