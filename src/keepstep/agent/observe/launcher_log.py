"""What the launcher itself says: followed for exit codes that only it saw, and shown when it fails.

Part of the observer's one thread.
"""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import BinaryIO

from keepstep.agent.environment import node_suffix
from keepstep.agent.launch_spec import Launch

SHOWN = 40
"""How many of its last lines are shown when it fails without an explanation."""
_CHUNK = 1 << 16
_ENDED = re.compile(rb"\(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
_UNHEALTHY = b"UnhealthyNodeException"


def launcher_log(spec: Launch) -> Path:
    """Where the output of this node's launcher goes."""
    return spec.log_dir / f"launcher{node_suffix(spec)}.log"


class LauncherLog:
    """Reads the log as it grows.

    Args:
        path: Where the launcher's output goes; what an earlier launch left there is passed over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = path.stat().st_size if path.exists() else 0
        self._file: BinaryIO | None = None
        self._rest = b""
        self._last: deque[bytes] = deque(maxlen=SHOWN)
        self.codes: dict[int, int] = {}
        """Exit codes that torch's launcher named, by process."""
        self.unhealthy = False
        """Whether the launcher called its node unhealthy."""

    def poll(self, *, whole: bool = False) -> None:
        """Read a bounded part of what was added, or with ``whole`` all of it."""
        if self._file is None:
            try:
                self._file = self.path.open("rb", buffering=0)
            except OSError:
                return
            self._file.seek(self._start)
        while data := self._file.read(_CHUNK):
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take(line)
            if not whole:
                return

    def _take(self, line: bytes) -> None:
        self._last.append(line)
        self.unhealthy = self.unhealthy or _UNHEALTHY in line
        for code, pid in _ENDED.findall(line):
            self.codes[int(pid)] = int(code)

    @property
    def last_lines(self) -> list[str]:
        """The newest lines, the oldest first."""
        lines = [*self._last, self._rest] if self._rest else [*self._last]
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> None:
        """Read no more."""
        if self._file is not None:
            self._file.close()
            self._file = None
