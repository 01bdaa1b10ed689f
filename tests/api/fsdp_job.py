"""A rank of a job with FSDP2 and DistributedDataParallel; started by ``test_checkpointer``.

World 2 trains, saves, and checks everything that two ranks can check; another world loads what
world 2 has left.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from keepstep import Checkpointer
from keepstep.checkpoint import catalog, layout
from keepstep.checkpoint.torch_rng import RngState
from keepstep.errors import CheckpointMismatch

SAVED = 3
DAMAGED = 5
EXPECTED = "expected.pt"


def _fully_shard(module: nn.Module) -> None:
    fully_shard(module)


def build(
    seed: int, shard: Callable[[nn.Module], None] = _fully_shard, width: int = 7
) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model whose dimensions fit no number of ranks; its last bias has a single element."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(5, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 1)
    )
    for layer in (model[0], model[3], model):
        shard(layer)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def tracked(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "random": RngState()}


def train(state: dict[str, object], steps: int) -> list[float]:
    model, optimizer, scheduler = state["model"], state["optimizer"], state["scheduler"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Full parameters and moments, by name."""
    result: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        result[name] = _full(parameter)
        for key, value in optimizer.state[parameter].items():
            result[f"{name}.{key}"] = _full(value)
    return result


def _full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.clone().contiguous()


def running_mean(model: nn.Sequential) -> torch.Tensor:
    """A buffer that differs between ranks."""
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    return norm.running_mean


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def save_and_restore(root: Path) -> None:
    rank = dist.get_rank()
    model, optimizer = build(seed=0)
    state = tracked(model, optimizer)
    torch.manual_seed(100 + rank)
    train(state, SAVED)
    buffer = running_mean(model).clone()
    expected = whole(model, optimizer)
    if rank == 0:
        torch.save(expected, root.parent / EXPECTED)

    checkpointer = Checkpointer(root, run_id="job")
    assert checkpointer.restore(state) == 0
    checkpointer.async_save(state, SAVED)
    losses = train(state, DAMAGED - SAVED)  # at once
    checkpointer.async_save(state, DAMAGED)
    at_damaged = whole(model, optimizer)
    checkpointer.finalize()
    assert checkpointer.latest() == DAMAGED

    fresh_model, fresh_optimizer = build(seed=1)
    fresh = tracked(fresh_model, fresh_optimizer)
    assert checkpointer.restore(fresh) == DAMAGED
    check_equal(whole(fresh_model, fresh_optimizer), at_damaged)

    other_model, other_optimizer = build(seed=1, width=6)
    try:
        checkpointer.restore(tracked(other_model, other_optimizer))
    except CheckpointMismatch as error:
        assert "model.0.weight: float32 [7, 5] in the checkpoint, float32 [6, 5]" in str(error)
    else:
        raise AssertionError("another model was loaded")

    dist.barrier()
    if rank == 0:  # only rank 1 reads this byte, and both must fall back
        path = root / f"step-{DAMAGED:08d}" / layout.shard_name(1)
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert checkpointer.restore(fresh) == SAVED
    text = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert [layout.shard_name(1) in one for one in text] == ([True] if rank == 0 else [])
    check_equal(whole(fresh_model, fresh_optimizer), expected)
    assert torch.equal(running_mean(fresh_model), buffer)
    assert train(fresh, DAMAGED - SAVED) == losses
    check_equal(whole(fresh_model, fresh_optimizer), at_damaged)
    checkpointer.close()


def replicated_parameters_are_written_once(root: Path) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(3, 3) for _ in range(6)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state: dict[str, object] = {"model": model, "optimizer": optimizer}
    with Checkpointer(root) as checkpointer:
        checkpointer.async_save(state, 1)
        checkpointer.finalize()
        found = catalog.load(root, "step-00000001")
        assert not found.rank_tensors
        assert set(found.tensors) == {
            name
            for at in range(6)
            for kind in ("weight", "bias")
            for name in (
                f"model.{at}.{kind}",
                f"optimizer.state.model.{at}.{kind}.momentum_buffer",
            )
        }
        chunks = [info.chunks for info in found.tensors.values()]
        assert all(len(one) == 1 for one in chunks)
        ranks = [one[0].rank for one in chunks]
        assert min(ranks.count(0), ranks.count(1)) >= 4, ranks
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert checkpointer.restore(state) == 1
        assert all(map(torch.equal, before, model.parameters()))


def load_elsewhere(root: Path) -> None:
    expected = torch.load(root.parent / EXPECTED, weights_only=True)
    model, optimizer = build(seed=5)
    with Checkpointer(root, run_id="job") as checkpointer, warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        step = checkpointer.restore(tracked(model, optimizer))
    assert step == SAVED, step
    check_equal(whole(model, optimizer), expected)


def main() -> None:
    root, rendezvous = Path(sys.argv[1]), Path(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    if world == 2:
        save_and_restore(root)
        replicated_parameters_are_written_once(root.parent / "replicated")
    else:
        load_elsewhere(root)
    assert not psutil.Process().children()
    assert not [one for one in threading.enumerate() if one.name.startswith("keepstep")]
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
