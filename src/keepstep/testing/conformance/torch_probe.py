"""The job of the restarter suite: a script that fails as told and writes down what it sees.

Started by ``keepstep run`` with the suite's folder and a plan (see ``restarter.Plan``) as its
arguments. Each line in ``records.jsonl`` is a ``restarter.Record``. The faults of the plan happen
one after the other, each once in a run, in step ``STEP`` of the rank that it names; the other ranks
wait for that rank in a collective by then.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch import nn

import keepstep
from keepstep.errors import UsageError
from keepstep.testing.conformance.processes import wait_until
from keepstep.testing.conformance.restarter import (
    EXIT_CODE,
    RECORDS,
    Fault,
    Kind,
    Plan,
    Record,
    read,
)

STEPS = 6
STEP = 3
REACHED_S = 30.0
SETTLE_S = 0.3
"""From the note that a rank is about to wait until it waits for sure."""


class Probe:
    """What one process does and sees, over all its attempts."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        self._attempt = self._round = self._rank = 0
        self._made: list[weakref.ref[object]] = []

    def note(self, kind: Kind, **more: Any) -> None:
        """Write a line; what was written stays, however this process ends."""
        record = Record(
            kind=kind,
            rank=self._rank,
            pid=os.getpid(),
            attempt=self._attempt,
            round=self._round,
            **more,
        )
        fd = os.open(self._folder / RECORDS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, msgspec.json.encode(record) + b"\n")
        finally:
            os.close(fd)

    def main(self, job: keepstep.Job) -> str:
        """One attempt."""
        self._attempt += 1
        self._round, self._rank = job.world.round, job.world.rank
        self.note(
            "begin",
            size=dist.get_world_size(),
            group_rank=dist.get_rank(),
            random=[random.random(), float(torch.rand(1))],
            alive=sum(reference() is not None for reference in self._made),
        )
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        self._made = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.weight)]
        try:
            for step in job.steps(STEPS):
                model(torch.rand(4, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == STEP:
                    self._fault(job.world.size)
                dist.all_reduce(torch.ones(1))
        finally:
            self.note("unwound")
        return f"result of rank {self._rank}"

    def _fault(self, size: int) -> None:
        """Do what is due, if it is this rank's; else note that it will wait for the others."""
        due = self._due()
        if due is None or due[1].rank != self._rank:
            self.note("waits")
            return
        index, fault = due
        wait_until(lambda: self._waiting() >= size - 1, REACHED_S)
        threading.Event().wait(SETTLE_S)
        (self._folder / f"fault-{index}").touch()
        self.note("fault")
        _fail(fault.kind, index)

    def _due(self) -> tuple[int, Fault] | None:
        for index, fault in enumerate(self._plan.faults):
            if fault.always or not (self._folder / f"fault-{index}").exists():
                return index, fault
        return None

    def _waiting(self) -> int:
        """How many other ranks are about to wait in this round."""
        records = read(self._folder)
        return sum(one.kind == "waits" and one.round == self._round for one in records)


def _fail(kind: str, index: int) -> NoReturn:
    if kind == "exception":
        # Each time another: the same again would be the script's own error.
        raise ValueError(f"exception {index} of the suite")
    if kind == "usage":
        raise UsageError("the suite's wrong use", advice="use it right")
    if kind == "exit":
        sys.exit(EXIT_CODE)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(kind)


def _main() -> None:
    folder, plan = Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Plan)
    probe = Probe(folder, plan)
    random.seed(1234)
    torch.manual_seed(1234)
    probe.note("result", text=keepstep.run(probe.main))


if __name__ == "__main__":
    _main()
