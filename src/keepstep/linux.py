"""The few Linux calls that Python's standard library does not offer.

Used by agent, zygote and ranks: what it takes that no process outlives the one it belongs to.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from keepstep.clock import SYSTEM

OWNER = "KEEPSTEP_RANK_PID"
"""Environment variable: the rank's process, for whatever it starts and then loses sight of."""
_TRACKER_S = 2.0
"""How long a resource tracker may take to clean up after the processes that it served."""
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
    led = {other for other, (_, session) in table.items() if session == pid and other != pid}
    _kill({pid} | {other for other in led if not is_tracker(other)}, table)


def _kill(doomed: set[int], table: dict[int, tuple[int, int]]) -> None:
    """SIGKILL ``doomed`` and their descendants in ``table``, but for resource trackers among those.

    Python's tracker removes what its process left in /dev/shm (semaphores, shared memory), and ends
    by itself once all who use it are gone.
    """
    asked = set(doomed)
    grew = True
    while grew:
        more = {other for other, (parent, _) in table.items() if parent in doomed} - doomed
        doomed |= more
        grew = bool(more)
    for victim in doomed:
        if victim in asked or not is_tracker(victim):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)


def is_tracker(pid: int) -> bool:
    """Whether ``pid`` is a resource tracker of Python's multiprocessing."""
    try:
        return (
            b"multiprocessing.resource_tracker" in Path("/proc", str(pid), "cmdline").read_bytes()
        )
    except OSError:
        return False


def end_owned(pid: int) -> None:
    """SIGKILL what a rank that has ended left behind: the session that it led, and processes whose
    environment names it as their ``OWNER``; with their descendants."""
    table = parents()
    left = {other for other, (_, session) in table.items() if session == pid or owner(other) == pid}
    left = {other for other in left if not is_tracker(other)}
    _kill(left - {pid}, table)


def end_older(variables: Mapping[str, str], uptime_s: float) -> None:
    """SIGKILL processes that were started with ``variables`` before ``uptime_s``, with their
    descendants, but for resource trackers.

    This also finds what was forked off and left its session: such a process shows the environment
    that the program it was forked from was started with.
    """
    table = parents()
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    found = {pid for pid in table if wanted <= _environ(pid) and _started(pid) < uptime_s}
    _kill({pid for pid in found if not is_tracker(pid)} - {os.getpid()}, table)


def uptime() -> float:
    """Seconds since the machine started, as ``end_older`` takes them."""
    return float(Path("/proc/uptime").read_text().split()[0])


def started_with(pid: int, name: str) -> str:
    """The value of a variable in the environment that ``pid`` was started with; empty: none."""
    head = f"{name}=".encode()
    found = (entry.removeprefix(head) for entry in _environ(pid) if entry.startswith(head))
    return next((value.decode(errors="replace") for value in found), "")


def _environ(pid: int) -> set[bytes]:
    try:
        return set(Path("/proc", str(pid), "environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the third on; empty if the process is gone."""
    return _stat_of(Path("/proc", str(pid)))


def _stat_of(folder: Path) -> list[bytes]:
    try:
        stat = (folder / "stat").read_bytes()
    except OSError:
        return []
    return stat[stat.rindex(b")") + 2 :].split()


def _started(pid: int) -> float:
    """Uptime in seconds at which ``pid`` was started; infinite if it is gone."""
    fields = _stat(pid)
    return int(fields[19]) / os.sysconf("SC_CLK_TCK") if fields else float("inf")


def started_ticks(pid: int) -> int:
    """When ``pid`` was started, in ticks since the machine's start; 0 if it has ended.

    Tells a process from a later one that has the same number.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in (b"Z", b"X") else 0


def state(pid: int) -> str:
    """What ``pid`` does: D if one of its threads is blocked in the kernel, else the main thread's
    letter in /proc (R, S, T, Z); empty if it is gone."""
    threads = Path("/proc", str(pid), "task").glob("*")
    if any(_stat_of(thread)[:1] == [b"D"] for thread in threads):
        return "D"
    return b"".join(_stat(pid)[:1]).decode()


def written(pid: int) -> int:
    """Bytes that ``pid`` has given to storage so far; -1 where that cannot be seen."""
    try:
        text = Path("/proc", str(pid), "io").read_text()
    except OSError:
        return -1
    lines = dict(line.split(": ") for line in text.splitlines())
    return int(lines.get("write_bytes", -1))


def exit_code(pid: int) -> int | None:
    """How the process ended (-N: by signal N), read while its parent has not waited for it yet.

    None if it lives or if nothing is left of it.
    """
    fields = _stat(pid)
    if not fields or fields[0] != b"Z":
        return None
    return os.waitstatus_to_exitcode(int(fields[49]))


def owner(pid: int) -> int:
    """The process that ``OWNER`` names in the environment ``pid`` was started with (0: none)."""
    value = started_with(pid, OWNER)
    return int(value) if value.isdecimal() else 0


def mapped(pid: int, name: str) -> set[int]:
    """Inodes of the anonymous files called ``name`` (memfd) that ``pid`` has mapped."""
    try:
        lines = Path("/proc", str(pid), "maps").read_text().splitlines()
    except OSError:
        return set()
    return {int(line.split()[4]) for line in lines if f"/memfd:{name} " in f"{line} "}


def ending(pid: int) -> bool:
    """Whether ``pid`` has given back its memory: it is on its way out, or gone."""
    try:
        return not Path("/proc", str(pid), "maps").read_bytes()
    except OSError:
        return True


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
    patient = SYSTEM.mono() + min(limit_s, _TRACKER_S)
    while (mine := children() - set(keep)) and SYSTEM.mono() < deadline:
        for pid in mine:
            if SYSTEM.mono() >= patient or not is_tracker(pid):
                kill_tree(pid)
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue  # somebody else reaped it
        SYSTEM.sleep(0.005)


# --- memory ---------------------------------------------------------------------------------------

_POPULATE_WRITE = 23
_CHUNK = 16 << 20


def populate(buffer: mmap.mmap, fd: int, stopped: Callable[[], bool] = lambda: False) -> bool:
    """Give every page of ``buffer`` its memory now, so that nobody waits for that later.

    It takes about as long as writing all of it. Other threads run meanwhile. Contents are lost
    where the kernel is older than 5.14.

    Args:
        buffer: Shared memory, mapped writable. fd: its descriptor.
        stopped: Asked every 16 MiB; once it says yes, the rest is left as it is.

    Returns:
        Whether all of it was done.

    Raises:
        OSError: there is no memory left.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    held = ctypes.c_char.from_buffer(buffer)  # while it lives the mapping cannot be closed
    address, size = ctypes.addressof(held), len(buffer)
    for at in range(0, size, _CHUNK):
        if stopped():
            return False
        length = min(_CHUNK, size - at)
        if libc.madvise(address + at, length, _POPULATE_WRITE) == 0:
            continue
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(number, os.strerror(number))
        os.posix_fallocate(fd, at, length)  # an error here, where touching would be a signal
        ctypes.memset(address + at, 0, length)
    return True
