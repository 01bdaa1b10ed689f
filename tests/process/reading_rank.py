"""A rank of several on one machine: loads a checkpoint when told, and says what it cost.

Arguments: folder of checkpoints, checkpoint, rank, world, how ("all" or "part"). Writes "ready",
waits for a line, writes the bytes that this process made storage read, and checks the values.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

from keepstep.checkpoint.torch_reader import load
from tests.checkpoint.torch_worlds import fake_world
from tests.process.reading_state import COLUMNS, ROWS, check, part


def storage_bytes() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, number = line.partition(":")
        if name == "read_bytes":
            return int(number)
    raise SystemExit("the kernel does not count")


def main(root: Path, folder: str, rank: int, world: int, how: str) -> None:
    warnings.simplefilter("ignore")
    with fake_world(rank, world):
        empty = torch.zeros(ROWS, COLUMNS)
        state = {name: part(empty, world) if how == "part" else empty.clone() for name in "abc"}
        load({"s": state}, root, folder, rank=rank, world=world)  # imports are behind us
        print("ready", flush=True)
        sys.stdin.readline()
        before = storage_bytes()
        load({"s": state}, root, folder, rank=rank, world=world)
        print(storage_bytes() - before, flush=True)
        check(state, world)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
