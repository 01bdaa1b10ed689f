"""What is copied beside training are the values at the call, or it is not saved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from keepstep.errors import SaveFailed
from keepstep.rank.copied import Copied, CopiedWrite, CopyWatch
from keepstep.rank.shard_writer import NativeShardWriter
from keepstep.wire.types import Version
from tests.checkpoint.torch_worlds import fake_world, version
from tests.rank.copies import (
    LIMIT_S,
    WIDTH,
    Gate,
    KeepingStaging,
    State,
    adam,
    begin,
    fill_gradients,
    plain,
    same,
    trained,
    values_of,
    writer_of,
)


def tied() -> State:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[1].weight = model[0].weight
    return trained(model, adam())


class Odd(nn.Module):
    """Parameters that do not lie in memory in the order of their elements, and one of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH + 3).t())
        self.last = nn.Parameter(torch.randn(4, 8, 40, 40).to(memory_format=torch.channels_last))
        self.part = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH)[:, ::3])
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.short = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16))
        self.wave = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64).conj())


def several() -> State:
    first, second = plain(), plain()
    return {
        **{"a": first, "optimizer_a": torch.optim.AdamW(first.parameters(), lr=0.1)},
        **{"b": second, "optimizer_b": torch.optim.SGD(second.parameters(), 0.1, momentum=0.9)},
    }


CASES: dict[str, Callable[[], State]] = {
    "foreach": lambda: trained(plain(), adam(foreach=True)),
    "one by one": lambda: trained(plain(), adam(foreach=False)),
    "fused": lambda: trained(plain(), adam(fused=True)),
    "tied": tied,
    "odd layouts": lambda: trained(
        Odd(), lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    ),
    "several optimizers": several,
    "momentum": lambda: trained(
        plain(), lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    ),
    "no state yet": lambda: {
        "model": (model := plain()),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1),
    },
    "L-BFGS": lambda: trained(
        nn.Linear(WIDTH, WIDTH),
        lambda parameters: _Closed(parameters),
    ),
}


class _Closed(torch.optim.LBFGS):
    """L-BFGS with a closure of its own: its state has lists of tensors."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        step: Any = super().step
        return step(lambda: sum(float((p.detach() ** 2).sum()) for p in parameters))


def optimizers(state: State) -> list[torch.optim.Optimizer]:
    return [one for one in state.values() if isinstance(one, torch.optim.Optimizer)]


@pytest.mark.parametrize("case", CASES)
def test_the_values_at_the_call_are_saved_although_the_next_step_comes_at_once(
    case: str, gate: Gate, staging: KeepingStaging, made: list[NativeShardWriter]
) -> None:
    state = CASES[case]()
    fill_gradients(*(one for one in state.values() if isinstance(one, nn.Module)))
    expected = copy.deepcopy(values_of(state))
    writer = writer_of(staging, made, check_copy=True)
    pending = begin(writer, state)
    assert isinstance(pending, CopiedWrite)
    assert not pending.staged()
    assert not staging.submitted
    gate.open_on("wait_staged")
    for optimizer in optimizers(state):
        optimizer.step()
    pending.wait(LIMIT_S)
    assert not gate.passed_shut
    assert same(staging.saved(), expected)
    assert not same(values_of(state), expected)


def test_what_others_change_is_copied_before_the_call_returns(
    gate: Gate, staging: KeepingStaging, made: list[NativeShardWriter]
) -> None:
    model = plain()
    model.register_buffer("wide", torch.randn(WIDTH, WIDTH))
    frozen = nn.Linear(WIDTH, WIDTH)
    average = copy.deepcopy(model)
    state = {
        **trained(model, adam()),
        **{"frozen": frozen, "average": average, "noise": torch.randn(WIDTH, WIDTH)},
        "data": {"seen": torch.randn(WIDTH, WIDTH)},
    }
    expected = copy.deepcopy(values_of(state))
    pending = begin(writer_of(staging, made), state)
    with torch.no_grad():
        for tensor in (
            *(*model.buffers(), *frozen.parameters(), *average.parameters(), state["noise"]),
            state["data"]["seen"],
        ):
            tensor.add_(1)
    gate.opened.set()
    pending.wait(LIMIT_S)
    assert same(staging.saved(), expected)


def test_what_shares_memory_with_something_that_others_change_is_copied_at_once(
    gate: Gate, staging: KeepingStaging, made: list[NativeShardWriter]
) -> None:
    state = trained(plain(), adam())
    state["view"] = state["model"][0].weight.detach().view(-1)[5:]
    expected = copy.deepcopy(values_of(state))
    pending = begin(writer_of(staging, made), state)
    state["view"].add_(1)
    gate.opened.set()
    pending.wait(LIMIT_S)
    assert same(staging.saved(), expected)


class Wrapped(torch.optim.Optimizer):
    """An optimizer whose steps torch's hooks do not see."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.state = {}  # type: ignore[assignment]
        self.param_groups = [{"params": self.parameters}]

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.add_(1)


