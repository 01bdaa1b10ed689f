"""Parts of tensors that are runs of elements in row-major order, as FSDP1 shards them.

Runs in the ranks. FSDP1 lays the parameters of a module one behind the other and cuts the result
into equal lengths, so a rank holds elements ``start`` to ``stop`` of a parameter, which is no block
of it. Here such a run becomes a few blocks, which any other world can put together again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a block of a tensor, in elements."""


def blocks(shape: tuple[int, ...], start: int, stop: int) -> list[Block]:
    """The blocks that make up elements ``start`` to ``stop`` of a tensor, in that order.

    At most ``2 * len(shape) - 1`` of them, none of them empty.

    Args:
        shape: The whole tensor's.
        start: First element, counted in row-major order.
        stop: The one after the last.

    Raises:
        ValueError: the run is not inside the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"elements {start} to {stop} are not inside a tensor of shape {shape}")
    if start == stop:
        return []
    if len(shape) <= 1:
        return [((start,), (stop - start,))] if shape else [((), ())]
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside one row
        return _of_row(shape, last, start - last * inner, stop - last * inner)
    found = _of_row(shape, first - 1, start - (first - 1) * inner, inner) if start % inner else []
    if last > first:
        found.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if stop % inner:
        found += _of_row(shape, last, 0, stop - last * inner)
    return found


def _of_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Block]:
    return [((row, *at), (1, *size)) for at, size in blocks(shape[1:], start, stop)]


@dataclass(frozen=True, eq=False)
class FlatPart:
    """This rank's part of a tensor of ``global_shape``: the elements from ``start`` on.

    ``local`` is one-dimensional and may be empty. Torch's planner takes it like any other sharded
    tensor.
    """

    local: torch.Tensor
    global_shape: tuple[int, ...]
    start: int

    @property
    def shape(self) -> torch.Size:
        """The whole tensor's shape."""
        return torch.Size(self.global_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        """Where ``local`` lies."""
        return self.local.device

    def blocks(self) -> list[tuple[Block, torch.Tensor]]:
        """The blocks with their live values, in order."""
        at = 0
        found = []
        for offsets, sizes in blocks(
            self.global_shape, self.start, self.start + self.local.numel()
        ):
            count = math.prod(sizes)
            found.append(((offsets, sizes), self.local.narrow(0, at, count).view(sizes)))
            at += count
        return found

    def detach(self) -> FlatPart:
        """The same part, outside of autograd."""
        return FlatPart(self.local.detach(), self.global_shape, self.start)

    def like(self, dtype: torch.dtype) -> FlatPart:
        """Zeros for the same elements, of another type."""
        local = torch.zeros_like(self.local.detach(), dtype=dtype)
        return FlatPart(local, self.global_shape, self.start)

    # --- what torch's planner asks for ----------------------------------------------------------

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for (offsets, sizes), _ in self.blocks()
        ]

    def __create_write_items__(self, fqn: str, value: object) -> list[object]:
        raise NotImplementedError(f"{fqn} is not written by torch")

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for (offsets, _), values in self.blocks():
            if index.offset is not None and offsets == tuple(index.offset):
                return values.detach()
        raise ValueError(f"this rank has no block of {index.fqn} at {index.offset}")
