"""Watching a job: its lines, its end, and that nothing of it stays."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Watched

START_ANOTHER_AND_STAY = """
import subprocess, sys, time
nap = "import time; time.sleep(600)"
other = subprocess.Popen([sys.executable, "-c", nap], start_new_session=True)
print(other.pid, flush=True)
print("that is all", flush=True)
time.sleep(600)
"""


def watch(code: str, fired: Path, limit_s: float = 600.0, start_limit_s: float = 600.0) -> Watched:
    return harness.watch(
        [sys.executable, "-c", code],
        fired=fired,
        until="that is all",
        limit_s=limit_s,
        start_limit_s=start_limit_s,
    )


def lives(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return (
        status.exists() and status.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    )


def test_a_job_that_ends_is_told_with_its_lines_and_code(tmp_path: Path) -> None:
    watched = watch("import sys; print('one'); sys.exit(3)", tmp_path / "fired")
    assert ([line for _, line in watched.lines], watched.code) == (["one"], 3)
    assert not watched.late


def test_a_job_that_has_told_all_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    watched = watch(START_ANOTHER_AND_STAY, tmp_path / "fired")
    assert (watched.code, watched.late) == (None, False)
    assert not lives(int(watched.lines[0][1]))


def test_the_limit_counts_from_the_fault(tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    code = f"import pathlib, time; pathlib.Path({str(fired)!r}).touch(); time.sleep(600)"
    watched = watch(code, fired, limit_s=0.1)
    assert (watched.code, watched.late) == (None, True)


def test_a_job_that_never_comes_to_its_fault_is_ended_too(tmp_path: Path) -> None:
    watched = watch("import time; time.sleep(600)", tmp_path / "fired", 600.0, start_limit_s=0.1)
    assert (watched.code, watched.late) == (None, True)


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert harness.version("keepstep-no-such-package") == harness.NOT_INSTALLED
    assert harness.version("psutil") != harness.NOT_INSTALLED