class Foreign:
    """Not torch's at all."""

    def __init__(self, parameters: Any) -> None:
        self.wrapped = Wrapped(parameters)

    def step(self) -> None:
        self.wrapped.step()

    def state_dict(self) -> dict[str, object]:
        return {"rate": 1.0}

    def load_state_dict(self, state: object) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    "make", [Wrapped, Foreign, adam(capturable=True)], ids=["unhooked", "foreign", "graph"]
)
def test_parameters_whose_steps_no_hook_sees_are_copied_at_once(
    make: Callable[[Any], Any],
    staging: KeepingStaging,
    made: list[NativeShardWriter],
) -> None:
    model = plain()
    told: list[Copied] = []
    state = {"model": model, "optimizer": make(model.parameters())}
    expected = copy.deepcopy(values_of(state))
    writer = writer_of(staging, made, watch=CopyWatch(copied=told.append))
    begin(writer, state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert same(staging.saved(), expected)
    assert [(one.mode, one.reason) for one in told] == [
        ("blocking", "none of it is changed by optimizers alone")
    ]


def test_a_change_by_somebody_else_fails_the_save_and_later_ones_copy_at_once(
    gate: Gate, staging: KeepingStaging, made: list[NativeShardWriter]
) -> None:
    state = trained(plain(), adam())
    failed: list[tuple[Version, SaveFailed]] = []
    told: list[Copied] = []
    watch = CopyWatch(copied=told.append, failed=lambda *one: failed.append(one))
    writer = writer_of(staging, made, watch=watch)
    pending = begin(writer, state, version(4))
    with torch.no_grad():
        state["model"][2].weight.mul_(0.5)
    gate.opened.set()
    with pytest.raises(SaveFailed, match=r"model\.2\.weight was changed while step 4") as caught:
        pending.wait(LIMIT_S)
    assert (pending.done(), pending.staged(), pending.error) == (True, True, caught.value)
    assert failed == [(version(4), caught.value)]
    assert not staging.submitted
    assert staging.free
    expected = copy.deepcopy(values_of(state))
    begin(writer, state, version(5)).wait(0.0)
    assert same(staging.saved(), expected)
    assert [(one.mode, one.reason) for one in told] == [
        ("blocking", "model.2.weight was changed while it was being copied")
    ]


@pytest.mark.parametrize("check", [True, False])
def test_a_change_that_torch_does_not_count_is_found_by_hashing(
    check: bool, gate: Gate, staging: KeepingStaging, made: list[NativeShardWriter]
) -> None:
    state = trained(plain(), adam())
    pending = begin(writer_of(staging, made, check_copy=check), state)
    state["model"][0].weight.data.add_(1)
    gate.opened.set()
    if check:
        with pytest.raises(SaveFailed, match=r"model\.0\.weight was changed"):
            pending.wait(LIMIT_S)
        assert not staging.submitted
    else:
        pending.wait(LIMIT_S)  # nobody could know


def test_a_parameter_that_is_replaced_is_saved_as_it_was(
    gate: Gate, staging: KeepingStaging, made: list[NativeShardWriter]
) -> None:
    state = trained(plain(), adam())
    writer = writer_of(staging, made)
    expected = copy.deepcopy(values_of(state))
    pending = begin(writer, state)
    weight = state["model"][0].weight
    weight.data = torch.full_like(weight.data, 7.0)
    gate.opened.set()
    pending.wait(LIMIT_S)
    assert same(staging.saved(), expected)
    begin(writer, state, version(2)).wait(LIMIT_S)
    assert staging.saved()["model.0.weight"].eq(7.0).all()


def test_the_first_saves_try_both_ways(
    staging: KeepingStaging, made: list[NativeShardWriter]
) -> None:
    told: list[Copied] = []
    writer = writer_of(staging, made, copy="auto", watch=CopyWatch(copied=told.append))
    state = trained(plain(), adam())
    for step in range(1, 19):
        state["optimizer"].step()
        if step % 2 == 0 and step > 6:
            begin(writer, state, version(step)).wait(LIMIT_S)
    modes = [one.mode for one in told]
    assert modes == ["overlap"] * 3 + ["blocking", "overlap", "blocking"]
    assert [one.reason for one in told[1:5]] == [f"measuring, {turn} of 3" for turn in (1, 1, 1, 2)]
    assert all(one.bytes > 0 for one in told)


def sharded_worlds(world: int) -> Iterator[tuple[int, State]]:
    """Each rank's part of a model under FSDP2 with CPU offload and uneven shards."""
    for rank in range(world):
        with fake_world(rank, world):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH + 1), nn.Linear(WIDTH + 1, WIDTH - 1))
            for layer in model:
                fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
            state = trained(fully_shard(model), adam())
            fill_gradients(model)
            yield rank, state


