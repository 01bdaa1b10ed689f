"""Checkpoints of torch, NVRx and keepstep: what a save costs training, and how fast it is safe.

The same training saves the same state to the same disk in every way, one job at a time, in turn.
What is measured is explained in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import checkpoint_page, checkpoint_runner, harness, page
from benchmarks.checkpoint_figures import OURS, Cpus, figures, mean, median, ratios
from benchmarks.checkpoint_names import BY_NAME, CALIBRATION, OPTIONS, SYSTEMS, System
from benchmarks.checkpoint_runner import Result
from benchmarks.comparison import shown
from benchmarks.systems import NVRX

KEEPSTEP_TIMES = 3
"""So many times longer than others keepstep, with all its defaults, may take for its samples."""
QUICK = ["--state-mb", "12", "--rounds", "1", "--saves", "1", "--window", "1", "--quiet", "1"]
QUICK += ["--pairs", "0", "--length", "8", "--cpus", "spare", "--no-options"]
QUICK += ["--systems", "torch-save", "keepstep-overlap"]


class Scenario:
    """All jobs with one use of the cores.

    Args:
        args: As parsed. cpus: Whether a core is spare. folder: Where jobs have their folders.
    """

    def __init__(self, args: argparse.Namespace, cpus: Cpus, folder: Path) -> None:
        self.args, self.cpus, self.folder = args, cpus, folder
        cores = len(os.sched_getaffinity(0))
        self.ranks = args.ranks or (1 if cpus == "spare" else 2)
        usable = max(1, cores - 1) if cpus == "spare" else cores
        self.threads = max(1, usable // self.ranks)
        self.length = args.length
        self.runs: dict[str, list[Result]] = {}
        self.pairs: Result | None = None
        self._jobs = 0

    def measure(self, systems: Sequence[System]) -> None:
        """All systems in turn, ``rounds`` times, every second time backwards; then the pairs."""
        if not self.length:
            self._calibrate()
        self.runs = {system.name: [] for system in systems}
        for number in range(self.args.rounds):
            for system in systems if number % 2 == 0 else reversed(systems):
                result = self.job("measure", system.name)
                self.runs[system.name].append(result)
                self._tell(number, system, result)
        if self.args.pairs:
            harness.note(f"{self.cpus}: {self.args.pairs} pairs with the raw disk ...")
            limit_s = self.args.limit_s + 12.0 * self.args.pairs
            name = "keepstep-blocking"  # training waits: there is nothing to overlap with
            self.pairs = self.job("pairs", name, limit_s)

    def _calibrate(self) -> None:
        """Choose the length of the input so that forward and backward take ``step_s``."""
        result = self.job("calibrate", "torch-save")
        if result.error:
            raise SystemExit(f"the training does not run: {result.error}")
        few, many = (max(both) for both in zip(*_each(result, "compute_s"), strict=True))
        low, high = CALIBRATION
        token_s = max(1e-6, (many - few) / (high - low))
        self.length = max(2, min(4096, round(low + (self.args.step_s - few) / token_s)))

    def job(self, mode: str, system: str, limit_s: float = 0.0) -> Result:
        """Run one job."""
        args, self._jobs = self.args, self._jobs + 1
        words = ["--mode", mode, "--system", system, "--threads", str(self.threads)]
        words += ["--length", str(self.length or CALIBRATION[0]), "--pairs", str(args.pairs)]
        for name in ("state_mb", "saves", "window", "quiet"):
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        # What it loses is little beside the noise of steps: it takes more samples.
        longer = KEEPSTEP_TIMES if system == OURS else 1
        words += ["--phase-s", str(args.phase_s * longer)]
        # Several threads cannot be bound to one core; they leave one to the others anyway.
        words += ["--pin"] if self.cpus == "spare" and self.threads == 1 else []
        folder = self.folder / f"{self.cpus[:2]}{self._jobs}"
        return checkpoint_runner.run(words, self.ranks, folder, limit_s or args.limit_s)

    def _tell(self, number: int, system: System, result: Result) -> None:
        found = figures([dataclasses.asdict(result)])
        text = result.error
        if not text:
            text = f"lost {mean(found.lost_s):.2f} s, call {median(found.call_s):.2f} s, "
            text += f"durable {median(found.durable_s):.2f} s, load {median(found.load_s):.2f} s"
            text += "" if found.right else ", VALUES WRONG"
        place = f"{self.cpus}, {number + 1} of {self.args.rounds}"
        harness.note(f"{place}, {system.name}: {text} [{result.seconds:.0f} s]")

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "cpus": self.cpus,
            "ranks": self.ranks,
            "threads": self.threads,
            "length": self.length,
            "runs": {name: list(map(dataclasses.asdict, runs)) for name, runs in self.runs.items()},
            "pairs": None if self.pairs is None else dataclasses.asdict(self.pairs),
        }

    def options(self) -> dict[str, Any]:
        """What comes of what torch offers besides."""
        return {
            title: dataclasses.asdict(self.job("option", name)) for name, title in OPTIONS.items()
        }


def _each(result: Result, name: str) -> list[list[float]]:
    return [rank[name] for rank in result.ranks]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--state-mb", type=float, default=1000.0, help="parameters and AdamW's state, all ranks")
    add("--cpus", nargs="+", choices=("saturated", "spare"), default=["saturated", "spare"])
    add("--ranks", type=int, default=0, help="default: 2 if saturated, 1 if a core is spare")
    add("--rounds", type=int, default=1, help="jobs of each system")
    add("--saves", type=int, default=8, help="saves of each kind in a job")
    add("--phase-s", type=float, default=8.0, help="after which 2 saves of a kind are enough")
    add("--window", type=int, default=2, help="steps after a save that count, at least")
    add("--quiet", type=int, default=2, help="steps without a save before each save")
    add("--every", type=int, default=50, help="steps between saves, for the share of time only")
    add("--step-s", type=float, default=0.4, help="forward and backward of a step")
    add("--length", type=int, default=0, help="of the input, instead of --step-s")
    add("--pairs", type=int, default=20, help="pairs of keepstep and the raw disk")
    add("--systems", nargs="+", choices=BY_NAME, default=list(BY_NAME), metavar="NAME")
    add("--no-options", action="store_true", help="do not try other options of torch")
    add("--limit-s", type=float, default=150.0, help="after which a job is ended")
    add("--folder", type=Path, help="existing folder on the disk to measure; default: a temporary")
    add("--quiet-s", type=float, default=0.0, help="wait at most so long for a quiet machine")
    add("--json", type=Path, metavar="FILE", help="write every sample to this file")
    add("--from", dest="source", type=Path, metavar="FILE", help="measure nothing, show this file")
    add("--write", type=Path, metavar="PAGE", help="put the tables into this Markdown page")
    add("--quick", action="store_true", help="only whether it works: tiny state, few systems")
    args = parser.parse_args(words)
    if args.quick:
        args = parser.parse_args([*QUICK, *(sys.argv[1:] if words is None else words)])
    return args


def machine(folder: Path) -> dict[str, object]:
    """What the figures depend on."""
    text = Path("/proc/cpuinfo").read_text(errors="replace")
    found = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    mounts = [one for one in psutil.disk_partitions(all=True) if _holds(one.mountpoint, folder)]
    kind = max(mounts, key=lambda one: len(one.mountpoint)).fstype if mounts else "unknown"
    return {
        **harness.machine(),
        "processor": found[1] if found else "unknown",
        "file system": kind,
    }


def _holds(mountpoint: str, folder: Path) -> bool:
    return folder.resolve().is_relative_to(mountpoint)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything; the document that ``--json`` writes."""
    systems = [system for system in SYSTEMS if system.name in args.systems]
    if harness.version(NVRX) == harness.NOT_INSTALLED:
        systems = [system for system in systems if not system.needs_nvrx]
        harness.note(f"left out: NVRx: {NVRX} is not installed")
    harness.wait_for_quiet(args.quiet_s)
    options: dict[str, Any] = {}
    # Short: processes of jobs make sockets in it.
    with tempfile.TemporaryDirectory(prefix="ks-", dir=args.folder) as name:
        about = machine(Path(name))
        scenarios = []
        for cpus in args.cpus:
            scenario = Scenario(args, cpus, Path(name))
            scenario.measure(systems)
            scenarios.append(scenario)
        if not args.no_options:
            tried = argparse.Namespace(**{**vars(args), "state_mb": 10.0})
            options = Scenario(tried, "spare", Path(name)).options()
    kept = ("state_mb", "rounds", "saves", "phase_s", "window", "quiet", "every", "step_s", "pairs")
    return {
        "v": 1,
        "benchmark": "checkpoint",
        "machine": about,
        "command": shown(sys.argv[1:]).replace("benchmarks.comparison", "benchmarks.checkpoint"),
        "settings": {name: getattr(args, name) for name in kept},
        "scenarios": [scenario.plain() for scenario in scenarios],
        "options": options,
    }


