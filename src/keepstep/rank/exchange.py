"""Small messages between the ranks of a process group, as bytes.

Runs in the ranks. torch's own object collectives pickle, and need numpy; these do neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def broadcast(data: bytes | None) -> bytes:
    """Rank 0's ``data`` on every rank; the others give None. A collective of the default group."""
    device = _device()
    size = torch.tensor([len(data or b"")], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    content = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    if data:
        content.copy_(_tensor(data))
    if content.numel():
        dist.broadcast(content, src=0)
    return _bytes(content)


def gather(data: bytes) -> list[bytes]:
    """Every rank's ``data``, in rank order. A collective of the default group."""
    device, world = _device(), dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64, device=device))
    lengths = [int(size.item()) for size in sizes]
    largest = max(lengths)
    if not largest:
        return [b""] * world
    padded = _tensor(data.ljust(largest, b"\0")).to(device)
    contents = [torch.zeros_like(padded) for _ in range(world)]
    dist.all_gather(contents, padded)
    return [_bytes(content)[:length] for content, length in zip(contents, lengths, strict=True)]


def numbers(values: Sequence[int]) -> list[list[int]]:
    """Every rank's few ``values``, in rank order; all give equally many. One collective."""
    mine = torch.tensor(list(values), dtype=torch.int64, device=_device())
    found = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return [[int(value) for value in one.tolist()] for one in found]


def _device() -> torch.device:
    # A group of several backends has one for the host.
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().tolist())
