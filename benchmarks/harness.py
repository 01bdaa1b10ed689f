"""What all benchmarks share: running jobs, describing the machine, printing tables or JSON.

Run each benchmark from the root of the repository: ``python -m benchmarks.NAME``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import secrets
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

import keepstep

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "examples" / "train_fsdp.py"
NOT_INSTALLED = "not installed"
MARK = "KEEPSTEP_BENCHMARK_MARK"
"""Variable that all processes of a job have in their environment."""
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
        "torch": version("torch"),
        "keepstep": keepstep.__version__,
        "nvidia-resiliency-ext": version("nvidia-resiliency-ext"),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),
    }


def version(package: str) -> str:
    """The installed version of a package, or that it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


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


@dataclass(frozen=True)
class Watched:
    """A job that was watched to its end. Times are wall times in seconds.

    ``lines`` are what it printed, each with the time at which it came; ``code`` is its exit code,
    None if it was ended; ``late`` whether that was for being late.
    """

    lines: list[tuple[float, str]]
    code: int | None
    late: bool
    ended: float


def watch(
    words: Sequence[str],
    *,
    fired: Path,
    until: str,
    limit_s: float,
    start_limit_s: float = 60.0,
    environ: Mapping[str, str] | None = None,
) -> Watched:
    """Run a job that may well fail or hang, at most ``limit_s`` after its fault.

    Nothing of it is running afterwards, whatever process group or session it went to.

    Args:
        words: The command.
        fired: File that is there from the moment of the fault.
        until: Once a line with this text is printed, all is known and the job is ended.
        limit_s: Seconds from the fault to the end.
        start_limit_s: Seconds from the start to the end, while there is no fault.
        environ: Variables that the job gets besides.
    """
    mark = secrets.token_hex(8)
    own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: mark}
    lines: list[tuple[float, str]] = []
    done, late, began = threading.Event(), False, time.time()
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environ or {}), **own},
        start_new_session=True,
    ) as process:
        reader = threading.Thread(
            target=_read_lines, args=(process, lines, until, done), daemon=True
        )
        reader.start()
        try:
            while process.poll() is None and not (late or done.wait(0.02)):
                fault = changed(fired)
                late = time.time() > (began + start_limit_s if fault is None else fault + limit_s)
            code, ended = process.poll(), time.time()
        finally:
            end_all(mark)
        reader.join(timeout=5.0)
    return Watched(list(lines), code, late, ended)


def changed(path: Path) -> float | None:
    """Wall time of a file's last change; None if it is not there."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mtime
    return None


def _read_lines(
    process: subprocess.Popen[bytes],
    lines: list[tuple[float, str]],
    until: str,
    done: threading.Event,
) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append((time.time(), line.decode(errors="replace").rstrip()))
        if until in lines[-1][1]:
            done.set()


def end_all(mark: str) -> None:
    """SIGKILL for every process that inherited ``mark``, until there is none.

    Raises:
        SystemExit: some do not end.
    """
    began = time.monotonic()
    while found := marked(mark):
        waited = time.monotonic() - began
        if waited > 20.0:
            raise SystemExit(f"these processes do not end: {found}")
        for pid in found:
            # Once the others are gone it removes their semaphores and ends by itself.
            if not (waited < 2.0 and _runs(pid, b"resource_tracker")):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _runs(pid: int, word: bytes) -> bool:
    """Whether ``word`` is in the command line of a process that may be gone."""
    with contextlib.suppress(OSError):
        return word in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def marked(mark: str) -> list[int]:
    """Living processes whose environment at their start had ``mark``."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return sorted(found)


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
