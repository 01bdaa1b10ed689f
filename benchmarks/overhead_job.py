"""The example's training loop with a timer, under torchrun as well as under ``keepstep run``.

Prints, on rank 0, one JSON line: the seconds of each step after the warm-up, and the last loss.
With ``--plain`` nothing of keepstep is imported.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

if TYPE_CHECKING:
    import keepstep

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.train_plain import GPT, PRESETS, Windows, read_text

Report = Callable[[float], None]


def train(
    args: argparse.Namespace,
    steps: Callable[[dict[str, object]], Iterable[int]],
    report: Report,
) -> None:
    """The loop of the examples; ``steps`` gets the state and yields step numbers."""
    preset, device = PRESETS[args.preset], torch.device("cpu")
    torch.manual_seed(0)
    model = GPT(preset)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=preset.learning_rate)
    text, _ = read_text(preset.text_bytes)
    data = Windows(text, preset, device, f"0/{dist.get_rank()}")
    torch.manual_seed(dist.get_rank() + 1)

    stamps: list[float] = []
    loss = torch.zeros(())
    for _ in steps({"model": model, "optimizer": optimizer, "data": data}):
        stamps.append(time.perf_counter())  # one turn to the next: all that is in between counts
        loss = model(*data.next())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report(loss.item())
    lengths = [later - earlier for earlier, later in itertools.pairwise(stamps)]
    if dist.get_rank() == 0:
        timed = [round(length, 7) for length in lengths[args.warm_up :]]
        print("timed " + json.dumps({"steps": timed, "loss": loss.item()}), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--steps", type=int, default=100, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=20, help="steps before them")
    return parser.parse_args()


def plain(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    train(args, lambda _: range(1, args.warm_up + args.steps + 2), lambda _: None)
    dist.barrier()
    dist.destroy_process_group()


def kept(args: argparse.Namespace) -> None:
    import keepstep

    def main(job: keepstep.Job) -> None:
        def steps(state: dict[str, object]) -> Iterable[int]:
            job.track(**state)
            return job.steps(args.warm_up + args.steps + 1)

        train(args, steps, lambda loss: job.log(loss=loss))

    keepstep.run(main)


if __name__ == "__main__":
    arguments = parse_arguments()
    (plain if arguments.plain else kept)(arguments)
