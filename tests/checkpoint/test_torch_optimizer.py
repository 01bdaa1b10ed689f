"""Optimizers: state by parameter name, made, kept and dropped as the checkpoint has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.torch_reader import load
from keepstep.checkpoint.torch_state import flatten
from keepstep.errors import CheckpointError, CheckpointMismatch
from tests.checkpoint.torch_worlds import fake_world, save, sharded, version, write


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> list[float]:
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)

        def closure(generator: torch.Generator = generator) -> torch.Tensor:
            optimizer.zero_grad()
            data = torch.randn(4, 3, generator=generator.manual_seed(step))  # noqa: B023
            loss: torch.Tensor = model(data).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        losses.append(optimizer.step(closure).detach().item())  # type: ignore[arg-type, attr-defined]
    return losses


def restore(root: Path, tracked: dict[str, object]) -> None:
    load(tracked, root, "step-00000001", rank=0, world=1)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "betas": (0.8, 0.99)}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.01), "capturable": False, "foreach": False}),
        (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 2}),
    ],
)
def test_training_goes_on_bit_by_bit_in_a_new_optimizer(
    tmp_path: Path, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = kind(model.parameters(), **options)
    train(model, optimizer, 3)
    optimizer.param_groups[0]["weight_decay"] = 0.125  # a schedule changed it
    save(tmp_path, {"model": model, "optimizer": optimizer})
    expected = train(model, optimizer, 3)

    torch.manual_seed(1)
    fresh = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    other = kind(fresh.parameters(), **options)
    restore(tmp_path, {"model": fresh, "optimizer": other})
    assert other.param_groups[0]["weight_decay"] == 0.125
    assert train(fresh, other, 3) == expected
    for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, two)


def test_state_is_named_after_its_parameter() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    names = {
        entry.name for entry in flatten({"model": model, "opt": optimizer}, rank=0, world=1).entries
    }
    assert {"opt.state.model.weight.exp_avg", "opt.state.model.bias.step"} <= names


def test_state_is_filled_in_place_and_hyper_parameters_keep_their_dicts(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    saved = optimizer.state[model.weight]["exp_avg"].clone()
    save(tmp_path, {"model": model, "opt": optimizer})
    train(model, optimizer, 2)
    group, moment = optimizer.param_groups[0], optimizer.state[model.weight]["exp_avg"]
    restore(tmp_path, {"model": model, "opt": optimizer})
    assert optimizer.param_groups[0] is group
    assert optimizer.state[model.weight]["exp_avg"] is moment
    assert torch.equal(moment, saved)
    assert type(group["betas"]) is tuple
    assert list(optimizer.state[model.weight]) == ["step", "exp_avg", "exp_avg_sq"]


def test_state_that_did_not_exist_yet_is_dropped(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    save(tmp_path, {"model": model, "opt": optimizer})
    expected = train(model, optimizer, 2)
    restore(tmp_path, {"model": model, "opt": optimizer})
    assert len(optimizer.state) == 0
    assert train(model, optimizer, 2) == expected


def test_a_refused_checkpoint_leaves_no_state_behind(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    save(tmp_path, {"model": model, "opt": optimizer})
    other = nn.Linear(4, 1)
    fresh = torch.optim.AdamW(other.parameters())
    with pytest.raises(CheckpointMismatch, match=r"model\.weight: float32 \[1, 3\]"):
        restore(tmp_path, {"model": other, "opt": fresh})
    assert len(fresh.state) == 0


def test_missing_kinds_of_state_are_named(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    save(tmp_path, {"model": model, "opt": optimizer})
    other = torch.optim.AdamW(model.parameters(), amsgrad=True)
    train(model, other)
    with pytest.raises(CheckpointMismatch, match=r"2 missing .*weight\.max_exp_avg_sq"):
        restore(tmp_path, {"model": model, "opt": other})


def test_other_parameter_groups_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    save(tmp_path, {"model": model, "opt": torch.optim.SGD(model.parameters())})
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    with pytest.raises(CheckpointMismatch, match=r"groups of \[1, 1\] .* has \[2\]"):
        restore(tmp_path, {"model": model, "opt": torch.optim.SGD(groups)})


def test_parameters_of_no_tracked_module_go_by_group_and_index(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], momentum=0.5)
    parameter.grad = torch.ones(2)
    optimizer.step()
    names = [entry.name for entry in flatten({"opt": optimizer}, rank=0, world=1).entries]
    assert names == ["opt.state.0.0.momentum_buffer"]


def test_the_state_of_a_sharded_parameter_is_made_as_a_shard_for_the_new_world(
    tmp_path: Path,
) -> None:
    whole = torch.arange(15.0).reshape(5, 3)
    of = version(world=2)
    for rank in range(2):
        with fake_world(rank, 2):
            parameter = nn.Parameter(sharded(whole, 2))
            optimizer = torch.optim.AdamW([parameter], lr=0.0)
            parameter.grad = sharded(whole + 1, 2)
            optimizer.step()
            folder = write(tmp_path, {"p": {"w": parameter}, "opt": optimizer}, of, rank)
    commit(tmp_path, folder, of)
    expected = (whole + 1) * (1 - 0.9)
    for rank in range(3):
        with fake_world(rank, 3):
            fresh = nn.Parameter(sharded(torch.zeros(5, 3), 3))
            other = torch.optim.AdamW([fresh])
            load({"p": {"w": fresh}, "opt": other}, tmp_path, folder, rank=rank, world=3)
            moment = other.state[fresh]["exp_avg"]
            assert torch.equal(moment.to_local(), sharded(expected, 3).to_local())
            assert torch.equal(fresh.to_local(), sharded(whole, 3).to_local())  # type: ignore[attr-defined]
            step = other.state[fresh]["step"]
            assert type(step) is torch.Tensor
            assert step.item() == 1


def test_an_optimizer_that_hides_state_on_other_ranks_is_refused() -> None:
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        """Stands for torch's, which needs a process group."""

    optimizer = ZeroRedundancyOptimizer([nn.Parameter(torch.ones(1))])
    with pytest.raises(CheckpointError, match="opt is a ZeroRedundancyOptimizer"):
        flatten({"opt": optimizer}, rank=0, world=1)
