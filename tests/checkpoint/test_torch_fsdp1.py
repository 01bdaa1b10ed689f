"""Local shards of FSDP1, read without a collective."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from keepstep.checkpoint import torch_fsdp1
from keepstep.errors import CheckpointError
from tests.checkpoint.torch_worlds import fake_world


class Tower(nn.Module):
    """Odd sizes, so that shards end in the middle of rows; one buffer is not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("kept", torch.arange(3.0))


def whole() -> Tower:
    torch.manual_seed(0)
    return Tower()


def wrapped(**options: Any) -> nn.Module:
    options = {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential}), **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls FSDP1 deprecated
        return FullyShardedDataParallel(whole(), device_id=torch.device("cpu"), **options)


@pytest.fixture(params=[True, False], ids=["original", "flat"])
def original(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield bool(request.param)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_parts_of_all_ranks_are_the_whole_parameters(world: int, original: bool) -> None:
    expected = dict(whole().named_parameters())
    found = {name: torch.full_like(value, torch.nan) for name, value in expected.items()}
    for rank in range(world):
        with fake_world(rank, world):
            for shard in torch_fsdp1.shards(wrapped(use_orig_params=original)):
                assert shard.part.shape == expected[shard.name].shape
                flat = found[shard.name].view(-1)
                count = shard.part.local.numel()
                flat[shard.part.start : shard.part.start + count] = shard.part.local
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("world", [1, 3])
def test_optimizer_state_is_cut_like_the_parameters(world: int, original: bool) -> None:
    for rank in range(world):
        with fake_world(rank, world):
            for shard in torch_fsdp1.shards(wrapped(use_orig_params=original)):
                like_owner = shard.owner.detach().clone()
                part = shard.part_of(like_owner)
                assert torch.equal(part.local, shard.part.local), shard.name
                assert part.start == shard.part.start


def test_without_sharding_every_rank_is_a_replica_of_the_whole(original: bool) -> None:
    expected = dict(whole().named_parameters())
    with fake_world(1, 2):
        module = wrapped(use_orig_params=original, sharding_strategy=ShardingStrategy.NO_SHARD)
        found = torch_fsdp1.shards(module)
        assert {(shard.part.replica, shard.part.replicas) for shard in found} == {(1, 2)}
        for shard in found:
            assert torch.equal(shard.part.local.view(shard.part.shape), expected[shard.name])


def test_the_rest_is_persistent_buffers_by_plain_names(original: bool) -> None:
    with fake_world(0, 2):
        names = {name for name, _ in torch_fsdp1.rest(wrapped(use_orig_params=original))}
    assert names == {
        "kept",
        "blocks.1.running_mean",
        "blocks.1.running_var",
        "blocks.1.num_batches_tracked",
    }


def test_another_torch_is_refused_by_what_it_lacks() -> None:
    with fake_world(0, 2):
        module: Any = wrapped()
        flat = module._handle.flat_param
        module._handle.flat_param = type("Flat", (), {"_fqns": flat._fqns})()
        with pytest.raises(CheckpointError, match="_shapes"):
            torch_fsdp1.shards(module)
