"""A script for one process with ``keepstep.run``, or for two with ``keepstep.Checkpointer``.

Usage: standalone_plain.py run STEPS [LEAVE_AT] | checkpointer FOLDER STEPS SAVE_AT
"""

from __future__ import annotations

import hashlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import keepstep


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        value = getattr(parameter, "_local_tensor", parameter).detach()
        digest.update(repr(value.tolist()).encode())
    return digest.hexdigest()


def run(steps: int, leave_at: int) -> str:
    """Train with a Job; returns what it says at its end."""

    def main(job: keepstep.Job) -> str:
        torch.manual_seed(0)
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        job.track(model=model, optimizer=optimizer)
        first = job.start_step
        for step in job.steps(steps):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            job.log(loss=0.0)
            with job.section("eval"):
                pass
            if step == leave_at:
                os._exit(9)
        return f"first {first} digest {_digest(model)}"

    return keepstep.run(main, settings={"checkpoint.every_steps": 5})


def checkpointer(folder: str, steps: int, save_at: int) -> str:
    """Train with a Checkpointer alone under torchrun; returns what it says at its end."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = _model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with keepstep.Checkpointer(folder) as saver:
        state: dict[str, object] = {"model": model, "optimizer": optimizer}
        done = saver.restore(state)
        for step in range(done + 1, steps + 1):
            torch.manual_seed(1000 * step + dist.get_rank())
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == save_at:
                saver.async_save(state, step)
    digest = _digest(model)
    dist.destroy_process_group()
    return f"restored {done} digest {digest}"


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    if mode == "run":
        print(run(int(rest[0]), int(rest[1]) if len(rest) > 1 else 0), flush=True)
    else:
        print(checkpointer(rest[0], int(rest[1]), int(rest[2])), flush=True)
        # A thread of gloo may still hold a tensor when the interpreter goes down, and then ends the
        # process with SIGABRT, with or without keepstep.
        os._exit(0)
