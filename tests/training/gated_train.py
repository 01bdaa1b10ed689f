"""The main job with gates and a record, as a script under ``keepstep run``.

A gate is a file in the folder GATES: while ``step-12.closed`` exists, every rank stands still in
step 12, before it computes anything. ``start`` is the gate before the first build and ``eval`` the
one inside that section. A rank that stands there has made ``step-12.reached-<rank>``.

At the end of each step a rank appends to the file ``record-<rank>`` what a fault may not change:
the place in the data, the learning rate, and the state of the random generators. In step LEAVE_AT,
if that is set, it dies.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import keepstep

_GATES = Path(os.environ["GATES"])
_RANK = os.environ["RANK"]


def _example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "train_fsdp.py"
    spec = importlib.util.spec_from_file_location("train_fsdp", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_fsdp"] = module
    spec.loader.exec_module(module)
    return module


def _pass(gate: str) -> None:
    closed = _GATES / f"{gate}.closed"
    while closed.exists():
        (_GATES / f"{gate}.reached-{_RANK}").touch()
        time.sleep(0.005)


class GatedJob:
    """A ``keepstep.Job`` that waits at gates and keeps the record."""

    def __init__(self, job: keepstep.Job) -> None:
        self._job = job
        self._tracked: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def track(self, **objects: Any) -> None:
        """As the job's; remembers the objects for the record."""
        self._tracked = objects
        self._job.track(**objects)

    def steps(self, total: int) -> Iterator[int]:
        """As the job's, with a gate before and a record after each step."""
        for step in self._job.steps(total):
            _pass(f"step-{step}")
            yield step
            self._record(step)
            if os.environ.get("LEAVE_AT") == str(step):
                os._exit(9)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """As the job's, with a gate inside."""
        with self._job.section(name):
            _pass(name)
            yield

    def _record(self, step: int) -> None:
        line = {
            "step": step,
            "position": self._tracked["data"].position,
            "rate": self._tracked["scheduler"].get_last_lr(),
            "python": random.random(),
            "torch": hashlib.sha256(bytes(torch.get_rng_state().tolist())).hexdigest(),
        }
        with (_GATES / f"record-{_RANK}").open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    example = _example()
    if "LAYERS" in os.environ:
        tiny = example.PRESETS["tiny"]
        example.PRESETS["tiny"] = type(tiny)(**{**vars(tiny), "layers": int(os.environ["LAYERS"])})
    every = example.parse_arguments().every_steps

    def attempt(job: keepstep.Job) -> None:
        _pass("start")
        random.seed(_RANK)
        example.main(GatedJob(job))

    keepstep.run(attempt, settings={"checkpoint.every_steps": every})


if __name__ == "__main__":
    main()
    if "KEEPSTEP_RUN_DIR" not in os.environ:
        # Under torchrun: a thread of gloo may still hold a tensor when the interpreter goes down,
        # and then ends the process with SIGABRT, with or without keepstep.
        sys.stdout.flush()
        os._exit(0)
