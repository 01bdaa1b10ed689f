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
from keepstep.config.load import encode
from keepstep.errors import UsageError
from keepstep.wire.messages import Attach
from keepstep.wire.types import ATTACH_VARIABLE

_GUARD = "keepstep.agent.observe.guard"
STORE_HOST = "keepstep.rank.store_host"
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
    if spec.nnodes == 1:
        return True
    return spec.node_rank == 0 if spec.node_rank is not None else bool(spec.rdzv_is_host)


def _listen(spec: Launch) -> socket.socket:
    host, port = store_address(spec)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if family == socket.AF_INET:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UsageError(
            f"the store outside the ranks cannot listen at {host} port {port}: {error}",
            done="Nothing was started",
            advice="That is the port after the rendezvous; choose another --rdzv-endpoint",
        ) from error


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
        self._store: subprocess.Popen[bytes] | None = None
        host, port = store_address(spec)
        if hosts_store(spec):
            with _listen(spec) as sock:
                port = int(sock.getsockname()[1])
                arguments = ["--fd", str(sock.fileno()), "--parent", str(os.getpid())]
                self._store = _start([store_host, *arguments], environ, self.store_log, sock)
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.attach = _attach(spec, boards, shown)
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
        code = self._store.poll() if self._store is not None else None
        if code is None:
            return ""
        return f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"

    def kill(self) -> None:
        """SIGKILL the launcher and all that it started."""
        linux.kill_tree(self._guard.pid)

    def close(self) -> None:
        """End whatever is left of all of them."""
        self.sock.close()  # the guard ends the launcher now, if it still lives
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(_LIMIT_S)
        for process in (self._guard, self._store):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
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
