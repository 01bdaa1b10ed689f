"""Process groups of one round: made, aborted from any thread, and taken down.

gloo has no abort: ``abort()`` and ``shutdown()`` return and free nobody. What frees a rank that is
blocked in a gloo collective within milliseconds is to shut down the group's own sockets, so the
sockets that appear while a group is made are remembered (by descriptor and inode).

Only the reading side is shut down, after what is being sent has left, and the connections stay open
until every rank is out: gloo tells waiting receives about a closed connection, but forgets a send
that is partly written or that finds the connection gone (``Pair::signalException`` passes over
``Op::ubuf``, and a buffer taken off the pending sends is in no list while it is written; gloo of
torch 2.13). A rank left waiting for such a send (its peer was killed in the middle of a transfer,
or, in 3 of over 2,000 restarts after an exception, for a reason not found yet) is ended and
replaced after ``restart.abort_limit_s``. On NCCL the backend's own ``abort`` is used.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import socket
import stat
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from keepstep.clock import SYSTEM
from keepstep.rank import torch_private

_QUIESCE_S = 0.2


def _sockets() -> dict[int, int]:
    """Descriptor -> inode of every socket of this process."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def _connected(fd: int, inode: int) -> socket.socket | None:
    """A duplicate of ``fd`` if it still is the connected TCP socket with ``inode``."""
    try:
        if os.fstat(fd).st_ino != inode:
            return None
        sock = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    try:
        if sock.family in (socket.AF_INET, socket.AF_INET6) and not sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            return sock
    except OSError:
        pass
    sock.close()
    return None


def _unsent(sock: socket.socket) -> int:
    """Bytes that the kernel has not been able to deliver yet."""
    try:
        answer = fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0
    return int.from_bytes(answer, sys.byteorder)


def _quiesce(sockets: list[socket.socket], limit_s: float) -> None:
    """Wait until nothing is on its way any more; two looks, so that gloo can hand over the rest."""
    deadline = SYSTEM.mono() + limit_s
    quiet = 0
    while quiet < 2 and SYSTEM.mono() < deadline:
        quiet = 0 if any(_unsent(sock) for sock in sockets) else quiet + 1
        SYSTEM.sleep(0.001)


class GroupSet:
    """All process groups that exist in one round.

    Use ``install`` once a process; then ``create`` and ``destroy`` once a round from the main
    thread, ``abort`` from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tracked: dict[int, int] = {}
        self._before: dict[int, int] | None = None
        self._aborted = False
        self._keep: list[object] = []
        self._held: list[socket.socket] = []
        self._hooks = (sys.excepthook, sys.excepthook)

    def install(self) -> None:
        """Watch every group that is made from now on, by whatever call."""
        torch_private.wrap_group_creation(self.watch)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Sockets that appear inside belong to the round: ``abort`` shuts them down.

        Raises:
            RuntimeError: the round was aborted already.
        """
        with self._lock:
            if self._aborted:
                raise RuntimeError("the round was aborted")
            outer, self._before = self._before, self._before or _sockets()
        try:
            yield
        finally:
            with self._lock:
                before, self._before = self._before or {}, outer
                if outer is None:
                    self._add_new(before)

    def _add_new(self, before: dict[int, int]) -> None:
        for fd, inode in _sockets().items():
            if before.get(fd) != inode:
                self._tracked[fd] = inode

    def create(self, *, backend: str, store: Any, rank: int, size: int, timeout_s: float) -> None:
        """Initialise the default process group."""
        self._keep = [store]
        hook = sys.excepthook
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        self._hooks = (hook, sys.excepthook)

    def abort(self) -> int:
        """Free every rank's thread that is blocked in one of the groups; any thread.

        Returns:
            How many connections were shut down.
        """
        with self._lock:
            self._aborted = True
            if self._before is not None:
                self._add_new(self._before)
            tracked = dict(self._tracked)
        found = [_connected(fd, inode) for fd, inode in tracked.items()]
        sockets = [sock for sock in found if sock is not None]
        _quiesce(sockets, _QUIESCE_S)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)
        with self._lock:
            self._held += sockets
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            for _, group in torch_private.groups():
                _abort_nccl(group)
        return len(sockets)

    def destroy(self) -> None:
        """Take all groups down; the main thread, after the attempt has unwound."""
        if dist.is_initialized():
            dist.destroy_process_group()
        torch_private.forget_group_names()
        before, torchs = self._hooks
        if sys.excepthook is torchs:  # else each round's hook would call that of the round before
            sys.excepthook = before
        self._keep = []
        gc.collect()
        with self._lock:
            self._tracked.clear()
            self._aborted = False

    def release(self) -> None:
        """Close the connections of an aborted round; only when every rank has left it."""
        with self._lock:
            held, self._held = self._held, []
        for sock in held:
            sock.close()

    def sequence_numbers(self) -> dict[str, int]:
        """Collectives entered so far, by group."""
        return torch_private.sequence_numbers()


def _abort_nccl(group: Any) -> None:
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return  # the group has no CUDA backend
    backend.abort()
