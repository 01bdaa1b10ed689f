"""How much memory is left for a process, and whether the staging of saves fits into it.

Used by the agent and by ranks of plain scripts. Reading and arithmetic only: whoever asks decides
with the answer. Staging is anonymous shared memory: it counts against the machine and against every
memory cgroup above the process, and against no limit of /dev/shm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from keepstep.errors import NotEnoughMemory

_NO_LIMIT = 1 << 60
"""cgroup v1 says so for no limit, more or less."""
_KEPT_FREE = 64
"""This part of a limit (one in so many) is never planned with."""
_UNESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Room:
    """``available`` bytes of ``limit`` can still be used in ``where``, the tightest place."""

    available: int
    limit: int
    where: str


class _Names(NamedTuple):
    """Files of a memory cgroup, and the entries of its statistics that the kernel can drop."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]


_VERSION_1 = _Names(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_VERSION_2 = _Names(
    ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")
)


# --- what is there --------------------------------------------------------------------------------


def room(root: Path = Path("/")) -> Room:
    """What is left for this process: the least of the machine and the memory cgroups above it.

    A cgroup has its limit less its usage, and the file cache in it that the kernel drops before it
    ends anybody. Swap does not count. ``root`` is ``/`` but in tests.
    """
    places = [_machine(root), *_groups(root)]
    return min(places, key=lambda place: place.available)


def _machine(root: Path) -> Room:
    try:
        text = (root / "proc/meminfo").read_text()
    except OSError:
        return Room(_NO_LIMIT, _NO_LIMIT, "the machine's memory")
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+): +(\d+) kB$", text, re.M)}
    total = sizes.get("MemTotal", _NO_LIMIT)
    return Room(sizes.get("MemAvailable", total), total, "the machine's memory")


def _groups(root: Path) -> Iterator[Room]:
    for folder, names in _folders(root):
        limits = [_number(folder / name) for name in names.limits]
        usage = _number(folder / names.usage)
        limit = min((one for one in limits if one is not None), default=_NO_LIMIT)
        if limit < _NO_LIMIT and usage is not None:
            cache = sum(_statistics(folder / "memory.stat", names.cache))
            left = max(0, limit - usage + min(cache, usage))
            yield Room(left, limit, f"the memory cgroup /{folder.relative_to(root)}")


def _folders(root: Path) -> Iterator[tuple[Path, _Names]]:
    """This process's memory cgroups and those above them, as far as they can be seen."""
    try:
        own = (root / "proc/self/cgroup").read_text()
    except OSError:
        return
    mounts = _mounts(root)
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        usual = ("/", "/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
        seen_from, point = mounts.get("memory" if controllers else "", usual)
        top = root / point.lstrip("/")
        # In a container the mount may show the container's own group as its root.
        base = seen_from.rstrip("/")
        inside = path[len(base) :] if path == base or path.startswith(f"{base}/") else path
        folder = top / inside.lstrip("/")
        while folder.is_relative_to(top):
            yield folder, _VERSION_1 if controllers else _VERSION_2
            folder = folder.parent


def _mounts(root: Path) -> dict[str, tuple[str, str]]:
    """(root inside the hierarchy, mount point): of v1's memory by that name, of v2 by none."""
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return {}
    found: dict[str, tuple[str, str]] = {}
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = [_UNESCAPE.sub(lambda m: chr(int(m[1], 8)), one) for one in before.split()]
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup2":
            found.setdefault("", (fields[3], fields[4]))
        elif kind == "cgroup" and "memory" in options.split(","):
            found.setdefault("memory", (fields[3], fields[4]))
    return found


def _number(path: Path) -> int | None:
    """The number in a file; None if there is none (``max`` is no limit)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isascii() and text.isdigit() else None


def _statistics(path: Path, names: tuple[str, ...]) -> Iterator[int]:
    try:
        text = path.read_text()
    except OSError:
        return
    for name in names:
        match = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
        yield int(match[1]) if match else 0


# --- whether staging fits -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wanted:
    """``slots`` copies of ``size`` bytes each, for each of ``ranks`` ranks of this node."""

    size: int
    slots: int
    ranks: int

    @property
    def bytes(self) -> int:
        """All of it together."""
        return self.size * self.slots * self.ranks


def fitting(wanted: Wanted, left: Room, promised: int = 0) -> int:
    """How many slots each rank can have: all that are wanted, else one, else none.

    Args:
        wanted: By all ranks of the node that have no slots yet.
        left: What is there.
        promised: Bytes of it that others were given and have not touched yet.
    """
    usable = left.available - left.limit // _KEPT_FREE - promised
    for slots in (wanted.slots, 1):
        if Wanted(wanted.size, slots, wanted.ranks).bytes <= usable:
            return slots
    return 0


def shortage(wanted: Wanted, left: Room, promised: int = 0) -> NotEnoughMemory:
    """The error that says in numbers why not even one slot fits."""
    one = Wanted(wanted.size, 1, wanted.ranks)
    given = f", {decimal(promised)} of that is promised to other ranks" if promised else ""
    return NotEnoughMemory(
        f"saving needs {decimal(wanted.size)} of memory for a copy of each rank's shard, "
        f"{_ranks(one)} {decimal(one.bytes)} on this node (with {wanted.slots} copies "
        f"{decimal(wanted.bytes)}), and {decimal(left.available)} are available{given}",
        where=f"{left.where}, limit {decimal(left.limit)}, of which {decimal(_kept(left))} are "
        "left free",
        done="no memory was taken and nothing was saved",
        advice="raise the container's memory limit, run fewer ranks on a node or shard over more "
        "of them, or save less",
    )


def statement(made: Wanted, asked: int, left: Room) -> str:
    """One line for people: how much memory the staging of saves takes.

    Args:
        made: What each rank has. asked: the slots that it was to have. left: before.
    """
    text = (
        f"staging of saves: {decimal(made.bytes)} of memory ({made.slots} x {decimal(made.size)}, "
        f"{_ranks(made)}), {decimal(left.available)} were available in {left.where}"
    )
    if made.slots < asked:
        text += f"; {asked} copies do not fit, so a save waits for storage to take the one before"
    return text


def _kept(left: Room) -> int:
    return left.limit // _KEPT_FREE


def _ranks(wanted: Wanted) -> str:
    return "1 rank" if wanted.ranks == 1 else f"{wanted.ranks} ranks"
