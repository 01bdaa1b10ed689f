"""One rank of one job of the benchmark of checkpoints: trains, saves in one way, loads, measures.

Started by ``benchmarks/checkpoint_runner.py``; what was measured is written to ``rank-N.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.checkpoint_names import CALIBRATION, MEMORY, SAVING, SEEN
from benchmarks.jobs import checkpoint_nvrx
from benchmarks.jobs.checkpoint_methods import LIMIT_S, Method, forget_files, sync_files
from benchmarks.jobs.checkpoint_model import Training
from benchmarks.jobs.checkpoint_raw import RawFiles, copy_seconds
from benchmarks.jobs.checkpoint_systems import MAKERS

if "nvrx" in "".join(sys.argv):
    checkpoint_nvrx.stand_in_for_cuda()  # also in workers, which import this file anew


WATCH_S = 0.6
"""How long memory is watched in steps without a save, at least."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--mode", choices=("measure", "pairs", "calibrate", "option"), required=True)
    add("--system", choices=MAKERS, required=True)
    add("--folder", type=Path, required=True, help="of this job")
    add("--state-mb", type=float, required=True)
    add("--length", type=int, required=True, help="of the input, in tokens")
    add("--threads", type=int, required=True, help="with which this rank computes")
    add("--pin", action="store_true", help="compute on one core, and leave the others alone")
    add("--saves", type=int, required=True)
    add("--phase-s", type=float, required=True, help="after which 2 saves of a kind are enough")
    add("--window", type=int, required=True, help="steps after a save that count, at least")
    add("--quiet", type=int, required=True, help="steps between saves")
    add("--pairs", type=int, default=0)
    return parser.parse_args()


@dataclass(frozen=True)
class InTraining:
    """A save while training goes on. Seconds from the call: until it returned, until the end of the
    step in which it was found done, until the end of all ``steps`` that count."""

    call_s: float
    done_s: float
    window_s: float
    steps: int


