"""What all benchmarks share: running jobs, describing the machine, printing tables or JSON.

Run each benchmark from the root of the repository: ``python -m benchmarks.NAME``.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "examples" / "train_fsdp.py"
_ENTRY = "import sys; from keepstep.cli.main import main; sys.exit(main())"


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"

    def rounded(self) -> dict[str, float]:
        return {
            "median": round(self.median, 6),
            "low": round(self.low, 6),
            "high": round(self.high, 6),
        }


def parser(about: str | None) -> argparse.ArgumentParser:
    """With what every benchmark takes."""
    made = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    made.add_argument("--json", action="store_true", help="print JSON instead of tables")
    made.add_argument(
        "--quiet-s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait at most so long for a load below 1.5 before the start",
    )
    return made


def wait_for_quiet(limit_s: float, load: float = 1.5) -> None:
    """Wait until the load of the last minute is below ``load``, at most ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while os.getloadavg()[0] >= load and time.monotonic() < deadline:
        time.sleep(2.0)


def machine() -> dict[str, object]:
    """What the figures depend on, with the load before the start."""
    return {
        "date": datetime.date.today().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "load": round(os.getloadavg()[0], 2),
    }


def keepstep_run(run_dir: Path, world: int, *words: str) -> list[str]:
    """``keepstep run`` with ``words`` (flags, script, the script's arguments)."""
    program = [sys.executable, "-c", _ENTRY, "run"]
    return [*program, "--nproc-per-node", str(world), "--run-dir", str(run_dir), *words]


def run(words: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """Run a job to its end; returns what it printed.

    Raises:
        SystemExit: it failed; its last lines are in the message.
    """
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-40:])
        raise SystemExit(f"{' '.join(words)}\nended with exit code {done.returncode}:\n{tail}")
    return done.stdout


def note(text: str) -> None:
    """A line about what is being done, apart from the result."""
    print(text, file=sys.stderr, flush=True)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], about: object) -> None:
    """Print one table and the machine it was made on."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    if isinstance(about, dict):
        console.print(", ".join(f"{name} {value}" for name, value in about.items()))


def show_json(benchmark: str, about: object, results: object, **settings: object) -> None:
    """Print everything as one JSON object."""
    document = {
        "v": 1,
        "benchmark": benchmark,
        "machine": about,
        "settings": settings,
        "results": results,
    }
    print(json.dumps(document, indent=2))
