"""Process groups of one round: made, aborted from any thread, and taken down.

gloo has no abort: ``abort()`` and ``shutdown()`` return and free nobody. What frees a rank that is
blocked in a gloo collective within milliseconds is to shut down the group's own sockets, so the
sockets that appear while a group is made are remembered (by descriptor and inode). On NCCL the
backend's own ``abort`` is used.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from keepstep.rank import torch_private


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


def _shut(fd: int, inode: int) -> bool:
    """Shut down ``fd`` if it still is the connected TCP socket with ``inode``."""
    try:
        if os.fstat(fd).st_ino != inode:
            return False
        with socket.socket(fileno=os.dup(fd)) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


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
        self._uninstall = lambda: None
        self._keep: list[object] = []

    def install(self) -> None:
        """Watch every group that is made from now on, by whatever call."""
        self._uninstall = torch_private.wrap_group_creation(self._watch)

    def uninstall(self) -> None:
        """Stop watching."""
        self._uninstall()

    @contextmanager
    def _watch(self) -> Iterator[None]:
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

    def create(
        self, *, backend: str, store: dist.Store, rank: int, size: int, timeout_s: float
    ) -> None:
        """Initialise the default process group."""
        self._keep = [store]
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )

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
        count = sum(_shut(fd, inode) for fd, inode in tracked.items())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            for _, group in torch_private.groups():
                _abort_nccl(group)
        return count

    def destroy(self) -> None:
        """Take all groups down; the main thread, after the attempt has unwound."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._keep = []
        gc.collect()
        with self._lock:
            self._tracked.clear()
            self._aborted = False

    def sequence_numbers(self) -> dict[str, int]:
        """Collectives entered so far, by group."""
        return torch_private.sequence_numbers()


def _abort_nccl(group: Any) -> None:
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return  # the group has no CUDA backend
    backend.abort()
