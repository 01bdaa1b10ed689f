"""A memory cgroup of its own for a rank that is to run out of memory; Linux cgroups v1 and v2.

The rank makes the group and moves in; the kernel then kills it as it would kill any process over
its limit. The agent knows the group's name, reads how many processes the kernel killed in it, and
removes it. Other processes of the node are never near their limit.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from keepstep.errors import UsageError

ROOT = Path("/")
_UNESCAPE = re.compile(r"\\([0-7]{3})")


class _Hierarchy(NamedTuple):
    """Where a group for this process can be made. ``version`` 1 or 2."""

    version: int
    folder: Path


def group_name(run: str, pid: int) -> str:
    """Name of the group of the rank with process id ``pid``: rank and agent agree on it."""
    return f"keepstep-{re.sub('[^A-Za-z0-9._-]', '_', run)}-{pid}"


def available() -> str:
    """Empty if this process can make a memory cgroup for itself, else the reason why not."""
    found = _hierarchy(ROOT)
    if isinstance(found, str):
        return found
    if not os.access(found.folder, os.W_OK):
        return f"{found.folder} is not writable for user {os.geteuid()}"
    try:
        unkillable = int((ROOT / "proc/self/oom_score_adj").read_text()) <= -1000
    except OSError:
        unkillable = False
    if unkillable:
        return "this process is exempt from the kernel's out-of-memory killer (oom_score_adj -1000)"
    return ""


class Limited:
    """A memory cgroup below this process's own, named ``name``.

    Both sides make one with the same name; only the rank calls ``create`` and ``enter``. The agent
    must be in the group that the rank was in before it entered.

    Args:
        name: From ``group_name``.
        limit_bytes: Memory that the group may use. What a process had before it entered is not
            counted.

    Raises:
        UsageError: memory cgroups cannot be used here.
    """

    def __init__(self, name: str, limit_bytes: int = 0) -> None:
        found = _hierarchy(ROOT)
        if isinstance(found, str):
            raise refusal(found)
        self.version = found.version
        self.path = found.folder / name
        self.limit_bytes = limit_bytes

    def create(self) -> None:
        """Make the group and set its limit, swap included.

        Raises:
            UsageError: the kernel does not let us.
        """
        try:
            self.path.mkdir(exist_ok=True)
            if self.version == 2:
                self._write("memory.max", self.limit_bytes)
                self._write("memory.swap.max", 0, optional=True)
            else:
                self._write("memory.limit_in_bytes", self.limit_bytes)
                self._write("memory.memsw.limit_in_bytes", self.limit_bytes, optional=True)
        except OSError as error:
            self.remove()
            raise refusal(f"{error.strerror} ({error.filename})") from error

    def enter(self, pid: int) -> None:
        """Move process ``pid`` into the group; if that fails, the group is removed again.

        Raises:
            UsageError: the kernel does not let us.
        """
        try:
            self._write("cgroup.procs", pid)
        except OSError as error:
            self.remove()
            raise refusal(f"{error.strerror} ({error.filename})") from error

    def oom_kills(self) -> int:
        """How many processes the kernel killed in the group for memory; 0 if there is no group."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        try:
            text = (self.path / name).read_text()
        except OSError:
            return 0
        counts = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
        return int(counts.get("oom_kill", 0))

    def remove(self) -> bool:
        """Remove the group; false while a process is still in it."""
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _write(self, name: str, value: int, *, optional: bool = False) -> None:
        path = self.path / name
        if optional and not path.exists():
            return
        # Without O_CREAT: on a folder that is no cgroup this must fail, not make a file.
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, str(value).encode())
        finally:
            os.close(fd)


def collect(run: str, pid: int) -> int:
    """For the agent, once the rank with ``pid`` is dead: how many kills, and remove the group.

    0 if the rank had no group of its own, or where there are no memory cgroups.
    """
    found = _hierarchy(ROOT)
    if isinstance(found, str) or not (found.folder / group_name(run, pid)).is_dir():
        return 0
    group = Limited(group_name(run, pid))
    kills = group.oom_kills()
    group.remove()
    return kills


def refusal(reason: str) -> UsageError:
    """The error that says why the fault oom cannot be injected."""
    return UsageError(
        f"the fault oom needs a memory cgroup, and there is none to be had: {reason}",
        done="Nothing was injected",
        advice="Run as root on a host whose cgroup file system is writable, or use the fault kill",
    )


def _hierarchy(root: Path) -> _Hierarchy | str:
    """Where to make a group, or why that is not possible. ``root`` is ``/`` but in tests."""
    try:
        own = _own_groups((root / "proc/self/cgroup").read_text())
        mounts = _mounts((root / "proc/self/mountinfo").read_text())
    except OSError as error:
        return f"this system has no cgroups ({error})"
    if "memory" in own and "memory" in mounts:
        folder = _folder(root, mounts["memory"], own["memory"])
        return _Hierarchy(1, folder) if folder.is_dir() else f"{folder} does not exist"
    if "" not in own or "" not in mounts:
        return "no cgroup file system with the memory controller is mounted"
    folder = _folder(root, mounts[""], own[""])
    # A v2 group with processes cannot have groups with limits below it (the root can), so the
    # group is made beside the process's own.
    beside = folder.parent if own[""] != "/" else folder
    for place in (folder, beside):
        if "memory" in _words(place / "cgroup.subtree_control"):
            return _Hierarchy(2, place)
    return f"the memory controller is not passed on below {beside} (cgroup.subtree_control)"


def _own_groups(text: str) -> dict[str, str]:
    """Path of this process's group by controller; v2 has the empty name."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _mounts(text: str) -> dict[str, tuple[str, str]]:
    """(root inside the hierarchy, mount point) by v1 controller; v2 has the empty name."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields = [_UNESCAPE.sub(lambda m: chr(int(m[1], 8)), f) for f in before.split()]
        kind, _, options = after.split(maxsplit=2)
        names = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in names:
            mounts.setdefault(name, (fields[3], fields[4]))
    return mounts


def _folder(root: Path, mount: tuple[str, str], group: str) -> Path:
    """The group's folder as seen through a mount that may show only a part of the hierarchy."""
    top, point = mount
    base = top.rstrip("/")
    inside = group[len(base) :] if group == base or group.startswith(base + "/") else group
    return root / point.lstrip("/") / inside.lstrip("/")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
