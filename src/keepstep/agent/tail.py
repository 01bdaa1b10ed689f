"""Ranks' output on the agent's terminal: reads the log files as they grow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 16


@dataclass(slots=True)
class _Tail:
    file: BinaryIO
    prefix: str
    stream: int
    rest: bytes = b""
    path: Path = field(default_factory=Path)


class Tails:
    """Follows log files and shows complete lines with the rank in front.

    Args:
        show: Gets (stream, text): stream 1 is stdout, 2 is stderr.
    """

    def __init__(self, show: Callable[[int, str], None]) -> None:
        self._show = show
        self._tails: dict[tuple[int, int], _Tail] = {}

    def add(self, ticket: int, stream: int, path: Path, prefix: str) -> None:
        """Follow ``path`` from its start."""
        self._tails[ticket, stream] = _Tail(path.open("rb", buffering=0), prefix, stream)

    def poll(self) -> None:
        """Show what was added since the last call."""
        for tail in self._tails.values():
            self._read(tail)

    def end(self, ticket: int) -> None:
        """The process is gone: show the rest, a last line without end too."""
        for key in [key for key in self._tails if key[0] == ticket]:
            tail = self._tails.pop(key)
            self._read(tail)
            if tail.rest:
                self._show(tail.stream, f"{tail.prefix}{tail.rest.decode(errors='replace')}")
            tail.file.close()

    def _read(self, tail: _Tail) -> None:
        while data := tail.file.read(_CHUNK):
            *lines, tail.rest = (tail.rest + data).split(b"\n")
            for line in lines:
                self._show(tail.stream, f"{tail.prefix}{line.decode(errors='replace')}")
