"""strace: records the system calls of a process, and strikes at one of them.

strace counts calls for each thread and each call's name. A point is therefore (name, n): the first
thread that is about to make its n-th call of that name is struck. ``Point.hit`` finds in the log
which call that was.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

STORAGE = "%file,%desc,sendto,sendmsg"
"""Calls that can change or see what is on storage, or tell another process."""
ALL = "all"
_LIMIT_S = 60.0
_LINE = re.compile(r"^(?:(\d+)\s+)?(\w+)\((.*)$")
_TEMPORARY = re.compile(r"\.\d+-[0-9a-f]{8}\.tmp")


@dataclass(frozen=True)
class Call:
    """One call: ``ordinal`` counts those of its name in its thread, from 1.

    ``paths`` are those below the folder of the test, without what differs from run to run.
    ``repeat`` counts the earlier calls of its name with the same paths, other threads' included.
    """

    thread: int
    name: str
    ordinal: int
    paths: tuple[str, ...]
    repeat: int

    @property
    def place(self) -> tuple[str, tuple[str, ...], int]:
        """What it is in any run, whichever thread makes it."""
        return (self.name, self.paths, self.repeat)


@dataclass(frozen=True)
class Point:
    """Strike at the ``ordinal``-th call of ``name`` in a thread."""

    name: str
    ordinal: int

    def kill(self) -> str:
        """strace's option that ends the process before the call."""
        return f"inject={self.name}:signal=SIGKILL:when={self.ordinal}"

    def fail(self, error: str) -> str:
        """strace's option that has the call fail, without being made, with ``error``."""
        return f"inject={self.name}:error={error}:when={self.ordinal}"

    def hit(self, calls: Iterable[Call]) -> Call | None:
        """The call that was struck, None if the process never came so far."""
        found = (c for c in calls if (c.name, c.ordinal) == (self.name, self.ordinal))
        return next(found, None)


class Strace:
    """Traces a running process until it ends or ``detach``.

    Args:
        pid: A process, or with ``follow`` False one thread.
        log: Where strace writes.
        trace: Which calls: an argument of its ``-e trace=``.
        strike: From ``Point``; empty: only record.
        follow: All threads of the process, and the processes that it starts.
    """

    def __init__(
        self, pid: int, log: Path, *, trace: str = STORAGE, strike: str = "", follow: bool = True
    ) -> None:
        self._log = log
        options = ["-f"] if follow else []
        options += ["-e", strike] if strike else []
        words = ["strace", "-y", "-s", "0", "-o", str(log), "-e", f"trace={trace}"]
        self._process = subprocess.Popen(
            [*words, *options, "-p", str(pid)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        assert "attached" in line, line + self._process.stderr.read()

    def detach(self) -> None:
        """Leave what is traced alone from now on; it may have ended already."""
        self._process.send_signal(signal.SIGINT)  # nothing happens if it has ended
        self.wait()

    def wait(self) -> None:
        """Return when all that is traced has ended."""
        with self._process:
            self._process.wait(_LIMIT_S)

    def calls(self, root: Path, apart: int = 0) -> list[Call]:
        """The calls made so far, in order. Arguments as ``parse``."""
        return parse(self._log.read_text(encoding="utf-8", errors="replace"), root, apart)


def parse(log: str, root: Path, apart: int = 0) -> list[Call]:
    """The calls in what strace wrote, in the order in which they were begun.

    Args:
        log: What strace wrote.
        root: The folder of the test.
        apart: Id of a thread that makes no difference to the ``repeat`` of the others.
    """
    below = re.compile(re.escape(str(root)) + r"/?([^\"> ]*)")
    counts: Counter[tuple[int, str]] = Counter()
    repeats: Counter[tuple[str, tuple[str, ...], bool]] = Counter()
    calls: list[Call] = []
    for line in log.splitlines():
        match = _LINE.match(line)
        if match is None:  # the end of a call that was begun before, or of a process
            continue
        thread, name = int(match[1] or 0), match[2]
        # A path may be an argument and again the name of the descriptor that is returned.
        paths = tuple(
            dict.fromkeys(_TEMPORARY.sub(".tmp", path) for path in below.findall(match[3]))
        )
        counts[thread, name] += 1
        key = (name, paths, thread == apart)
        calls.append(Call(thread, name, counts[thread, name], paths, repeats[key]))
        repeats[key] += 1
    return calls


def points(calls: Sequence[Call], *, on_storage: bool = False) -> list[Point]:
    """All points at which a process that makes ``calls`` can be struck.

    Args:
        calls: Of an undisturbed run.
        on_storage: Only where a call is struck that names something below the test's folder.
    """
    found = {Point(call.name, call.ordinal) for call in calls if call.paths or not on_storage}
    return sorted(found, key=lambda point: (point.name, point.ordinal))
