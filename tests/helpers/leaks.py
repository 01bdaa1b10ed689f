"""Leak police: what a test may not leave behind.

``Snapshot.take`` before, ``leaks_since`` after. Processes are found by descent and, where their
parent is gone, by a mark in the environment that they inherited; so a rank that outlives its agent
is found too. Things that are on their way out get ``PATIENCE_S`` to go.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

PATIENCE_S = 5.0
MARK = "LEAK_POLICE_MARK"
_SHM = Path("/dev/shm")
# pytest itself sets the first; torch's compiler the second, when FSDP is first used.
_FREE_VARIABLES = frozenset({"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"})


_strangers: dict[str, set[int]] = {}
"""By mark, processes that were nobody's of ours at the last look: they do not become it, and there
are two looks a test on a machine that may have many."""


def processes(mark: str) -> set[psutil.Process]:
    """Living processes below this one, or started below it with ``MARK`` set to ``mark``."""
    there = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}
    strangers = _strangers.get(mark, set()) & there
    wanted = f"{MARK}={mark}".encode()
    found = set()
    known = set(strangers)
    for pid in there - strangers:
        with contextlib.suppress(OSError, psutil.Error):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if _below(pid, known) or (mark and wanted in environment.split(b"\0")):
                found.add(psutil.Process(pid))
            elif environment:  # it has none for a moment while it begins another program
                strangers.add(pid)
    _strangers[mark] = strangers
    return {process for process in found if _lives(process)}


def _below(pid: int, strangers: set[int]) -> bool:
    """Whether ``pid`` is a descendant of this process; no stranger is an ancestor of one."""
    while pid > 1 and pid not in strangers:
        if pid == os.getpid():
            return True
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        pid = int(state.rpartition(")")[2].split()[1])
    return False


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def describe(process: psutil.Process) -> str:
    """One line about a process."""
    with contextlib.suppress(psutil.Error):
        return f"process {process.pid} ({' '.join(process.cmdline())[:120]})"
    return f"process {process.pid}"


def descriptors() -> dict[int, str]:
    """Open descriptors of this process and what they refer to."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        # The listing's own descriptor is closed by now.
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def mappings() -> dict[str, str]:
    """Mapped anonymous files (boards, slots) of this process, by address range."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    return {line.split(maxsplit=1)[0]: line.split()[-2] for line in lines if "/memfd:" in line}


def segments() -> set[str]:
    """Names in ``/dev/shm``."""
    return {path.name for path in _SHM.iterdir()} if _SHM.is_dir() else set()


def _held_elsewhere(names: Collection[str]) -> set[str]:
    """Which of ``names`` other processes have mapped: those are not this test's."""
    held: set[str] = set()
    if not names:
        return held
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = maps.read_text(encoding="utf-8", errors="replace")
            held |= {name for name in names if f"{_SHM}/{name}" in text}
    return held


def threads() -> set[threading.Thread]:
    """Threads that keep the interpreter alive, and keepstep's own, daemons included."""
    return {
        thread
        for thread in threading.enumerate()
        if not thread.daemon or thread.name.startswith("keepstep")
    }


def variables() -> dict[str, str]:
    """The environment, without what others set as they please."""
    return {name: value for name, value in os.environ.items() if name not in _FREE_VARIABLES}


@dataclass(frozen=True)
class Snapshot:
    """What there is at one moment."""

    mark: str
    processes: set[psutil.Process]
    threads: set[threading.Thread]
    descriptors: dict[int, str]
    mappings: dict[str, str]
    segments: set[str]
    variables: dict[str, str]

    @classmethod
    def take(cls, mark: str) -> Snapshot:
        """Look now. ``mark`` is the value of ``MARK`` that children inherit."""
        return cls(
            mark, processes(mark), threads(), descriptors(), mappings(), segments(), variables()
        )

    def leaks_since(self) -> list[str]:
        """One sentence for each thing that is there now and was not when this was taken.

        Processes that were left are killed and the environment is put back, so that one test's leak
        does not become the next one's failure.
        """
        found: list[str] = []
        left = processes(self.mark) - self.processes
        if left:
            left = set(psutil.wait_procs(left, timeout=PATIENCE_S)[1])
            found += [
                f"{describe(process)} is still running" for process in left if _lives(process)
            ]
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=PATIENCE_S)
        for thread in threads() - self.threads:
            thread.join(PATIENCE_S)
            if thread.is_alive():
                found.append(f"thread {thread.name} is still running")
        found += _patiently(self._quiet_leaks)
        found += self._put_back_variables()
        return found

    def _quiet_leaks(self) -> list[str]:
        now, mapped = descriptors(), mappings()
        found = [
            f"descriptor {number} is still open ({target})"
            for number, target in now.items()
            if self.descriptors.get(number) != target
        ]
        found += [
            f"{target} is still mapped at {address}"
            for address, target in mapped.items()
            if address not in self.mappings
        ]
        fresh = segments() - self.segments
        found += [f"{_SHM}/{name} is still there" for name in fresh - _held_elsewhere(fresh)]
        return found

    def _put_back_variables(self) -> list[str]:
        now = variables()
        changed = sorted(
            name
            for name in now.keys() | self.variables.keys()
            if now.get(name) != self.variables.get(name)
        )
        for name in changed:
            if name in self.variables:
                os.environ[name] = self.variables[name]
            else:
                del os.environ[name]
        return [f"environment variable {name} was left changed" for name in changed]


def _patiently(look: Callable[[], list[str]]) -> list[str]:
    """What ``look`` finds; garbage and what other threads are closing gets time to go first."""
    found = look()
    if not found:
        return found
    gc.collect()
    deadline = time.monotonic() + PATIENCE_S / 5
    while (found := look()) and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    return found
