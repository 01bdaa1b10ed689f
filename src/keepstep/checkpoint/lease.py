"""Who may save into a folder of checkpoints: one job at a time.

A lease is a numbered file, ``leases/00000007.json`` in the folder; the highest number holds it. Its
holder rewrites a counter in it now and then. Another job takes the folder over by creating the next
number, which only one can: at once where the holder has let go or is a dead process of this
machine, else only after the counter stood still for a while. A holder that meets a number above its
own has lost the folder: what it saves is not committed any more (``check``).

The decisions (``Taker``, ``claiming``) know no files; ``LeaseFiles`` makes none. Used by the lease
process, and by whoever commits.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from keepstep import linux
from keepstep.checkpoint import layout
from keepstep.errors import FolderInUse, SaveFailed

FOLDER = "leases"
EXPIRY_S = 60.0
"""A holder of another machine that shows no sign of life for so long is taken for dead."""
BEAT_S = 5.0
"""How often a holder shows that it lives."""
POLL_S = 1.0
"""How often a taker looks."""
_KEPT = 8
"""Old numbers that are left for people to see."""
_SIZE = 1024
"""Bytes of a lease's file: rewritten in place, so it needs no space on a full disk."""
_NAME = re.compile(r"([0-9]{8,18})\.json")

Verdict = Literal["take", "wait", "refuse"]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A holder: its run, machine and process. ``since`` is wall time in seconds.

    ``boot`` and ``pids`` name the kernel's start and the namespace that ``pid`` belongs to;
    ``started`` tells the process from a later one of the same number. ``beat`` counts renewals.
    """

    run: str
    host: str
    boot: str
    pids: str
    pid: int
    started: int
    since: float
    beat: int = 0
    released: bool = False

    def same_process(self, other: Lease) -> bool:
        """Whether both were claimed by one process."""
        return self._process == other._process

    @property
    def _process(self) -> tuple[str, str, int, int]:
        return (self.boot, self.pids, self.pid, self.started)


@dataclass(frozen=True, slots=True)
class Seen:
    """The highest lease of a folder; ``lease`` is None where it cannot be read."""

    number: int
    lease: Lease | None


class Store(Protocol):
    """Where leases are kept."""

    def newest(self) -> Seen | None:
        """The highest one, None if there is none."""

    def create(self, number: int, lease: Lease) -> bool:
        """Make a new one; False if this number is there already."""

    def write(self, number: int, lease: Lease) -> None:
        """Rewrite an own one."""


class Taker:
    """Decides whether ``me`` may take a folder, from one look at it after the other. Pure.

    Args:
        me: Who asks. relieves: whether a holder of the same run on another machine is no conflict,
            because the run itself keeps its starts apart (terms).
        lives: Whether the process of a lease lives; None where this machine cannot tell.
        expiry_s: How long a holder may show no sign of life. poll_s: how often ``saw`` is called.
    """

    def __init__(
        self,
        me: Lease,
        *,
        relieves: bool,
        lives: Callable[[Lease], bool | None],
        expiry_s: float = EXPIRY_S,
        poll_s: float = POLL_S,
    ) -> None:
        self._me = me
        self._relieves = relieves
        self._lives = lives
        self._expiry_s = expiry_s
        self._longest_s = 2 * poll_s
        self._last: Seen | None = None
        self._last_at = 0.0
        self._silent_s = 0.0

    def saw(self, seen: Seen | None, now: float) -> Verdict:
        """What a look at ``now`` (seconds, never going back) means."""
        last, self._last = self._last, seen
        elapsed, self._last_at = now - self._last_at, now
        if seen is None:
            return "take"
        watched = last is not None and last.number == seen.number
        # While storage did not answer, a holder could not show anything either.
        self._silent_s = self._silent_s + min(elapsed, self._longest_s) if last == seen else 0.0
        expired = self._silent_s >= self._expiry_s
        lease = seen.lease
        if lease is None:
            return "take" if expired else "wait"
        lives = self._lives(lease)
        if lease.released or lives is False or lease.same_process(self._me):
            return "take"
        if lives:
            return "refuse"
        if self._relieves and lease.run == self._me.run:
            return "take"
        if watched and last != seen:
            return "refuse"
        return "take" if expired else "wait"


def claiming(
    store: Store, taker: Taker, me: Lease, mono: Callable[[], float], poll_s: float = POLL_S
) -> Generator[float, None, int]:
    """Claim a folder: a step at a time, so that two claims can be run against each other.

    Yields:
        Seconds to sleep before the next step (0: none).

    Returns:
        The number of the lease that is held now.

    Raises:
        FolderInUse: another job, alive, has it.
        OSError: storage failed.
    """
    while True:
        seen = store.newest()
        verdict = taker.saw(seen, mono())
        yield 0.0
        if verdict == "refuse":
            assert seen is not None and seen.lease is not None
            raise in_use(seen.lease, me.since)
        if verdict == "wait":
            yield poll_s
            continue
        number = 1 if seen is None else seen.number + 1
        if store.create(number, me):
            yield 0.0
            # Of numbers so old that they were removed, one could be made a second time.
            highest = store.newest()
            if highest is not None and highest.number == number:
                return number
        yield 0.0


def in_use(holder: Lease, wall: float) -> FolderInUse:
    """The error for a folder that ``holder`` has; ``wall`` is the present time in seconds."""
    run = f"run {holder.run}" if holder.run else "a run without an id"
    age = max(0.0, wall - holder.since)
    return FolderInUse(
        f"another job saves into the checkpoint folder: {run}, process {holder.pid} on "
        f"{holder.host}, for {age:.0f} s",
        done="nothing was started and nothing was changed",
        advice="wait for it or end it, or give this job another folder (checkpoint.dir)",
    )


def check(root: Path, number: int) -> None:
    """Make sure, before a commit, that ``root`` was not taken over; ``number`` 0 checks nothing.

    Raises:
        SaveFailed: a higher lease than ``number`` is there.
        OSError: storage failed.
    """
    highest = LeaseFiles(root).newest() if number else None
    if highest is None or highest.number <= number:
        return
    by = "another job"
    if highest.lease is not None:
        by = f"run {highest.lease.run or 'without an id'} on {highest.lease.host}"
    raise SaveFailed(
        f"the checkpoint folder was taken over by {by} (lease {highest.number}, ours is {number})",
        where=str(root),
        done="nothing was committed",
        advice="two jobs must not share a folder: end one of them, or give it another folder",
    )


class LeaseFiles:
    """Implements ``Store`` below ``root``, the folder of the checkpoints.

    Every method raises OSError where storage fails.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / FOLDER

    def numbers(self) -> list[int]:
        """All numbers there are, in order."""
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        found = (_NAME.fullmatch(name) for name in names)
        return sorted(int(match.group(1)) for match in found if match)

    def newest(self) -> Seen | None:
        """The highest lease, None if there is none."""
        numbers = self.numbers()
        return Seen(numbers[-1], self.read(numbers[-1])) if numbers else None

    def read(self, number: int) -> Lease | None:
        """Lease ``number``; None where it is not there or damaged."""
        try:
            return msgspec.json.decode(layout.read(self._path(number)), type=Lease)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def create(self, number: int, lease: Lease) -> bool:
        """Make lease ``number``; False if it is there already. Removes very old ones."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            layout.publish(self._path(number), _text(lease))
        except FileExistsError:
            return False
        for old in self.numbers():
            if old < number - _KEPT:
                with contextlib.suppress(OSError):  # only for people to see
                    self._path(old).unlink()
        return True

    def write(self, number: int, lease: Lease) -> None:
        """Rewrite lease ``number`` in place; a reader sees the old or the new text."""
        fd = os.open(self._path(number), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, _text(lease), 0)
        finally:
            os.close(fd)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.json"


def _text(lease: Lease) -> bytes:
    text = msgspec.json.encode(lease)
    return text.ljust(_SIZE - 1) + b"\n"


def of_process(run: str, pid: int, wall: float) -> Lease:
    """The lease of process ``pid`` of this machine, claimed at ``wall``; ``run`` may be empty."""
    boot, pids = _machine()
    return Lease(
        run=run[:100],
        host=os.uname().nodename,
        boot=boot,
        pids=pids,
        pid=pid,
        started=linux.started_ticks(pid),
        since=wall,
    )


def lives(lease: Lease) -> bool | None:
    """Whether the process of ``lease`` lives; None where it is of another machine or container."""
    if not lease.boot or (lease.boot, lease.pids) != _machine():
        return None
    return lease.started == linux.started_ticks(lease.pid) != 0


def _machine() -> tuple[str, str]:
    """This start of the kernel, and the namespace of process ids; empty where unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""
