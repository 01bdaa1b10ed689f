"""Processes that a suite starts, and whatever they start: found by a mark, ended for sure.

Runs in tests. Whoever inherits the environment of a process inherits its mark, so that a process is
found that left its parent, session and group.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from keepstep.clock import SYSTEM
from keepstep.config import env

POLL_S = 0.01
TRACKER_S = 5.0
_MARK = "KEEPSTEP_SUITE_MARK"


class Mark:
    """The sign of the processes of one run."""

    def __init__(self) -> None:
        self._value = secrets.token_hex(8)

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """This process's environment with the mark, its import path, and ``more``."""
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        return {**env.snapshot(), "PYTHONPATH": path, **more, _MARK: self._value}

    def pids(self) -> list[int]:
        """Living processes that carry the mark."""
        wanted = f"{_MARK}={self._value}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return [pid for pid in found if lives(pid)]

    def kill(self) -> None:
        """End them all, also those that are started meanwhile.

        Python's resource trackers come last: when nobody uses them they remove what killed
        processes have left in shared memory, and end by themselves.
        """
        while pids := [pid for pid in self.pids() if not is_tracker(pid)]:
            _kill(pids)
        _kill(living(self.pids(), TRACKER_S))


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    living(pids, 10.0)


def is_tracker(pid: int) -> bool:
    """Whether it is Python's own keeper of shared memory and semaphores."""
    try:
        return "resource_tracker" in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def lives(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def living(pids: Iterable[int], limit_s: float) -> list[int]:
    """Which of ``pids`` still live after ``limit_s`` seconds; returns early if none does."""
    known = list(pids)
    wait_until(lambda: not any(map(lives, known)), limit_s)
    return [pid for pid in known if lives(pid)]


def wait_until(probe: Callable[[], object], limit_s: float) -> bool:
    """Poll until ``probe`` gives something true; False if it does not within ``limit_s``."""
    deadline = SYSTEM.mono() + limit_s
    while not probe():
        if SYSTEM.mono() >= deadline:
            return False
        SYSTEM.sleep(POLL_S)
    return True


def tail(path: Path, size: int = 8000) -> str:
    """The end of a log, empty if there is none."""
    try:
        return path.read_text(errors="replace")[-size:]
    except FileNotFoundError:
        return ""
