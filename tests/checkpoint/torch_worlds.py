"""Ranks of a pretended world, one after the other in one process, and checkpoints made by them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.torch_image import ShardImage
from keepstep.checkpoint.torch_state import flatten
from keepstep.checkpoint.writer import write_shard
from keepstep.wire.types import Version


def version(step: int = 1, *, world: int = 1, run: str = "run", round_number: int = 1) -> Version:
    return Version(run=run, term=1, round=round_number, step=step, world=world)


@contextlib.contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """A process group in which collectives do nothing and this process is ``rank``."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """torch caches results of operators with their mesh, and with it the place of this rank."""
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def sharded(whole: torch.Tensor, world: int, dim: int = 0) -> DTensor:
    """This rank's part of ``whole``, cut along ``dim`` over a world of ``world``."""
    return _distribute(whole, init_device_mesh("cpu", (world,)), [Shard(dim)])


def hybrid(whole: torch.Tensor, replicas: int, shards: int) -> DTensor:
    """This rank's part of ``whole``: ``replicas`` copies of ``shards`` shards."""
    return _distribute(whole, init_device_mesh("cpu", (replicas, shards)), [Replicate(), Shard(0)])


def replicated(whole: torch.Tensor, world: int) -> DTensor:
    return _distribute(whole, init_device_mesh("cpu", (world,)), [Replicate()])


def _distribute(whole: torch.Tensor, mesh: Any, placements: list[Any]) -> DTensor:
    coordinate = mesh.get_coordinate()
    local = whole
    for index, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = list(torch.chunk(local, mesh.size(index), placement.dim))
            at = coordinate[index]
            empty = local.narrow(placement.dim, 0, 0)
            local = chunks[at] if at < len(chunks) else empty
    return DTensor.from_local(
        local.clone(),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.contiguous().stride(),
    )


def write(root: Path, tracked: Mapping[str, object], of: Version, rank: int = 0) -> str:
    """Write ``rank``'s shard of ``tracked``; returns the folder's name."""
    image = ShardImage(flatten(tracked, rank=rank, world=of.world), of, rank)
    buffer = bytearray(image.size)
    image.write_into(buffer)
    fd = os.memfd_create("test-image", os.MFD_CLOEXEC)
    try:
        os.write(fd, buffer)
        return write_shard(fd, image.size, root, of, rank)[1]
    finally:
        os.close(fd)


def save(root: Path, tracked: Mapping[str, object], of: Version | None = None) -> str:
    """Write and commit a checkpoint of a world of one; returns the folder's name."""
    of = of or version()
    folder = write(root, tracked, of)
    commit(root, folder, of)
    return folder
