"""NVRx's rank monitor on a clock that its test moves; what it would end a rank for is only told.

Run with the descriptor of a listening socket: each connection gets a monitor in a process of its
own, forked from this one, which has imported NVRx already. The first line of a connection is a
``Begin``, answered by ``Ready``; each further one a ``Now``, answered by ``Seen`` once the monitor
has looked at that time.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import socket
import sys
from types import SimpleNamespace
from typing import Any

import msgspec

from keepstep import linux

_PACKAGE = "nvidia_resiliency_ext.fault_tolerance"
_LOOK_S = 0.001
"""How often the monitor looks, real time."""


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """Where the rank will connect, the time now, and the limits in seconds."""

    path: str
    now: float
    initial_s: float
    heartbeat_s: float
    sections: dict[str, float]


class Ready(msgspec.Struct, frozen=True):
    """A rank can connect to the monitor, which is process ``pid``."""

    pid: int


class Now(msgspec.Struct, frozen=True):
    """It is ``now``."""

    now: float


class Seen(msgspec.Struct, frozen=True):
    """Whether the monitor would have ended the rank at that time, and which sections are open."""

    hung: bool
    sections: list[str]


class _Monitor:
    """NVRx's own server: messages, limits and checks are its; time is the test's."""

    def __init__(self, begin: Begin) -> None:
        module: Any = importlib.import_module(f"{_PACKAGE}.rank_monitor_server")
        config = importlib.import_module(f"{_PACKAGE}.config").FaultToleranceConfig(
            workload_check_interval=_LOOK_S,
            initial_rank_heartbeat_timeout=begin.initial_s,
            rank_heartbeat_timeout=begin.heartbeat_s,
            rank_section_timeouts=begin.sections,
            enable_nic_monitor=False,
        )
        self._now = begin.now
        module.time = SimpleNamespace(monotonic=lambda: self._now)
        self._ready = asyncio.Event()
        logger = module.RankMonitorLogger(level=logging.ERROR)
        self._server: Any = module.RankMonitorServer(config, begin.path, self._ready, False, logger)
        self._check = self._server._is_section_timeout_elapsed
        self._server._is_section_timeout_elapsed = self._counted
        self._server._shutdown_rank = self._note
        self._looks, self._hung = 0, False

    def _counted(self, now: float) -> Any:
        """The last of the two checks of a look."""
        self._looks += 1
        return self._check(now)

    def _note(self) -> None:
        """The signal that NVRx would send."""
        self._hung = True

    async def serve(self, connection: socket.socket, reader: asyncio.StreamReader) -> None:
        """Answer until the connection ends."""
        loop = asyncio.create_task(self._server._rank_monitor_loop())
        await self._ready.wait()
        connection.sendall(msgspec.json.encode(Ready(os.getpid())) + b"\n")
        while line := await reader.readline():
            seen = await self._look(msgspec.json.decode(line, type=Now).now)
            connection.sendall(msgspec.json.encode(seen) + b"\n")
        loop.cancel()

    async def _look(self, now: float) -> Seen:
        self._now, self._hung = now, False
        before = self._looks
        while self._looks == before:
            await asyncio.sleep(_LOOK_S / 2)
        return Seen(self._hung, sorted(self._server.open_sections))


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection.dup())
    begin = msgspec.json.decode(await reader.readline(), type=Begin)
    await _Monitor(begin).serve(connection, reader)
    writer.close()


def main() -> None:
    """Fork a monitor for each connection, until the test's process has ended."""
    linux.die_with_parent(os.getppid())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a monitor
    importlib.import_module(f"{_PACKAGE}.rank_monitor_server")
    listener, parent = socket.socket(fileno=int(sys.argv[1])), os.getpid()
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            linux.die_with_parent(parent)
            listener.close()
            asyncio.run(_serve(connection))
            os._exit(0)
        connection.close()


if __name__ == "__main__":
    main()
