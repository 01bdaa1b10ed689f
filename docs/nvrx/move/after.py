"""The same with keepstep.

keepstep run --engine nvrx --nproc-per-node 2 after.py
"""

import torch
from torch.distributed.fsdp import fully_shard

import keepstep

STEPS, EVERY = 40, 10


def main(job: keepstep.Job) -> None:
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    job.track(model=model, optimizer=optimizer)
    for _ in job.steps(STEPS):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    keepstep.run(main, settings={"checkpoint.every_steps": EVERY})
