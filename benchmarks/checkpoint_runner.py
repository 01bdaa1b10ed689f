"""Runs one job of the benchmark of checkpoints: its ranks, their time limit, their memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.checkpoint_names import MEMORY, SAVING, SEEN
from benchmarks.systems import free_port

JOB = Path(__file__).parent / "jobs" / "checkpoint_job.py"
SAMPLE_S = 0.1
"""Between two looks at memory; looking takes some hundredths of a second of one core."""


@dataclass(frozen=True)
class Result:
    """What one job came to.

    Attributes:
        ranks: What each rank has measured; empty if the job failed.
        error: Why it failed; empty if it did not.
        memory_bytes: Most memory of all its processes in its first saves above the most in steps
            before them; None where it was not watched.
        seconds: Wall time of the job.
    """

    ranks: list[dict[str, Any]]
    error: str
    memory_bytes: int | None
    seconds: float


def run(words: Sequence[str], world: int, folder: Path, limit_s: float) -> Result:
    """Run ``world`` ranks with ``words`` in a new ``folder``, at most ``limit_s`` seconds.

    Nothing of the job is running afterwards, and the folder is gone.
    """
    folder.mkdir()
    mark, began = secrets.token_hex(8), time.monotonic()
    words = [sys.executable, str(JOB), "--folder", str(folder), *words]
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ |= {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environ |= {"TMPDIR": str(folder), harness.MARK: mark}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            ranks.append(_start(words, rank, folder, environ))
        watch = MemoryWatch(folder, mark)
        while any(rank.poll() is None for rank in ranks):
            failed = any(rank.poll() for rank in ranks)
            if failed or time.monotonic() - began > limit_s:
                time.sleep(1.0 if failed else 0.0)  # for the words of the other ranks
                break
            watch.look()
            time.sleep(SAMPLE_S)
        codes = [rank.poll() for rank in ranks]
    finally:
        harness.end_all(mark)
        for process in ranks:
            process.wait()
    seconds = time.monotonic() - began
    found = [_read(folder / f"rank-{rank}.json") for rank in range(world)]
    error = "" if all(found) else _why(codes, folder, limit_s)
    shutil.rmtree(folder, ignore_errors=True)
    return Result([] if error else found, error, watch.extra, seconds)


def _start(
    words: Sequence[str], rank: int, folder: Path, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    with (folder / f"output-{rank}.txt").open("wb") as output:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(FileNotFoundError):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    return {}


def _why(codes: Sequence[int | None], folder: Path, limit_s: float) -> str:
    """In one line: how the job ended, and the last error that a rank has printed."""
    ended = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code]
    how = ", ".join(ended) or f"not done after {limit_s:g} s"
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("output-*.txt"))]
    return f"{how}: {last_error(chr(10).join(texts))}"


def last_error(text: str) -> str:
    """The last line that names an error, at most 200 characters; else that there is none."""
    pattern = r"^(\[rank\d+\]: *)?([\w.]+(Error|Exception)\b.*|.*(Segmentation|SIG[A-Z]{3,}).*)$"
    found = [match for line in text.splitlines() if (match := re.match(pattern, line.strip()))]
    return (found[-1][2] if found else "it printed no error")[:200]


class MemoryWatch:
    """Memory of all processes of a job while the job asks for it.

    Args:
        folder: Of the job. mark: What all its processes have in their environment.

    Attributes:
        extra: Most bytes in steps with saves above the most before; None until they begin.
    """

    def __init__(self, folder: Path, mark: str) -> None:
        self._folder, self._mark = folder, mark
        self._before = 0
        self.extra: int | None = None

    def look(self) -> None:
        """Look if the job wants it now."""
        if not (self._folder / MEMORY).exists():
            return
        now = proportional_bytes(harness.marked(self._mark))
        if not (self._folder / SAVING).exists():
            self._before = max(self._before, now)
        elif self._before:
            self.extra = max(self.extra or 0, now - self._before)
            (self._folder / SEEN).touch()


def proportional_bytes(pids: Sequence[int]) -> int:
    """Memory of some processes in bytes, what they share counted once (PSS)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
            total += int(found[1]) * 1024 if found else 0
    return total
