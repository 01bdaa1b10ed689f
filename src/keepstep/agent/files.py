"""Event files of a node: a thread drains the ranks' rings and the agent's own events.

Storage may be slow, frozen or full; then events wait and neither the agent nor a rank does. The
files are written by a process of its own (``event_writer``), which is left behind if storage does
not let it end.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

from keepstep.agent import event_writer
from keepstep.shm import Board

_INTERVAL_S = 0.05
CLOSE_S = 10.0
"""How long the last events may take."""
_STARTS = 3
"""Writers that may end before their time."""


class _Pipe:
    """The process that writes, and its input. Used by one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left = _STARTS
        self._start()

    def _start(self) -> None:
        self._left -= 1
        self._sock, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(event_writer.__file__), str(self._folder)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def send(self, name: str, data: bytes) -> None:
        """Append ``data`` to the file ``name``; no data: the file is finished."""
        head = event_writer.HEAD.pack(len(name.encode()), len(data))
        frame = head + name.encode() + data
        try:
            self._sock.sendall(frame)
        except OSError:  # it was killed
            if self._left <= 0:
                return  # without events a run still runs
            self._sock.close()
            self.process.kill()
            self.process.wait(CLOSE_S)
            self._start()
            self.send(name, data)

    def close(self, limit_s: float) -> bool:
        """End it once all is written; False: it is left behind, storage does not let it end."""
        self._sock.close()
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True


class EventFiles:
    """Writes ``events/*.jsonl`` of one node.

    Args:
        folder: The run's ``events`` folder. own: name of the agent's own file.
    """

    def __init__(self, folder: Path, own: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._boards: dict[Board, str] = {}
        self._ended: list[Board] = []
        self._given: dict[str, list[bytes]] = {}
        self._finished: list[str] = []
        self._own = own
        self._lines: list[bytes] = []
        self._pipe = _Pipe(folder)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keepstep-events", daemon=True)
        self._thread.start()

    @property
    def writer(self) -> subprocess.Popen[bytes]:
        """The process that writes the files."""
        return self._pipe.process

    def put(self, line: bytes) -> None:
        """Append to the agent's own file; never blocks."""
        with self._lock:
            self._lines.append(line)

    def add(self, board: Board, name: str) -> None:
        """Drain ``board`` into the file ``name`` from now on."""
        with self._lock:
            self._boards[board] = name

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

    def close(self, limit_s: float = CLOSE_S) -> bool:
        """Write everything that is left; False if it took more than ``limit_s`` seconds."""
        self._stop.set()
        self._thread.join(timeout=limit_s)
        if self._thread.is_alive():
            return False
        self._drain()
        return self._pipe.close(limit_s)

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
        self._write(self._own, lines)
        for board, name in boards.items():
            self._write(name, board.take_lines())
        for name, taken in given.items():
            self._write(name, taken)
        for name in finished:
            self._pipe.send(name, b"")
        for board in ended:
            with self._lock:
                gone = self._boards.pop(board, None)
            if gone is not None:
                self._pipe.send(gone, b"")
            board.close()

    def _write(self, name: str, lines: list[bytes]) -> None:
        data = b"".join(lines)
        if data:
            self._pipe.send(name, data)
