"""The example's training for launchers other than keepstep: no keepstep at all in these processes.

Model, data, seed and steps are those of ``examples/train_fsdp.py``; checkpoints are what plain
PyTorch offers for FSDP: ``torch.distributed.checkpoint``, in the foreground, into a new folder each
time, named by a small file that is replaced at the end. What happens is written to ``marks.jsonl``.
Runs in the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.train_plain import GPT, PRESETS, Windows, read_text, say, weights_digest

ACCUMULATE = 2
SEED = 0


@dataclass(frozen=True)
class Attempt:
    """One attempt of one process. ``name`` is the same on all ranks that train together.

    ``guard`` surrounds what must not be cut off, ``beat`` is called after each completed step.
    """

    name: str
    guard: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    beat: Callable[[], object] = lambda: None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True, help="marks and checkpoints")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every-steps", type=int, required=True)
    parser.add_argument("--group-timeout-s", type=float, required=True)
    parser.add_argument("--fault", default="", metavar="KIND@STEP:RANK")
    return parser.parse_args()


def train(args: argparse.Namespace, attempt: Attempt) -> None:
    """All steps, from the newest checkpoint on. The default process group must be there."""
    preset, device = PRESETS["tiny"], torch.device("cpu")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    model = GPT(preset)
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    sharded = fully_shard(model, mesh=mesh)

    def rate(step: int) -> float:
        warm_up: int = max(1, args.steps // 10)
        progress: float = min(1.0, max(0, step - warm_up) / max(1, args.steps - warm_up))
        return min(1.0, (step + 1) / warm_up) * (0.55 + 0.45 * math.cos(math.pi * progress))

    optimizer = torch.optim.AdamW(model.parameters(), lr=preset.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    text, _ = read_text(preset.text_bytes)
    data = Windows(text, preset, device, f"{SEED}/{rank}")
    torch.manual_seed(SEED * world + rank + 1)

    state = State(args.folder, model, optimizer, scheduler, data)
    resumed = state.load()
    mark(args.folder, attempt.name, "resumed", resumed)
    for step in range(resumed + 1, args.steps + 1):
        for micro in range(1, ACCUMULATE + 1):
            sharded.set_requires_gradient_sync(micro == ACCUMULATE)
            (model(*data.next()) / ACCUMULATE).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        strike(args, attempt.name, step)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mark(args.folder, attempt.name, "step", step)
        attempt.beat()
        if step % args.every_steps == 0 or step == args.steps:
            state.save(step, attempt.guard)
    say(f"weights digest: {weights_digest(optimizer, device)}")


def mark(folder: Path, attempt: str, kind: str, step: int) -> None:
    """Append one line; a line so short is written whole."""
    about = {
        "t": time.time(),
        "kind": kind,
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "pid": os.getpid(),
        "attempt": attempt,
        "step": step,
    }
    with (folder / "marks.jsonl").open("ab", buffering=0) as file:
        file.write(json.dumps(about).encode() + b"\n")


def strike(args: argparse.Namespace, attempt: str, step: int) -> None:
    """Let the fault happen if it is due here: once in a run, between backward and optimizer, as
    keepstep's own do."""
    kind, _, place = args.fault.partition("@")
    if place != f"{step}:{dist.get_rank()}":
        return
    try:
        (args.folder / "fault.fired").touch(exist_ok=False)
    except FileExistsError:
        return
    mark(args.folder, attempt, "fault", step)
    if kind == "exception":
        raise RuntimeError(f"injected exception in step {step}")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


class State:
    """What a checkpoint holds: model, optimizer, schedule, place in the data, dropout's numbers."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LambdaLR,
        data: Windows,
    ) -> None:
        self.folder = folder
        self.model, self.optimizer = model, optimizer
        self.scheduler, self.data = scheduler, data

    def save(self, step: int, guard: Callable[[], AbstractContextManager[object]]) -> None:
        """Write a checkpoint and then name it as the newest; every rank calls it."""
        name = f"step-{step}-{time.time_ns()}"
        names = [name]
        dist.broadcast_object_list(names, src=0)
        save(self._values(), checkpoint_id=self.folder / names[0])
        if dist.get_rank() == 0:
            with guard():
                new = self.folder / "newest.new"
                new.write_text(f"{step} {names[0]}", encoding="utf-8")
                new.replace(self.folder / "newest")
        dist.barrier()

    def load(self) -> int:
        """Take the newest checkpoint; its step, 0 without one."""
        try:
            step, name = (self.folder / "newest").read_text(encoding="utf-8").split()
        except FileNotFoundError:
            return 0
        values = self._values()
        load(values, checkpoint_id=self.folder / name)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=values["model"],
            optim_state_dict=values["optimizer"],
        )
        self.scheduler.load_state_dict(values["scheduler"])
        own = values[f"rank {dist.get_rank()}"]
        self.data.load_state_dict({"position": int(own["position"])})
        torch.set_rng_state(own["random"])
        return int(step)

    def _values(self) -> dict[str, Any]:
        # First, since making the optimizer's state draws no numbers but may one day.
        random = torch.get_rng_state()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        own = {"random": random, "position": torch.tensor(self.data.position)}
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            f"rank {dist.get_rank()}": own,
        }
