"""States that a checkpoint must keep bit by bit, and how to look at them. Runs in suites' ranks.

Nothing here goes through keepstep's own code: what a checkpoint did is compared without it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

_NANS = [0x7FC0, 0x7F81, 0xFFFF, 0x8000, 0x0001]


def every_kind(seed: int) -> dict[str, Any]:
    """All kinds of state; two with different seeds have the same form and differ in each value."""
    random = torch.Generator().manual_seed(seed)
    base = torch.randn(6, 8, generator=random)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01 * seed)
    model(torch.randn(4, 5, generator=random)).sum().backward()
    optimizer.step()
    nans = torch.tensor([bits ^ (seed & 1) for bits in _NANS], dtype=torch.int32)
    return {
        "scalar": torch.tensor(3.0 + seed),
        "count": torch.tensor(seed, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "half": torch.randn(5, 3, generator=random).bfloat16(),
        "nans": nans.to(torch.int16).view(torch.bfloat16),
        "turned": torch.randn(6, 8, generator=random).t(),
        "every_other": torch.arange(20, dtype=torch.int32).add(seed)[::2],
        "part": base[1:3, 2:5],
        "flags": torch.tensor([True, False, bool(seed % 2)]),
        "bytes": torch.tensor([0, 255, seed], dtype=torch.uint8),
        "waves": torch.randn(3, dtype=torch.complex64, generator=random),
        "learned": nn.Parameter(torch.randn(4, generator=random)),
        "model": model,
        "optimizer": optimizer,
        "values": {
            "epoch": seed,
            "name": f"run {seed} \N{SNOWMAN}",
            "pair": (seed, "two"),
            "raw": bytes([0, 255, seed]),
            "none": None,
            "rates": [0.1 * seed, float("inf"), -0.0],
            "nested": {"deep": {"buffer": torch.full((2, 2), float(seed))}},
        },
    }


def plain(value: float, size: int = 1 << 18, count: int = 16) -> dict[str, Any]:
    """``count`` tensors of ``size`` elements (4 bytes each) that all hold ``value``."""
    state: dict[str, Any] = {f"t{index}": torch.full((size,), value) for index in range(count)}
    return {**state, "data": {"value": value}}


def spoil(thing: object) -> None:
    """Overwrite everything in ``thing``, in place."""
    for _, tensor in tensors("", thing):
        with torch.no_grad():
            if tensor.dtype == torch.bool:
                tensor.logical_not_()
            else:
                tensor.fill_(77)
    if isinstance(thing, dict) and isinstance(thing.get("data"), dict):
        thing["data"]["value"] = -1.0


def bits(state: Mapping[str, object]) -> dict[str, object]:
    """Everything in ``state`` by name: tensors as (type, shape, bytes), the rest as text."""
    found: dict[str, object] = {}
    for name, tensor in tensors("", state):
        found[name] = (str(tensor.dtype), tuple(tensor.shape), _bytes(tensor))
    for name, value in _leaves("", state):
        found[name] = repr(value)
    return found


def differing(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Names at which two results of ``bits`` differ."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def tensors(name: str, thing: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in ``thing``: this rank's part where it is sharded."""
    for at, leaf in _walk(name, thing):
        if isinstance(leaf, torch.Tensor):
            yield at, leaf.to_local() if isinstance(leaf, DTensor) else leaf.detach()


def _leaves(name: str, thing: object) -> Iterator[tuple[str, object]]:
    for at, leaf in _walk(name, thing):
        if not isinstance(leaf, torch.Tensor):
            yield at, leaf


def _walk(name: str, thing: object) -> Iterator[tuple[str, object]]:
    if isinstance(thing, nn.Module):
        thing = thing.state_dict(keep_vars=True)
    elif isinstance(thing, torch.optim.Optimizer):
        thing = thing.state_dict()
    if isinstance(thing, Mapping):
        for key, value in thing.items():
            yield from _walk(f"{name}/{key}", value)
    elif isinstance(thing, list):
        for index, value in enumerate(thing):
            yield from _walk(f"{name}/{index}", value)
    else:
        yield name, thing


def _bytes(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().contiguous().cpu()
    if not whole.numel():
        return b""
    return ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size())
