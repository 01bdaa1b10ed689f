"""Scripts that bring an ``init_process_group`` of their own to ``keepstep.run``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.job import Job

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed import init_process_group

import keepstep

def main(job):
    init_process_group(sys.argv[1])
    total = torch.ones(1)
    dist.all_reduce(total)
    print("ranks", int(total.item()), flush=True)
    dist.destroy_process_group()

if sys.argv[2] == "early":
    init_process_group(sys.argv[1])
keepstep.run(main)
"""


def test_the_same_init_is_accepted_with_a_warning(tmp_path: Path) -> None:
    with Job(tmp_path, SCRIPT, arguments=["gloo", "inside"], preload=True) as job:
        assert job.wait() == 0
        assert job.out.count("ranks 2") == 2
        assert job.err.count("init_process_group in the script does nothing") == 1


@pytest.mark.parametrize(
    ("backend", "place", "said"),
    [
        ("mpi", "inside", "the script asks for the backend mpi, keepstep.run has made gloo"),
        ("gloo", "early", "torch.distributed is initialised before keepstep.run"),
    ],
)
def test_another_init_is_refused_at_once(
    backend: str, place: str, said: str, tmp_path: Path
) -> None:
    with Job(tmp_path, SCRIPT, arguments=[backend, place], preload=True) as job:
        assert job.wait() == 64
        assert said in job.ending
        assert job.causes()[-1][2] == "stop" and len(job.causes()) == 1
        assert "Traceback" not in job.err
