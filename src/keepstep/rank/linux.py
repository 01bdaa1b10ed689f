"""The few Linux calls that Python's standard library does not offer. Used by zygote and ranks."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent: int) -> None:
    """Be killed when ``parent`` ends; returns only if it still lives.

    Must be called after the fork, in the child. The death signal is cleared by fork and kept by exec.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of process 1."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def parents() -> dict[int, tuple[int, int]]:
    """Every process of the machine: pid -> (parent's pid, session id)."""
    table: dict[int, tuple[int, int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path("/proc", name, "stat").read_bytes()
        except OSError:
            continue  # it ended meanwhile
        fields = stat[stat.rindex(b")") + 2 :].split()
        table[int(name)] = (int(fields[1]), int(fields[3]))
    return table


def kill_tree(pid: int) -> None:
    """SIGKILL ``pid``, its descendants and every process of the session it leads."""
    table = parents()
    doomed = {pid} | {other for other, (_, session) in table.items() if session == pid}
    grew = True
    while grew:
        more = {other for other, (parent, _) in table.items() if parent in doomed} - doomed
        doomed |= more
        grew = bool(more)
    for victim in doomed:
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            pass
