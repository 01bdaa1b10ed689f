"""A state of three tensors for tests of reading: values tell where they belong."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from tests.checkpoint.torch_worlds import sharded

ROWS, COLUMNS = 2048, 2048


def content(name: str) -> torch.Tensor:
    """The whole tensor ``name``: 16 MiB."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + ord(name)


def part(whole: torch.Tensor, world: int) -> DTensor:
    """This rank's rows."""
    return sharded(whole, world)


def check(state: Mapping[str, torch.Tensor], world: int) -> None:
    """Every tensor must hold what belongs there."""
    for name, tensor in state.items():
        if isinstance(tensor, DTensor):
            assert torch.equal(tensor.to_local(), part(content(name), world).to_local())
        else:
            assert torch.equal(tensor, content(name))
