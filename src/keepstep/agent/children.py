"""The agent's own helper processes: coordinator, zygote, writer, for NVRx's in-process restart a
host of its store. None of them is a rank."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from keepstep import linux
from keepstep.agent.environment import importable
from keepstep.agent.launch_spec import Launch
from keepstep.agent.store_host import StoreHost
from keepstep.clock import SYSTEM
from keepstep.config.load import encode
from keepstep.wire.channel import Channel, pair
from keepstep.wire.messages import FROM_COORDINATOR, FROM_WRITER, FROM_ZYGOTE
from keepstep.wire.types import STORE_VARIABLE

_KILLED_S = 2.0
"""How long a killed process may take to be gone."""


def _start(
    module: str, arguments: list[str], environ: dict[str, str], log: Path
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start ``python -m module`` in a session of its own with one end of a socket pair."""
    ours, theirs = pair()
    with theirs, log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "--fd", str(theirs.fileno()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env=environ,
        )
    return ours, process


class Children:
    """Coordinator, zygote and writer of one node, with the channels to them.

    Args:
        spec: What is launched.
    """

    def __init__(self, spec: Launch) -> None:
        # If the zygote is killed, what its ranks started comes to this process.
        linux.become_subreaper()
        self._not_ours = linux.children()
        config = spec.config
        environ = importable(spec.environ)
        logs = spec.log_dir
        sock, self.coordinator_process = _start(
            "keepstep.coordinator",
            [
                *("--run", spec.run_id, "--run-dir", str(spec.run_dir)),
                *("--world", str(spec.nproc), "--config", encode(config).decode()),
                *("--lease", str(spec.lease)),
            ],
            environ,
            logs / "coordinator.log",
        )
        self.coordinator: Channel[FROM_COORDINATOR] = Channel(
            sock, FROM_COORDINATOR, blocking=False
        )
        self.store: StoreHost | None = None
        if config.engine.parts.restart == "nvrx":
            self.store = StoreHost(spec.master_addr, 0, environ, logs / "store.log")
            environ = {**environ, STORE_VARIABLE: self.store.address}
        names = "" if spec.mode == "program" else config.rank.preload
        sock, self.zygote_process = _start(
            "keepstep.rank.zygote",
            ["--method", config.rank.start_method, "--preload", names],
            environ,
            logs / "zygote.log",
        )
        self.zygote: Channel[FROM_ZYGOTE] = Channel(sock, FROM_ZYGOTE, blocking=False)
        self._environ, self._logs = environ, logs
        self.writer, self.writer_process = self._new_writer()

    def _new_writer(self) -> tuple[Channel[FROM_WRITER], subprocess.Popen[bytes]]:
        module, log = "keepstep.checkpoint.writer_process", self._logs / "writer.log"
        sock, process = _start(module, [], self._environ, log)
        return Channel(sock, FROM_WRITER, blocking=False), process

    def replace_writer(self) -> str:
        """Start another writer in place of the one whose channel has ended.

        Returns:
            How the old one ended.

        Raises:
            OSError: no process could be started.
        """
        self.writer.close()
        self.writer_process.kill()  # it may have closed its channel only
        status = self.writer_process.wait()
        self.writer, self.writer_process = self._new_writer()
        return f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"

    def close(self, limit_s: float) -> list[str]:
        """End them by closing their channels; kill who takes longer than ``limit_s`` seconds.

        Returns:
            Who could not be ended, because storage blocks it: such a process is left behind.
        """
        for channel in (self.zygote, self.writer, self.coordinator):
            channel.close()
        deadline = SYSTEM.mono() + limit_s
        left: list[str] = []
        for name, process in (
            ("zygote", self.zygote_process),
            ("writer", self.writer_process),
            ("coordinator", self.coordinator_process),
        ):
            try:
                process.wait(max(0.0, deadline - SYSTEM.mono()))
            except subprocess.TimeoutExpired:
                process.kill()
                try:
                    process.wait(_KILLED_S)
                except subprocess.TimeoutExpired:
                    left.append(f"{name}, process {process.pid}, state {linux.state(process.pid)}")
        if self.store is not None:
            self.store.close()
        linux.end_children(keep=self._not_ours, limit_s=_KILLED_S if left else limit_s)
        return left
