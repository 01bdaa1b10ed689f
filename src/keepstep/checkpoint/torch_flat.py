"""Parts of tensors that are runs of elements in row-major order, as FSDP1 shards them.

Runs in the ranks. FSDP1 lays the parameters of a module one behind the other and cuts the result
into equal lengths, so a rank holds elements ``start`` to ``stop`` of a parameter, which is no block
of it. Here such a run becomes a few blocks, which any other world can put together again.
"""

from __future__ import annotations

import math
from typing import Any

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


class FlatPart(torch.Tensor):
    """This rank's part of a tensor of ``global_shape``: the elements from ``start`` on.

    It looks like the whole tensor (shape, type, device) and holds ``local``, which has one
    dimension and may be empty. Torch's planner takes it like any other sharded tensor; computing
    with it is refused.

    Attributes:
        local: The live elements.
        global_shape: The whole tensor's.
        start: Place of the first element of ``local`` in the whole, in row-major order.
        owner: What an optimizer has instead of it, if anything.
        replica: Of ``replicas`` ranks with the same part this one's number.
    """

    local: torch.Tensor
    global_shape: tuple[int, ...]
    start: int
    owner: torch.Tensor | None
    replica: int
    replicas: int

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor,
        global_shape: tuple[int, ...],
        start: int,
        *,
        owner: torch.Tensor | None = None,
        replica: int = 0,
        replicas: int = 1,
    ) -> FlatPart:
        made: FlatPart = torch.Tensor._make_wrapper_subclass(
            cls, global_shape, dtype=local.dtype, device=local.device
        )
        made.local, made.global_shape, made.start = local, tuple(global_shape), start
        made.owner, made.replica, made.replicas = owner, replica, replicas
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        raise NotImplementedError(f"{function} of a part of a tensor")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        stop = self.start + self.local.numel()
        return f"FlatPart(elements {self.start} to {stop} of {self.global_shape})"

    def of(self, local: torch.Tensor) -> FlatPart:
        """``local`` in the same place of a whole of the same shape."""
        return FlatPart(
            local,
            self.global_shape,
            self.start,
            owner=self.owner,
            replica=self.replica,
            replicas=self.replicas,
        )

    def blocks(self) -> list[tuple[Block, torch.Tensor]]:
        """The blocks with their live values, in order."""
        at = 0
        found = []
        stop = self.start + self.local.numel()
        for offsets, sizes in blocks(self.global_shape, self.start, stop):
            count = math.prod(sizes)
            found.append(((offsets, sizes), self.local.narrow(0, at, count).view(sizes)))
            at += count
        return found

    # --- what torch's planner asks for ----------------------------------------------------------

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for (offsets, sizes), _ in self.blocks()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for (offsets, _), values in self.blocks():
            if index.offset is not None and offsets == tuple(index.offset):
                return values.detach()
        raise ValueError(f"this rank has no block of {index.fqn} at {index.offset}")
