"""Event files of a node: a thread drains the ranks' rings and the agent's own events.

Storage may be slow or frozen; then events wait here and neither the agent nor a rank does.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import BinaryIO

from keepstep.shm import Board

_INTERVAL_S = 0.05


class EventFiles:
    """Writes ``events/*.jsonl`` of one node.

    Args:
        folder: The run's ``events`` folder. own: name of the agent's own file.
    """

    def __init__(self, folder: Path, own: str) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._boards: dict[Board, BinaryIO] = {}
        self._ended: list[Board] = []
        self._own = (folder / own).open("ab", buffering=0)
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
        file = (self._folder / name).open("ab", buffering=0)
        with self._lock:
            self._boards[board] = file

    def end(self, board: Board) -> None:
        """The rank is gone: drain what is left, then close its file and the board."""
        with self._lock:
            self._ended.append(board)

    def close(self) -> None:
        """Write everything that is left."""
        self._stop.set()
        self._thread.join(timeout=10.0)
        if not self._thread.is_alive():
            self._drain()
            self._own.close()
            for file in self._boards.values():
                file.close()

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._drain()

    def _drain(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
            boards = dict(self._boards)
            ended, self._ended = self._ended, []
        if lines:
            self._own.write(b"".join(lines))
        for board, file in boards.items():
            taken = board.take_lines()
            if taken:
                file.write(b"".join(taken))
        for board in ended:
            with self._lock:
                ended_file = self._boards.pop(board, None)
            if ended_file is not None:
                ended_file.close()
            board.close()