def show(document: dict[str, Any]) -> None:
    """Tables on the terminal."""
    settings = document["settings"]
    for scenario in document["scenarios"]:
        name = checkpoint_page.title(scenario)
        rows = checkpoint_page.rows(scenario, settings["every"])
        _print(name, checkpoint_page.COLUMNS, rows)
        _print("", checkpoint_page.RAW, checkpoint_page.raw(scenario, settings["window"]))
        found = [checkpoint_page.ratio_row(one) for one in ratios(scenario)]
        _print("", checkpoint_page.RATIOS, found)
        for text in checkpoint_page.failures(scenario):
            print(f"did not run: {text}")
    for option, outcome in checkpoint_page.option_rows(document["options"]):
        print(f"{option}: {outcome}")
    print("; ".join(f"{name} {value}" for name, value in document["machine"].items()))


def _print(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    console.width = max(console.width, 180)  # a cell that is cut says less than a wrapped line
    console.print(table)


def main() -> None:
    args = parse_arguments()
    if args.source:
        document: dict[str, Any] = json.loads(args.source.read_text(encoding="utf-8"))
    else:
        document = measure(args)
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if args.write:
        generated = checkpoint_page.markdown(document)
        page.rewrite(args.write, lambda text: page.replaced(text, generated))
    else:
        show(document)


if __name__ == "__main__":
    main()
