"""FSDP over and over in one process: each attempt but the last fails, on one rank in turn.

Started by ``keepstep run`` with the number of restarts as its argument. Each rank prints one line
``measured [...]``: what its process held when each attempt began.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import keepstep

RESTARTS = int(sys.argv[1])
WIDTH = 256
measured: list[dict[str, int]] = []
made: list[weakref.ref[object]] = []


def measure() -> dict[str, int]:
    """Threads, descriptors, resident bytes and Python objects of this process.

    "alive" counts what belonged to the attempt before and is not freed yet.
    """
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1])
        * os.sysconf("SC_PAGE_SIZE"),
        "objects": len(gc.get_objects()),
        "alive": sum(reference() is not None for reference in made),
    }


def main(job: keepstep.Job) -> None:
    measured.append(measure())
    attempt = len(measured)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    made[:] = [weakref.ref(model), weakref.ref(optimizer)]
    made.extend(weakref.ref(parameter) for parameter in model.parameters())
    job.track(model=model, optimizer=optimizer)
    for step in job.steps(2):
        model(torch.ones(4, WIDTH)).sum().backward()
        if step == 1:
            optimizer.step()
        elif attempt <= RESTARTS and attempt % job.world.size == job.world.rank:
            raise ValueError(f"attempt {attempt}")  # the others wait for it in the next forward
        else:
            model(torch.ones(4, WIDTH))
        optimizer.zero_grad()
    print("measured", json.dumps(measured), flush=True)


keepstep.run(main)
