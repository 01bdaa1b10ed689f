"""The process that hosts torch's store outside the ranks, where NVRx restarts inside them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from keepstep.errors import UsageError

MODULE = "keepstep.rank.store_host"


class StoreHost:
    """Hosts the store from now on, at ``address``.

    Args:
        host: Address to listen at. port: 0 for a free one.
        environ: The process's environment. log: where its output goes.
        module: What to run.

    Raises:
        UsageError: nobody can listen there.
    """

    def __init__(
        self, host: str, port: int, environ: dict[str, str], log: Path, module: str = MODULE
    ) -> None:
        with _listen(host, port) as sock, log.open("ab") as output:
            self.address = shown(host, int(sock.getsockname()[1]))
            arguments = ["--fd", str(sock.fileno()), "--parent", str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(sock.fileno(),),
                start_new_session=True,
                env=environ,
            )

    @property
    def lost(self) -> str:
        """How the process ended; empty while it lives."""
        code = self._process.poll()
        if code is None:
            return ""
        return f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"

    def close(self) -> None:
        """End it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def shown(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
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
