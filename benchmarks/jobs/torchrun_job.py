"""The training as a script for torchrun: init, train from the newest checkpoint, end."""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.jobs.training import Attempt, parse_arguments, train


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.group_timeout_s))
    train(args, Attempt(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
