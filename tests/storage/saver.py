"""A script that does with a ``Checkpointer`` what it is told, one line at a time.

Run as ``python -m tests.storage.saver ROOT BYTES``; with a world in the variables RANK, WORLD_SIZE
and MEETING (a file) as a rank of it. Lines on standard input: ``save STEP``, ``finalize SECONDS``,
``restore``, ``abort``. To each it answers ``ok``, with the result, or the error's name and text.
When the input ends it closes the checkpointer.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from keepstep import Checkpointer
from keepstep.errors import KeepstepError


def _do(checkpointer: Checkpointer, state: dict[str, object], words: list[str]) -> str:
    match words:
        case ["save", step]:
            tensor = state["tensor"]
            assert isinstance(tensor, torch.Tensor)
            tensor.fill_(int(step))
            return "skipped" if checkpointer.async_save(state, int(step)).skipped else ""
        case ["finalize", seconds]:
            checkpointer.finalize(float(seconds))
            return ""
        case ["abort"]:
            checkpointer.close(abort=True)
            return ""
        case ["restore"]:
            restored = checkpointer.restore(state)
            tensor = state["tensor"]
            assert isinstance(tensor, torch.Tensor)
            (value,) = set(tensor.tolist())
            return f"{restored} {value}"
    raise AssertionError(words)


def main() -> int:
    if "MEETING" in os.environ:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        meeting = f"file://{os.environ['MEETING']}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    state: dict[str, object] = {"tensor": torch.zeros(int(sys.argv[2]) // 4, dtype=torch.int32)}
    checkpointer = Checkpointer(sys.argv[1], retries=0)
    code = 0
    for line in sys.stdin:
        try:
            print(f"ok {_do(checkpointer, state, line.split())}".strip(), flush=True)
        except KeepstepError as error:
            print(f"{type(error).__name__} {error}", flush=True)
    try:
        checkpointer.close()
    except KeepstepError as error:
        print(f"{type(error).__name__} {error}", flush=True)
        code = int(error.exit_code)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
