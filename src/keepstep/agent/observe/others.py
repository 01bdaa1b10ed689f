"""What the nodes' observers tell one another, through the run folder that they share.

Node 0 says what happened in the run, so every other node tells it what it saw, in a file of its own
below ``nodes``; node 0 tells them what it said, and when the run is over. A file has one writer,
and is followed by a thread: shared storage may be slow, and then causes are named late or not at
all, but no rank and no observer waits for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec

from keepstep.clock import SYSTEM
from keepstep.events import Event
from keepstep.policy import Report
from keepstep.wire.messages import Evidence, JobEnd, Message, Notice

FOLDER = "nodes"
_INTERVAL_S = 0.1
_CHUNK = 1 << 20


class Began(Message, frozen=True):
    """A process took the board of a rank."""

    rank: int
    pid: int
    inc: int


class Heard(Message, frozen=True):
    """A rank wrote an event that says how far it is."""

    event: Event


class Over(Message, frozen=True):
    """A rank's process has ended; how, if it is a failure, comes as ``Failure``."""

    rank: int


class Failure(Message, frozen=True):
    """Evidence of a failure; ``t`` is the wall time of ``report.t``."""

    report: Report
    stack: str
    t: float


class Standing(Message, frozen=True):
    """Somebody on the node stands still: how its ranks look."""

    ranks: list[Evidence]


class WentOn(Message, frozen=True):
    """A rank that stood still makes progress again by itself."""

    rank: int


class Said(Message, frozen=True):
    """Node 0 has said so."""

    notice: Notice


class RunOver(Message, frozen=True):
    """Node 0 has ended the run."""

    end: JobEnd


Told = Began | Heard | Over | Failure | Standing | WentOn | Said | RunOver


class Others:
    """The observers of the other nodes. Nothing but ``close`` waits for storage.

    Args:
        run_dir: The run folder. node: this one's number. heard: the nodes to listen to.
    """

    def __init__(self, run_dir: Path, node: int, heard: Iterable[int]) -> None:
        self._folder = run_dir / FOLDER
        self._own = self._folder / f"{node}-{int(SYSTEM.wall())}-{os.getpid()}.jsonl"
        self._files: dict[int, dict[Path, _Followed]] = {one: {} for one in heard}
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._told: list[tuple[int, Told]] = []
        self._heard: set[int] = set()
        self._stop = threading.Event()
        self._folder.mkdir(parents=True, exist_ok=True)
        for files in self._listed().values():
            for path in files:  # of earlier launches, or too early to matter
                self._follow(path, path.stat().st_size)
        self._thread = threading.Thread(target=self._run, name="keepstep-nodes", daemon=True)
        self._thread.start()

    def tell(self, message: Told) -> None:
        """Say ``message`` to whoever listens."""
        line = msgspec.json.encode(message) + b"\n"
        with self._lock:
            self._waiting += line

    def take(self) -> list[tuple[int, Told]]:
        """What was heard since the last call, with the node that said it, in its order."""
        with self._lock:
            told, self._told = self._told, []
        self._heard |= {node for node, _ in told}
        return told

    @property
    def silent(self) -> list[int]:
        """Nodes that have said nothing since this process started."""
        return sorted(set(self._files) - self._heard)

    def close(self) -> None:
        """Write what is left; storage that is frozen is not waited for long."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._own.open("ab", buffering=0) as own:
            while True:
                last = self._stop.wait(_INTERVAL_S)
                try:
                    self._write(own.fileno())
                    self._read()
                except OSError:
                    pass  # full or unreachable for now: tried again
                if last:
                    return

    def _write(self, fd: int) -> None:
        while True:
            with self._lock:
                line = bytes(self._waiting)
            if not line:
                return
            written = os.write(fd, line)
            with self._lock:
                del self._waiting[:written]

    def _listed(self) -> dict[int, list[Path]]:
        found: dict[int, list[Path]] = {node: [] for node in self._files}
        for path in sorted(self._folder.iterdir()):
            node = _node_of(path)
            if node in found:
                found[node].append(path)
        return found

    def _follow(self, path: Path, start: int) -> None:
        self._files[_node_of(path)].setdefault(path, _Followed(path, start))

    def _read(self) -> None:
        for node, paths in self._listed().items():
            for path in paths:
                self._follow(path, 0)
            for followed in list(self._files[node].values()):
                messages = followed.poll()
                with self._lock:
                    self._told += [(node, message) for message in messages]


def _node_of(path: Path) -> int:
    number = path.name.partition("-")[0]
    return int(number) if number.isdecimal() and path.suffix == ".jsonl" else -1


class _Followed:
    """One file of another node, from a place on."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        self._at = start
        self._rest = b""
        self._decoder = msgspec.json.Decoder(Told)

    def poll(self) -> list[Told]:
        """The messages that were added."""
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._at)
            data = file.read(_CHUNK)
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages: list[Told] = []
        for line in lines:
            try:
                messages.append(self._decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # of another version of keepstep
        return messages
