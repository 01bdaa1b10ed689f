"""Appends lines to event files; a process of its own that ``files.EventFiles`` starts.

Frozen storage blocks whoever touches it and cannot be interrupted: a process with such a thread
cannot end. So the agent touches no event file, and leaves this process behind if it must. It uses
the standard library alone, and starts in a few milliseconds.

On standard input come frames: lengths of a name and of data (``HEAD``), then both. The data is to
be appended to the file of that name in the folder given; without data the file is finished. At the
end of the input it writes what it can and ends.
"""

from __future__ import annotations

import signal
import struct
import sys
import threading
from pathlib import Path
from typing import BinaryIO

HEAD = struct.Struct("<HI")
MOST_WAITING = 64 << 20
"""Bytes of a file that may wait; with more, new lines are dropped."""
_AGAIN_S = 0.05


class Sink:
    """One file; what it does not take now is tried again with the next write.

    It is opened by the first write. Only ``give`` and ``finish`` may be called by another thread.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._given: list[bytes] = []
        self._waiting = bytearray()
        self.finished = False

    def give(self, data: bytes) -> None:
        """Append ``data`` later."""
        if len(self._waiting) + sum(map(len, self._given)) < MOST_WAITING:
            self._given.append(data)
        self.finished = False

    def finish(self) -> None:
        """Nothing more comes, as far as is known."""
        self.finished = True

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting and not self._given

    def write(self) -> None:
        """Write what waits, as far as storage takes it."""
        while self._given:
            self._waiting += self._given.pop(0)
        try:
            if self._file is None and self._waiting:
                self._file = self._path.open("ab", buffering=0)
            while self._waiting and self._file is not None:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError:
            return  # a full disk must not end a run; the numbers of the events show the gap

    def close(self) -> None:
        """Close the file, unless something waits."""
        if self._file is not None and self.empty:
            self._file.close()
            self._file = None


class Writer:
    """Reads frames from ``source`` in this thread while another one writes below ``folder``."""

    def __init__(self, folder: Path, source: BinaryIO) -> None:
        self._folder = folder
        self._source = source
        self._sinks: dict[str, Sink] = {}
        self._changed = threading.Event()
        self._over = False

    def run(self) -> None:
        """Serve until the input ends."""
        thread = threading.Thread(target=self._write_all, name="write")
        thread.start()
        while head := self._read(HEAD.size):
            name_size, size = HEAD.unpack(head)
            name = self._read(name_size).decode()
            sink = self._sinks.get(name)
            if sink is None:
                sink = Sink(self._folder / name)
                self._sinks[name] = sink
            if size:
                sink.give(self._read(size))
            else:
                sink.finish()
            self._changed.set()
        self._over = True
        self._changed.set()
        thread.join()

    def _read(self, size: int) -> bytes:
        data = self._source.read(size)
        return data if len(data) == size else b""

    def _write_all(self) -> None:
        while not self._over:
            waits = any(not sink.empty for sink in list(self._sinks.values()))
            self._changed.wait(_AGAIN_S if waits else None)
            self._changed.clear()
            self._write()
        self._write()

    def _write(self) -> None:
        for sink in list(self._sinks.values()):
            sink.write()
            if sink.finished:
                sink.close()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Writer(Path(sys.argv[1]), sys.stdin.buffer).run()