class Job:
    """What this rank does and has measured: ``found``, in seconds and bytes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.root: Path = args.folder / "checkpoints"
        self.root.mkdir(exist_ok=True)
        self.training = Training.make(args.state_mb, args.length)
        self.found: dict[str, Any] = {}
        self._cores = os.sched_getaffinity(0)
        self._flag = torch.zeros(1)
        self._step = 0
        self.method: Method = MAKERS[args.system](self.training, self.root)

    # --- training ---------------------------------------------------------------------------------

    def step(self) -> bool:
        """One step; whether the save begun last is done on all ranks."""
        with self._pinned():
            self.training.compute()
            self.method.before_update()
            self.training.update()
        return self.all_agree(self.method.done())

    def timed_step(self) -> float:
        began = time.perf_counter()
        self.step()
        return time.perf_counter() - began

    @contextlib.contextmanager
    def _pinned(self) -> Iterator[None]:
        # Only while it computes: threads and processes that a save starts get all cores.
        if not self.args.pin:
            yield
            return
        os.sched_setaffinity(0, {min(self._cores)})
        try:
            yield
        finally:
            os.sched_setaffinity(0, self._cores)

    def all_agree(self, answer: bool) -> bool:
        self._flag.fill_(1.0 if answer else 0.0)
        dist.all_reduce(self._flag, op=dist.ReduceOp.MIN)
        return bool(self._flag.item())

    # --- one save ---------------------------------------------------------------------------------

    def save_in_training(self) -> InTraining:
        """Save while training goes on, until it is done and the steps that count are made."""
        self._begin()
        began = time.perf_counter()
        self.method.save(self._step)
        called = time.perf_counter()
        steps, done_s = 0, 0.0
        while steps < self.args.window or not done_s:
            done = self.step()
            steps += 1
            if done and not done_s:
                done_s = time.perf_counter() - began
            if time.perf_counter() - began > LIMIT_S:
                raise TimeoutError(f"a save is not done after {LIMIT_S:g} s and {steps} steps")
        ended = time.perf_counter()
        self._end()
        return InTraining(called - began, done_s, ended - began, steps)

    def save_at_rest(self) -> float:
        """Save while training waits: seconds until the files are durable."""
        self._begin()
        began = time.perf_counter()
        self.method.save(self._step)
        self.method.before_update()
        self.method.wait()
        dist.barrier()
        if not self.method.syncs:
            if self.rank == 0:
                sync_files(self.method.folder(self._step))
            dist.barrier()
        return time.perf_counter() - began

    def _begin(self) -> None:
        """Make room for the next save, with nothing in flight."""
        if self._step and self.rank == 0:
            self.method.remove(self._step)
        self._step += 1
        self._settle()

    def _settle(self) -> None:
        """Let the disk finish what came before, removals too: it is not to be measured."""
        if self.rank == 0:
            os.sync()
        dist.barrier()

    def _end(self) -> None:
        """Outside of what is measured: wait for it, so that saves do not pile up."""
        self.method.wait()
        dist.barrier()
        if self.rank == 0 and not self.method.syncs:
            sync_files(self.method.folder(self._step))
        dist.barrier()

    # --- what is measured -------------------------------------------------------------------------

    def warm_up(self) -> None:
        for _ in range(3):
            self.step()
        self.found["state_bytes"] = sum(
            tensor.numel() * tensor.element_size() for _, tensor in self.training.tensors()
        )
        self.found["tensors"] = sum(1 for _ in self.training.tensors())

    def memory_copies(self, times: int) -> None:
        """The same bytes copied in memory, by one thread and by as many as training has."""
        tensors = [tensor for _, tensor in self.training.tensors()]
        counts = {"one": 1, "training": self.args.threads}
        copies: dict[str, list[float]] = {name: [] for name in counts}
        for _ in range(times):
            for name, threads in counts.items():
                copies[name].append(copy_seconds(tensors, threads, meet=dist.barrier))
        self.found["copy_s"] = copies

    def first_saves(self) -> None:
        """Those before the ones that count; memory is watched."""
        if self.rank == 0:
            (self.args.folder / MEMORY).touch()
        began = time.perf_counter()
        while not self.all_agree(time.perf_counter() - began > WATCH_S):
            self.step()  # gradients come and go: their memory is none of the saves'
        if self.rank == 0:
            (self.args.folder / SAVING).touch()
        self.method.prepare()
        self.found["first_call_s"] = self.save_in_training().call_s
        for _ in range(max(0, self.method.learns - 1)):
            self.save_in_training()
        if self.rank == 0:
            ends = time.perf_counter() + WATCH_S
            while not (self.args.folder / SEEN).exists() and time.perf_counter() < ends:
                time.sleep(0.01)  # saves of a tiny state are over before anybody has looked
            (self.args.folder / MEMORY).unlink(missing_ok=True)

    def saves(self) -> None:
        """Saves while training goes on, with steps without a save before each."""
        saves: list[InTraining] = []
        quiet: list[list[float]] = []
        for _ in self._rounds():
            self.step()  # after a pause
            quiet.append([self.timed_step() for _ in range(self.args.quiet)])
            saves.append(self.save_in_training())
        usual = statistics.median(length for row in quiet for length in row)
        self.found |= {
            "step_s": usual,
            "quiet_s": quiet,
            "call_s": [one.call_s for one in saves],
            "done_in_training_s": [one.done_s for one in saves],
            "window_steps": [one.steps for one in saves],
            "lost_s": [one.window_s - one.steps * usual for one in saves],
        }

    def _rounds(self) -> Iterator[int]:
        """Up to ``saves`` numbers; fewer, but at least 2, where that takes too long."""
        began = time.perf_counter()
        for number in range(self.args.saves):
            late = number >= 2 and time.perf_counter() - began > self.args.phase_s
            if not self.all_agree(not late):
                return
            yield number

    def at_rest(self) -> None:
        """Saves while training waits."""
        self.found["durable_s"] = [self.save_at_rest() for _ in self._rounds()]

    def values(self) -> None:
        """A save right after which all values change; what it has is compared when it is loaded."""
        self.training.compute()
        expected = self.training.digests()
        self._begin()
        self.method.save(self._step)
        self.method.before_update()
        self.training.update()
        self.method.wait()
        dist.barrier()
        self.found["load_s"], target = self.load()
        got = target.digests()
        wrong = [name for name, value in expected.items() if got.get(name) != value]
        self.found["wrong_tensors"] = len(wrong)

    def load(self) -> tuple[float, Training]:
        """Load the newest checkpoint, which nothing has cached, into new objects."""
        folder, target = self.method.folder(self._step), None
        if self.rank == 0:
            self.found["file_bytes"] = forget_files(folder)
        target = Training.make(self.args.state_mb, self.args.length)
        dist.barrier()
        began = time.perf_counter()
        self.method.load(self._step, target)
        dist.barrier()
        return time.perf_counter() - began, target

    def pairs(self) -> None:
        """keepstep and the raw storage in turn: write and save, read and load."""
        sizes: list[int | None] = [None] * self.world
        dist.all_gather_object(sizes, self.found["state_bytes"])
        raw = RawFiles(self.args.folder / "raw", [size or 0 for size in sizes])
        seconds: dict[str, list[float]] = {
            name: [] for name in ("write_s", "durable_s", "read_s", "load_s")
        }
        for number in range(self.args.pairs + 1):
            measured: dict[str, float] = {}
            for ours in (False, True) if number % 2 else (True, False):
                if ours:
                    measured["durable_s"] = self.save_at_rest()
                else:
                    measured["write_s"] = self._alone(raw.write)
            for ours in (False, True) if number % 2 else (True, False):
                if ours:
                    measured["load_s"] = self.load()[0]
                else:
                    measured["read_s"] = self._alone(raw.read)
            for name, value in measured.items():
                if number:  # the first is for warming up
                    seconds[name].append(value)
        self.found |= {"pairs": seconds, "raw_tool": raw.tool, "raw_bytes": raw.bytes}

    def _alone(self, work: Any) -> float:
        """Seconds of ``work``, done by rank 0 while the others wait; 0 on these."""
        self._settle()
        seconds: float = work() if self.rank == 0 else 0.0
        dist.barrier()
        return seconds


def calibrate(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of forward and backward for two lengths of the input."""
    training, seconds = Training.make(args.state_mb, CALIBRATION[0]), []
    for length in CALIBRATION:
        training.tokens = torch.zeros(1, length, dtype=torch.long)
        taken = []
        for _ in range(4):
            began = time.perf_counter()
            training.compute()
            taken.append(time.perf_counter() - began)
        seconds.append(min(taken))
    return {"compute_s": seconds}


def work(args: argparse.Namespace) -> dict[str, Any]:
    if args.mode == "calibrate":
        return calibrate(args)
    job = Job(args)
    job.warm_up()
    if args.mode == "option":
        job.values()
    elif args.mode == "pairs":
        job.method.prepare()
        job.pairs()
    else:
        job.memory_copies(3)
        job.first_saves()
        job.saves()
        job.at_rest()
        job.values()
    job.method.close()
    return job.found


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    found = work(args)
    path = args.folder / f"rank-{dist.get_rank()}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
