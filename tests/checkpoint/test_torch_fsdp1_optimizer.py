"""Models and optimizers under FSDP1: saved in one world, restored in another, or without FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from keepstep.checkpoint import torch_fsdp1, torch_reader
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.torch_state import flatten
from keepstep.errors import CheckpointError
from tests.checkpoint.test_torch_fsdp1 import whole, wrapped
from tests.checkpoint.torch_worlds import fake_world, version, write

Objects = dict[str, Any]


def plain_objects(fill: float) -> Objects:
    """Model and AdamW as after some steps: every element is another number."""
    model = whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=fill)
    for number, parameter in enumerate(model.parameters()):
        values = torch.arange(parameter.numel(), dtype=torch.float32).view_as(parameter) + fill
        with torch.no_grad():
            parameter.copy_(values + 1000 * number)
        optimizer.state[parameter] = {
            "step": torch.tensor(fill),
            "exp_avg": values + 0.25,
            "exp_avg_sq": values + 0.5,
        }
    return {"model": model, "optimizer": optimizer}


def fsdp1_objects(rank_options: Objects, fill: float) -> Objects:
    """The same under FSDP1: this rank's part of it."""
    source = plain_objects(fill)
    named = dict(source["model"].named_parameters())
    model = wrapped(**rank_options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=fill)
    for shard in torch_fsdp1.shards(model):
        parameter = named[shard.name]
        stored = source["optimizer"].state[parameter]
        begin, count = shard.part.start, shard.part.local.numel()

        def cut(value: torch.Tensor, begin: int = begin, count: int = count) -> torch.Tensor:
            return value.detach().reshape(-1)[begin : begin + count]

        shard.part.local.copy_(cut(parameter))
        if not shard.owner.numel():
            continue  # torch gives a parameter without elements no state
        owner = shard.owner.detach()
        state = optimizer.state[shard.owner] or {
            "step": stored["step"].clone(),
            "exp_avg": torch.zeros_like(owner),
            "exp_avg_sq": torch.zeros_like(owner),
        }
        optimizer.state[shard.owner] = state
        for key in ("exp_avg", "exp_avg_sq"):
            shard.part_of(state[key]).local.copy_(cut(stored[key]))
    return {"model": model, "optimizer": optimizer}


def saved(root: Path, world: int, objects: Callable[[], Objects]) -> str:
    of = version(7, world=world)
    for rank in range(world):
        with fake_world(rank, world):
            folder = write(root, objects(), of, rank)
    commit(root, folder, of)
    return folder


def equal(found: Objects, expected: Objects) -> None:
    pairs = zip(found["model"].parameters(), expected["model"].parameters(), strict=True)
    for one, other in pairs:
        assert torch.equal(one, other)
        state, wanted = found["optimizer"].state[one], expected["optimizer"].state[other]
        assert state.keys() == wanted.keys()
        for key in wanted:
            assert torch.equal(state[key], wanted[key]), key
    assert found["optimizer"].param_groups[0]["lr"] == expected["optimizer"].param_groups[0]["lr"]


@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_fsdp1_saved_is_restored_without_fsdp(
    tmp_path: Path, world: int, original: bool
) -> None:
    options = {"use_orig_params": original}
    folder = saved(tmp_path, world, lambda: fsdp1_objects(options, 2.0))
    found = plain_objects(9.0)
    torch_reader.load(found, tmp_path, folder, rank=0, world=1)
    equal(found, plain_objects(2.0))


def parts(objects: Objects) -> list[tuple[str, torch.Tensor]]:
    """Everything that FSDP1 and the optimizer hold on this rank, by name."""
    found = [(shard.name, shard.part.local) for shard in torch_fsdp1.shards(objects["model"])]
    for number, state in enumerate(objects["optimizer"].state.values()):
        found += [(f"{number}.{key}", value) for key, value in state.items()]
    return found


