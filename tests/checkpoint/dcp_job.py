"""A rank of a job with FSDP2, started by ``test_torch_dcp`` and ``test_torch_export``.

``save`` trains and saves with torch's distributed checkpoints and with keepstep; ``load`` restores
what one process has made of these.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_together
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from keepstep import Checkpointer
from keepstep.checkpoint import torch_reader
from tests.checkpoint.dcp_folders import dcp_load

LIMIT_S = 120.0
STEP = 3
FOLDER = f"step-{STEP:08d}"


class Net(nn.Module):
    """Sizes that fit no number of ranks, a buffer, and two kinds of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 3)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += len(inputs)
        found: torch.Tensor = self.last(self.norm(self.first(inputs)).relu())
        return found


def _shard(module: nn.Module) -> None:
    fully_shard(module)


def build(
    seed: int, shard: Callable[[nn.Module], None] = _shard
) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    for module in (model.first, model.last, model):
        shard(module)
    small = [one for one in model.parameters() if one.dim() < 2]
    large = [one for one in model.parameters() if one.dim() > 1]
    groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def plain(module: nn.Module) -> None:
    """Do not shard."""


def train(model: Net, optimizer: torch.optim.Optimizer, steps: int = STEP) -> None:
    for _ in range(steps):
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything as plain tensors, by name; collective where it is sharded."""
    found = {name: full(one) for name, one in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = full(value)
    for number, group in enumerate(optimizer.param_groups):
        for key in ("lr", "weight_decay", "eps"):
            found[f"group {number}.{key}"] = torch.tensor(group[key])
    return found


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def nested_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def flat_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As torchtitan saves it: parameters have nothing in front of their names."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "train_state": {"step": torch.tensor(STEP, dtype=torch.int32)},
        "lr_scheduler": {"last_epoch": STEP, "_last_lr": [0.01, 0.01]},
    }


def save(where: Path) -> None:
    model, optimizer = build(seed=0)
    optimizer.param_groups[1]["lr"] = 0.02
    torch.manual_seed(7)  # the same data on both ranks: buffers are equal
    train(model, optimizer)
    expected = whole(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, where / "expected.pt")
    dcp_save(nested_state(model, optimizer), checkpoint_id=where / "nested")
    dcp_save(flat_state(model, optimizer), checkpoint_id=where / "flat")
    with Checkpointer(where / "own") as checkpointer:
        tracked = {"model": model, "optimizer": optimizer, "progress": {"seen": (1, 2)}}
        checkpointer.async_save(tracked, STEP)
        checkpointer.finalize()


def load(where: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = torch.load(where / "expected.pt", weights_only=True)
    sources = [(where / name / "checkpoints", FOLDER) for name in ("from-nested", "from-flat")]
    sources += [(where, str(where / name)) for name in ("nested", "flat")]
    for root, folder in sources:
        model, optimizer = build(seed=1)
        tracked = {"model": model, "optimizer": optimizer}
        torch_reader.load(tracked, root, folder, rank=rank, world=world)
        check_equal(whole(model, optimizer), expected)
    load_exported(where / "exported", expected, seed=2)


def load_exported(
    folder: Path,
    expected: dict[str, torch.Tensor],
    seed: int,
    shard: Callable[[nn.Module], None] = _shard,
) -> None:
    """As torch's own documentation says."""
    model, optimizer = build(seed, shard)
    state = nested_state(model, optimizer)
    if dist.is_initialized():
        load_together(state, checkpoint_id=folder)
    else:
        dcp_load(state, folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    check_equal(whole(model, optimizer), expected)


def run(what: str, where: Path, world: int = 2) -> None:
    """Run ``what`` on ``world`` ranks; raises AssertionError with the output of one that failed."""
    rendezvous = where / f"rendezvous-{what}"
    command = [sys.executable, "-m", "tests.checkpoint.dcp_job", what, str(where), str(rendezvous)]
    own = {"WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    own["PYTHONPATH"] = os.pathsep.join(["src", ".", *filter(None, sys.path)])
    outputs = [where / f"output-{what}-{rank}" for rank in range(world)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, output in enumerate(outputs):
            with output.open("wb") as file:
                environment = {**os.environ, **own, "RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        codes = [process.wait(LIMIT_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0] * world, "\n".join(output.read_text() for output in outputs)


def main() -> None:
    what, where, rendezvous = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    # Left without a barrier: the rank that fails must not wait for the other.
    {"save": save, "load": load}[what](where)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
