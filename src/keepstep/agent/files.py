"""Event files of a node: a thread drains the ranks' rings and the agent's own events.

Storage may be slow, frozen or full; then events wait here and neither the agent nor a rank does.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import BinaryIO

from keepstep.shm import Board

_INTERVAL_S = 0.05
_MOST_WAITING = 64 << 20


class _Sink:
    """One file; what it does not take now is tried again with the next write.

    It is opened by the first write, so on the thread that may wait for storage.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._waiting = bytearray()

    def write(self, lines: list[bytes]) -> None:
        """Append whole lines; with too many waiting, new ones are dropped."""
        if len(self._waiting) < _MOST_WAITING:
            self._waiting += b"".join(lines)
        try:
            if self._file is None and self._waiting:
                self._file = self._path.open("ab", buffering=0)
            while self._waiting and self._file is not None:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError:
            return  # a full disk must not end a run; the numbers of the events show the gap

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def close(self) -> None:
        """Close; what the file never took is lost."""
        if self._file is not None:
            self._file.close()


class EventFiles:
    """Writes ``events/*.jsonl`` of one node.

    Args:
        folder: The run's ``events`` folder. own: name of the agent's own file.
    """

    def __init__(self, folder: Path, own: str) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._boards: dict[Board, _Sink] = {}
        self._ended: list[Board] = []
        self._named: dict[str, _Sink] = {}
        self._given: dict[str, list[bytes]] = {}
        self._finished: list[str] = []
        self._own = _Sink(folder / own)
        self._lines: list[bytes] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keepstep-events", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Append to the agent's own file; never blocks."""
        with self._lock:
            self._lines.append(line)

    def add(self, board: Board, name: str) -> None:
        """Drain ``board`` into the file ``name`` from now on."""
        sink = _Sink(self._folder / name)
        with self._lock:
            self._boards[board] = sink

    def end(self, board: Board) -> None:
        """The rank is gone: drain what is left, then close its file and the board."""
        with self._lock:
            self._ended.append(board)

    def append(self, name: str, lines: list[bytes]) -> None:
        """Append ``lines`` to the file ``name``, for who drains boards himself; never blocks."""
        with self._lock:
            self._given.setdefault(name, []).extend(lines)

    def finish(self, name: str) -> None:
        """Nothing more comes for the file ``name``."""
        with self._lock:
            self._finished.append(name)

    def close(self) -> None:
        """Write everything that is left."""
        self._stop.set()
        self._thread.join(timeout=10.0)
        if not self._thread.is_alive():
            self._drain()
            self._own.close()
            for sink in (*self._boards.values(), *self._named.values()):
                sink.close()

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._drain()

    def _drain(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
            boards = dict(self._boards)
            ended, self._ended = self._ended, []
            given, self._given = self._given, {}
            finished, self._finished = self._finished, []
        self._own.write(lines)
        for board, sink in boards.items():
            sink.write(board.take_lines())
        for name in given:
            self._named.setdefault(name, _Sink(self._folder / name))
        for name, sink in self._named.items():
            sink.write(given.get(name, []))
        self._finish(finished)
        for board in ended:
            with self._lock:
                ended_sink = self._boards.pop(board, None)
            if ended_sink is not None:
                ended_sink.close()
            board.close()

    def _finish(self, names: list[str]) -> None:
        for name in names:
            sink = self._named.get(name)
            if sink is not None and sink.empty:
                sink.close()
                del self._named[name]
            elif sink is not None:  # storage took nothing yet
                with self._lock:
                    self._finished.append(name)