def test_uneven_shards_under_fsdp2_with_cpu_offload_are_saved_as_they_were(
    gate: Gate,
) -> None:
    for rank, state in sharded_worlds(2):
        gate.opened.clear()
        gate.open_on("wait_staged")
        staging = KeepingStaging()
        writer = NativeShardWriter(staging, rank=rank, world=2, copy="overlap", check_copy=True)
        expected = copy.deepcopy(values_of(state, rank=rank, world=2))
        pending = begin(writer, state, version(world=2))
        assert isinstance(pending, CopiedWrite)
        state["optimizer"].step()
        pending.wait(LIMIT_S)
        assert same(staging.saved(), expected)
        assert not same(values_of(state, rank=rank, world=2), expected)
        writer.close()


def test_a_change_of_a_shard_by_somebody_else_is_found_through_either_tensor(gate: Gate) -> None:
    for through_local in (False, True):
        with fake_world(0, 2):
            gate.opened.clear()
            staging = KeepingStaging()
            writer = NativeShardWriter(staging, rank=0, world=2, copy="overlap")
            model: Any = fully_shard(nn.Linear(WIDTH, 2 * WIDTH))
            state = trained(model, adam())
            pending = begin(writer, state, version(world=2))
            weight = model.weight
            with torch.no_grad():
                (weight.to_local() if through_local else weight).mul_(2)
            gate.opened.set()
            with pytest.raises(SaveFailed, match=r"model\.weight was changed"):
                pending.wait(LIMIT_S)
            writer.close()


@pytest.mark.parametrize("offload", [False, True])
def test_training_under_fsdp2_changes_nothing_but_in_the_optimizer(
    offload: bool, staging: KeepingStaging
) -> None:
    images = []
    with fake_world(0, 2):
        model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        policy: Any = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
        fully_shard(model[0], **policy)
        fully_shard(model, **policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer}
        writer = NativeShardWriter(staging, rank=0, world=2, copy="overlap", check_copy=True)
        for step in range(1, 5):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            images.append(copy.deepcopy(values_of(state, world=2)))
            assert isinstance(begin(writer, state, version(step, world=2)), CopiedWrite)
        writer.close()
    assert [same(staging.saved(at), images[at]) for at in range(4)] == [True] * 4
