"""A Checkpointer under torchrun whose every rank is killed while a save is in flight.

Argument: a folder. Each rank's writer stands still; its process id is in ``writer-<rank>``.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from keepstep import Checkpointer


def main() -> None:
    dist.init_process_group("gloo")
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    state = {"t": torch.full((1000,), float(rank)), "progress": {"seen": rank}}
    checkpointer = Checkpointer(folder / "saved")
    checkpointer.async_save(state, 1)
    checkpointer.finalize()
    children = psutil.Process().children()
    (writer,) = [one for one in children if "keepstep.checkpoint.writer_process" in one.cmdline()]
    writer.suspend()
    (folder / f"writer-{rank}").write_text(str(writer.pid))
    save = checkpointer.async_save(state, 2)
    while not save.staged():
        pass
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
