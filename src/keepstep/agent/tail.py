"""Ranks' output on the agent's terminal: reads the log files as they grow.

A rank that writes faster than a terminal takes it must not hold up the agent: each look shows a
bounded part, and what is left when the rank has ended is cut to its last part. The log files hold
all of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 16
_LAST = 1 << 20


@dataclass(slots=True)
class _Tail:
    file: BinaryIO
    path: Path
    prefix: str
    stream: int
    rest: bytes = b""


class Tails:
    """Follows log files and shows complete lines with the rank in front.

    Args:
        show: Gets (stream, text): stream 1 is stdout, 2 is stderr.
    """

    def __init__(self, show: Callable[[int, str], None]) -> None:
        self._show = show
        self._tails: dict[tuple[int, int], _Tail] = {}

    def add(self, ticket: int, stream: int, path: Path, prefix: str, start: int = 0) -> None:
        """Follow ``path`` from byte ``start``."""
        file = path.open("rb", buffering=0)
        file.seek(start)
        self._tails[ticket, stream] = _Tail(file, path, prefix, stream)

    def poll(self) -> None:
        """Show what was added since the last call, at most a chunk of each file."""
        for tail in self._tails.values():
            self._read(tail)

    def end(self, ticket: int) -> None:
        """The process is gone: show the rest, a last line without end too."""
        for key in [key for key in self._tails if key[0] == ticket]:
            tail = self._tails.pop(key)
            self._leave_out(tail)
            while self._read(tail):
                pass
            if tail.rest:
                self._show_lines(tail, [tail.rest])
            tail.file.close()

    def _read(self, tail: _Tail) -> bool:
        data = tail.file.read(_CHUNK)
        *lines, tail.rest = (tail.rest + data).split(b"\n")
        self._show_lines(tail, lines)
        return bool(data)

    def _leave_out(self, tail: _Tail) -> None:
        """Pass over what is too much to show."""
        at, end = tail.file.tell(), os.fstat(tail.file.fileno()).st_size
        if end - at <= _LAST:
            return
        tail.file.seek(end - _LAST)
        skipped = tail.file.read(_CHUNK).partition(b"\n")
        left_out = end - _LAST - at + len(skipped[0] + skipped[1]) + len(tail.rest)
        tail.rest = skipped[2]
        note = f"... {left_out} bytes are left out here; all of it is in {tail.path}"
        self._show_lines(tail, [note.encode()])

    def _show_lines(self, tail: _Tail, lines: list[bytes]) -> None:
        if lines:
            texts = (tail.prefix + line.decode(errors="replace") for line in lines)
            self._show(tail.stream, "\n".join(texts))
