"""The zygote: parent of all ranks of a node (``python -m keepstep.rank.zygote``).

It imports torch once and forks parked processes from that (milliseconds instead of seconds), or
starts fresh interpreters with ``--method spawn``. It stays single-threaded, initialises nothing of
CUDA or gloo, and is the subreaper of everything the ranks start: whatever is left of a rank that
ended is killed here. When the agent is gone (its socket closes), it kills everything and exits.

It must not know about rounds or rank numbers.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import traceback

from keepstep import linux, shm
from keepstep.clock import SYSTEM
from keepstep.wire.channel import Channel, Closed
from keepstep.wire.loop import Loop
from keepstep.wire.messages import (
    TO_ZYGOTE,
    ChildExited,
    KillTree,
    Spawned,
    ZygoteReady,
)

# What FSDP training touches lazily; imported before the fork if torch is preloaded at all.
_WITH_TORCH = (
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "torch.distributed.checkpoint",
    "torch.optim",
    "keepstep.api.run",
    "keepstep.checkpoint.torch_reader",
    "keepstep.rank.groups",
    "keepstep.rank.shard_writer",
    "keepstep.rank.store",
)

_SWEEP_S = 0.05


def preload(names: list[str]) -> str:
    """Import ``names`` (torch with what FSDP needs); returns what failed, empty if nothing."""
    try:
        for name in names:
            importlib.import_module(name)
        if "torch" in names:
            for name in _WITH_TORCH:
                importlib.import_module(name)
    except ImportError as error:
        return str(error)
    gc.collect()
    gc.freeze()  # shared pages stay shared: the collector does not touch them in the children
    return ""


class Zygote:
    """Serves the agent on ``sock``."""

    def __init__(self, sock: socket.socket, method: str) -> None:
        self._channel: Channel[TO_ZYGOTE] = Channel(sock, TO_ZYGOTE, blocking=False)
        self._method = method
        self._children: set[int] = set()
        self._boards: dict[int, int] = {}  # by rank's process: its board's inode
        self._loop = Loop()
        self._agent_lives = True
        self._sweeps_left = 0

    def serve(self, names: list[str]) -> None:
        """Run until the agent is gone."""
        linux.become_subreaper()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        error = preload(names)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._loop.wake_fd, warn_on_full_buffer=False)
        self._channel.send(
            ZygoteReady(pid=os.getpid(), threads=len(os.listdir("/proc/self/task")), error=error)
        )
        self._loop.add(self._channel, self._handle, self._lost)
        try:
            while self._agent_lives:
                self._loop.turn(_SWEEP_S if self._sweeps_left else None)
                self._reap()
                if self._sweeps_left:
                    self._sweep()
        except Closed:
            pass
        self._end()

    def _lost(self) -> None:
        self._agent_lives = False

    def _handle(self, message: TO_ZYGOTE) -> None:
        if isinstance(message, KillTree):
            if message.pid in self._children:
                linux.kill_tree(message.pid)
            return
        fds = [self._channel.take_fd() for _ in range(4)]
        board = os.fstat(fds[1]).st_ino
        pid = self._fork(fds) if self._method == "fork" else self._spawn(fds)
        for fd in fds:
            os.close(fd)
        self._children.add(pid)
        self._boards[pid] = board
        self._channel.send(Spawned(ticket=message.ticket, pid=pid))

    def _fork(self, fds: list[int]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            self._become_rank(parent, fds)
            from keepstep.rank import bootstrap

            code = bootstrap.serve(fds[0], fds[1])
        except BaseException:  # noqa: BLE001 - a child must never run the zygote's own loop
            traceback.print_exc()
        finally:
            os._exit(code)

    def _become_rank(self, parent: int, fds: list[int]) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._loop.close()
        self._channel.close()
        os.setsid()
        linux.die_with_parent(parent)
        os.dup2(fds[2], 1)
        os.dup2(fds[3], 2)
        os.close(fds[2])
        os.close(fds[3])

    def _spawn(self, fds: list[int]) -> int:
        command = [sys.executable, "-m", "keepstep.rank.bootstrap"]
        command += ["--control", str(fds[0]), "--board", str(fds[1]), "--parent", str(os.getpid())]
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=fds[2],
            stderr=fds[3],
            pass_fds=(fds[0], fds[1]),
            start_new_session=True,
            restore_signals=True,
        )
        child.returncode = 0  # reaped by our own waitpid; Popen must not warn or wait
        return child.pid

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:
                self._children.discard(pid)
                self._boards.pop(pid, None)
                linux.kill_tree(pid)
                self._sweeps_left = 20  # its orphans arrive here as they lose their parents
                self._channel.send(ChildExited(pid=pid, status=status, t=SYSTEM.mono()))

    def _sweep(self) -> None:
        """Kill processes that became ours because the rank that started them has ended.

        A daemon of a rank that lives is ours too. Its session tells, or its environment; one that
        was only forked (NVRx's monitor process) has neither, but the rank's board still mapped.
        """
        self._sweeps_left -= 1
        me, boards = os.getpid(), set(self._boards.values())
        for pid, (parent, session) in linux.parents().items():
            if parent != me or pid in self._children or session in self._children:
                continue
            if linux.owner(pid) in self._children or linux.mapped(pid, shm.NAME) & boards:
                continue
            if linux.is_tracker(pid):
                continue  # it cleans up after the rank, and ends by itself
            if linux.ending(pid):
                continue  # killing it would end a daemon that it leaves in its session
            linux.kill_tree(pid)

    def _end(self) -> None:
        """The agent is gone: nothing may stay behind."""
        linux.end_children(keep=(), limit_s=10.0)


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--method", choices=("fork", "spawn"), required=True)
    parser.add_argument("--preload", default="")
    options = parser.parse_args()
    names = [name for name in options.preload.split(",") if name]
    Zygote(socket.socket(fileno=options.fd), options.method).serve(
        names if options.method == "fork" else []
    )


if __name__ == "__main__":
    main()