@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 3), (3, 2), (3, 3)])
def test_another_world_restores_its_own_parts(
    tmp_path: Path, before: int, after: int, original: bool
) -> None:
    options = {"use_orig_params": original}
    folder = saved(tmp_path, before, lambda: fsdp1_objects(options, 2.0))
    for rank in range(after):
        with fake_world(rank, after):
            found = fsdp1_objects(options, 9.0)
            torch_reader.load(found, tmp_path, folder, rank=rank, world=after)
            expected = fsdp1_objects(options, 2.0)
            for (name, one), (_, other) in zip(parts(found), parts(expected), strict=True):
                assert torch.equal(one, other), (rank, name)


@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
def test_optimizer_state_is_made_where_there_is_none_yet(tmp_path: Path, original: bool) -> None:
    of = version(7)
    folder = write(tmp_path, plain_objects(2.0), of)
    commit(tmp_path, folder, of)
    for rank in range(2):
        with fake_world(rank, 2):
            options = {"use_orig_params": original}
            found = fsdp1_objects(options, 9.0)
            found["optimizer"].state.clear()
            torch_reader.load(found, tmp_path, folder, rank=rank, world=2)
            for shard in torch_fsdp1.shards(found["model"]):
                if not shard.part.local.numel():
                    continue
                state = found["optimizer"].state[shard.owner]
                assert state["step"] == 2.0
                begin = torch.arange(shard.part.local.numel()) + shard.part.start
                assert torch.equal(shard.part_of(state["exp_avg"]).local, begin + 2.25)


@pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_GRAD_OP],
    ids=lambda one: one.name,
)
def test_other_strategies_are_restored_without_fsdp(
    tmp_path: Path, strategy: ShardingStrategy
) -> None:
    options = {"use_orig_params": True, "sharding_strategy": strategy}
    folder = saved(tmp_path, 2, lambda: fsdp1_objects(options, 2.0))
    found = plain_objects(9.0)
    torch_reader.load(found, tmp_path, folder, rank=0, world=1)
    equal(found, plain_objects(2.0))


def names(entries: Iterable[Any]) -> list[str]:
    return [entry.of or entry.name for entry in entries]


def test_each_element_is_written_once() -> None:
    total: dict[str, int] = {}
    for rank in range(3):
        with fake_world(rank, 3):
            objects = fsdp1_objects({"use_orig_params": True}, 2.0)
            for entry in flatten(objects, rank=rank, world=3).entries:
                name = entry.of or entry.name
                if entry.kind == "shard":
                    total[name] = total.get(name, 0) + entry.tensor.numel()
    expected = dict(whole().named_parameters())
    for name, parameter in expected.items():
        assert total[f"model.{name}"] == parameter.numel()
        assert total[f"optimizer.state.model.{name}.exp_avg"] == parameter.numel()
        assert total[f"optimizer.state.model.{name}.step"] == 1


def test_parameters_and_state_are_copied_while_training_goes_on_and_buffers_are_not() -> None:
    with fake_world(0, 2):
        objects = fsdp1_objects({"use_orig_params": True}, 2.0)
        entries = flatten(objects, rank=0, world=2).entries
        stable = {name for name in names(entry for entry in entries if entry.stable)}
        assert "model.first.weight" in stable
        assert "optimizer.state.model.first.weight.exp_avg" in stable
        assert "model.kept" not in stable


def test_state_of_another_form_is_refused_by_name() -> None:
    with fake_world(0, 2):
        objects = fsdp1_objects({"use_orig_params": True}, 2.0)
        first = next(iter(objects["optimizer"].state))
        objects["optimizer"].state[first]["row"] = torch.zeros(2, 2)
        with pytest.raises(CheckpointError, match=r"optimizer\.state\.model\.\S+\.row"):
            flatten(objects, rank=0, world=2)


def test_extra_state_is_found() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.count = 0

        def get_extra_state(self) -> object:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    with fake_world(0, 1):
        module = wrapped()
        assert list(torch_fsdp1.extra_state(module)) == []
        counting = Counting()
        counting.count = 3
        assert list(torch_fsdp1.extra_state(counting)) == [("_extra_state", {"count": 3})]
