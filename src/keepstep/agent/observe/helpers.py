"""The processes around the launcher: the guard that holds it, and the host of the store."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from keepstep import linux, shm
from keepstep.agent.environment import importable, node_suffix
from keepstep.agent.launch_spec import Launch
from keepstep.agent.observe.launcher_log import launcher_log
from keepstep.agent.store_host import MODULE as STORE_HOST
from keepstep.agent.store_host import StoreHost, shown
from keepstep.config.load import encode
from keepstep.wire.messages import Attach
from keepstep.wire.types import ATTACH_VARIABLE

_GUARD = "keepstep.agent.observe.guard"
_LIMIT_S = 20.0


class Boards:
    """The node's boards, which ranks open by their path below this process's folder in /proc.

    Their descriptors stay open for the whole run, and nobody inherits them.
    """

    def __init__(self, count: int) -> None:
        self._fds = [shm.create() for _ in range(count)]
        self.boards = [shm.Board(fd) for fd in self._fds]
        self.paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds]

    def close(self) -> None:
        """Release them; ranks that still have one keep it."""
        for board, fd in zip(self.boards, self._fds, strict=True):
            board.close()
            os.close(fd)
        self._fds, self.boards = [], []


def store_address(spec: Launch) -> tuple[str, int]:
    """Where the store outside the ranks is; port 0: any free one."""
    if spec.nnodes == 1:
        return "127.0.0.1", 0
    host, _, port = spec.rdzv_endpoint.rpartition(":")
    return host.strip("[]"), int(port) + 1


def hosts_store(spec: Launch) -> bool:
    """Whether this node hosts the store."""
    return spec.nnodes == 1 or bool(spec.hosts_rendezvous)


class Helpers:
    """Starts and ends them. The launcher's output goes to ``launcher.log``.

    Args:
        spec: What is launched. command: the launcher's. environ: its environment.
        boards: paths of the ranks' boards. store_host: the module that hosts the store.

    Raises:
        UsageError: the store's port cannot be used.
    """

    def __init__(
        self,
        spec: Launch,
        command: list[str],
        environ: dict[str, str],
        boards: list[str],
        store_host: str = STORE_HOST,
    ) -> None:
        linux.become_subreaper()
        self._not_ours = linux.children()
        self.log = launcher_log(spec)
        self.store_log = spec.log_dir / f"store{node_suffix(spec)}.log"
        environ = importable(environ)
        self._store: StoreHost | None = None
        host, port = store_address(spec)
        address = shown(host, port)
        if hosts_store(spec):
            self._store = StoreHost(host, port, environ, self.store_log, store_host)
            address = self._store.address
        self.attach = _attach(spec, boards, address)
        environ = environ | {ATTACH_VARIABLE: self.attach}
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            arguments = ["--fd", str(theirs.fileno()), "--", *command]
            self._guard = _start([_GUARD, *arguments], environ, self.log, theirs)
        self.sock = ours
        self.ended = False
        self.code = 0
        """How the launcher ended (-N: by signal N), once ``ended``."""

    def heard(self) -> None:
        """The socket can be read: the launcher has ended, or the guard itself was killed."""
        try:
            text = self.sock.recv(64)
        except BlockingIOError:
            return
        except ConnectionError:
            text = b""
        self.code = int(text) if text else self._guard.wait()
        self.ended = True

    def signal(self, number: int) -> None:
        """Send the launcher a signal."""
        with contextlib.suppress(OSError):
            self.sock.send(bytes([number]))

    @property
    def store_lost(self) -> str:
        """How the store's host ended; empty while it lives."""
        return "" if self._store is None else self._store.lost

    def kill(self) -> None:
        """SIGKILL the launcher and all that it started."""
        linux.kill_tree(self._guard.pid)

    def close(self) -> None:
        """End whatever is left of all of them."""
        self.sock.close()  # the guard ends the launcher now, if it still lives
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(_LIMIT_S)
        if self._guard.poll() is None:
            self._guard.send_signal(signal.SIGKILL)
            self._guard.wait()
        if self._store is not None:
            self._store.close()
        linux.end_children(keep=self._not_ours, limit_s=_LIMIT_S)


def _attach(spec: Launch, boards: list[str], store: str) -> str:
    told = Attach(
        run=spec.run_id,
        run_dir=str(spec.run_dir),
        log_dir=str(spec.log_dir),
        node=spec.node_rank or 0,
        boards=boards,
        store=store,
        config=encode(spec.config),
        mode=spec.mode,
        target=spec.target,
    )
    return msgspec.json.encode(told).decode()


def _start(
    module: list[str], environ: dict[str, str], log: Path, inherited: socket.socket
) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *module],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(inherited.fileno(),),
            start_new_session=True,
            env=environ,
        )
