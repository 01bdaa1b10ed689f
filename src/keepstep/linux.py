"""The few Linux calls that Python's standard library does not offer.

Used by agent, zygote and ranks: what it takes that no process outlives the one it belongs to.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection
from pathlib import Path

from keepstep.clock import SYSTEM

OWNER = "KEEPSTEP_RANK_PID"
"""Environment variable: the rank's process, for whatever it starts and then loses sight of."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent: int) -> None:
    """Be killed when ``parent`` ends; returns only if it still lives.

    Must be called after the fork, in the child: a fork clears the death signal, an exec keeps it.
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
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def owner(pid: int) -> int:
    """The process that ``OWNER`` names in the environment ``pid`` was started with (0: none)."""
    try:
        variables = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return 0
    head = f"{OWNER}=".encode()
    values = (entry.removeprefix(head) for entry in variables if entry.startswith(head))
    return next((int(value) for value in values if value.isdigit()), 0)


def children() -> set[int]:
    """This process's children, adopted ones too."""
    me = os.getpid()
    return {pid for pid, (parent, _) in parents().items() if parent == me}


def end_children(keep: Collection[int], limit_s: float) -> None:
    """SIGKILL all children of this process but ``keep``, and what they started, and reap them.

    A subreaper gets the orphans of those that it kills: they are ended too. Gives up after
    ``limit_s`` seconds (a process may be stuck in the kernel).
    """
    deadline = SYSTEM.mono() + limit_s
    while (mine := children() - set(keep)) and SYSTEM.mono() < deadline:
        for pid in mine:
            kill_tree(pid)
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue  # somebody else reaped it
        SYSTEM.sleep(0.005)
