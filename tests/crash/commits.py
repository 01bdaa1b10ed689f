"""The coordinator's committer in a process of its own, for crash tests."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import msgspec

from keepstep.checkpoint.retention import Keep
from keepstep.coordinator.committer import Committer
from keepstep.coordinator.saves import Ready
from keepstep.wire.types import Version
from tests.crash.forks import Forks
from tests.crash.saves import LIMIT_S

PRELOAD = "tests.crash.commits"
_LARGEST = 1 << 16


def serve(root: str, keep: str, fd: int) -> int:
    """Commit every version that arrives and answer with the error; runs in a fork."""
    done = threading.Event()
    committer = Committer(Path(root), Keep(int(keep)), done.set)
    with socket.socket(fileno=fd) as channel:
        channel.send(b"ready")
        while data := channel.recv(_LARGEST):
            ready = msgspec.json.decode(data, type=Ready)
            done.clear()
            committer.put(ready)
            done.wait()
            ((_, error),) = committer.take()
            channel.send(error.encode() + b"\n")
    committer.close()
    return 0


class Coordinator:
    """A forked process with a committer in it."""

    def __init__(self, forks: Forks, root: Path, keep: int) -> None:
        self._forks = forks
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(LIMIT_S)
        with theirs:
            words = (f"{PRELOAD}:serve", str(root), str(keep))
            self.pid = forks.start(*words, fds=(theirs.fileno(),))
        assert self._socket.recv(_LARGEST) == b"ready"

    @property
    def committer(self) -> int:
        """Id of the thread that commits."""
        return max(map(int, os.listdir(f"/proc/{self.pid}/task")))

    def commit(self, version: Version, folder: str) -> str | None:
        """The error, empty if it is committed, None if the process was killed."""
        self._socket.send(msgspec.json.encode(Ready(version, folder)))
        answer = self._socket.recv(_LARGEST).decode()
        return answer.removesuffix("\n") if answer else None

    def close(self) -> int:
        """Hang up and wait for its end, and for what it still removes; returns its status."""
        self._socket.close()
        return self._forks.wait(self.pid)
