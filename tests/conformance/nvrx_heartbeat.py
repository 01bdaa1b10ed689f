"""NVRx's heartbeat under its conformance suite: who watches the rank, and the time they see.

Both of NVRx's watchers are its own code: the rank monitor of its launcher, in a process of its own,
and the progress watchdog of its in-process restart. The test moves their time and the rank's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest

from keepstep import shm
from keepstep.clock import SYSTEM
from keepstep.config import Config, EngineSettings, HeartbeatSettings, NvrxSettings
from keepstep.engines.nvrx.heartbeat import SOCKET_VARIABLE, NvrxHeartbeat
from keepstep.policy.nvrx_limits import SECTION, NvrxLimits, nvrx_limits
from keepstep.ports import Heartbeat
from keepstep.rank.runtime import Runtime
from keepstep.shm import Board, Phase
from keepstep.testing import FakeClock
from keepstep.testing.conformance.heartbeat import STEPS, Seen
from keepstep.testing.conformance.processes import lives, wait_until
from tests.conformance import nvrx_monitor
from tests.conformance.nvrx_monitor import Begin, Now, Ready
from tests.rank.starts import start

COMBINED = EngineSettings(name="nvrx")
"""In-process restart inside, launcher outside."""
LAUNCHER = EngineSettings(launcher="nvrx")
"""The launcher alone."""
_WATCHDOG = "nvidia_resiliency_ext.inprocess.progress_watchdog"
_DEADLINE_S = 60.0
_TICK_S = 0.1
"""The rank's thread sends at least once in so long; a twentieth of the step's limit as always."""
_REAL_TICK_S = 0.001
"""That much of real time."""


def _config(engine: EngineSettings) -> Config:
    beats = HeartbeatSettings(min_limit_s=1.0, start_limit_s=100.0, section_limit_s=10.0)
    nvrx = NvrxSettings(soft_limit_s=2.0)
    return dataclasses.replace(Config(), heartbeat=beats, nvrx=nvrx, engine=engine)


class Monitor:
    """One rank monitor.

    Args:
        connection: To its process. limits: NVRx's. path: of its socket. now: its time.
    """

    def __init__(
        self, connection: socket.socket, limits: NvrxLimits, path: str, now: float
    ) -> None:
        self.path = path
        self._connection = connection
        self._connection.settimeout(_DEADLINE_S)
        self._lines = connection.makefile("rb")
        begin = Begin(
            path=path,
            now=now,
            initial_s=limits.ft_initial,
            heartbeat_s=limits.ft_heartbeat,
            sections={SECTION: limits.ft_section},
        )
        self._pid = self._ask(begin, Ready).pid

    def _ask(self, message: Begin | Now, answer: Any) -> Any:
        self._connection.sendall(msgspec.json.encode(message) + b"\n")
        return msgspec.json.decode(self._lines.readline(), type=answer)

    def look(self, now: float) -> nvrx_monitor.Seen:
        """It is ``now``: what the monitor has to say."""
        seen: nvrx_monitor.Seen = self._ask(Now(now), nvrx_monitor.Seen)
        return seen

    def freeze(self) -> None:
        """It stands still."""
        os.kill(self._pid, signal.SIGSTOP)

    def kill(self) -> None:
        """End it; returns when it is gone. Can be called again."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        assert wait_until(lambda: not lives(self._pid), _DEADLINE_S)
        self._lines.close()
        self._connection.close()


class Monitors:
    """Starts rank monitors. NVRx is imported once for all of them, here too: it takes seconds, and
    leaves a file open."""

    def __init__(self) -> None:
        self.watchdog = importlib.import_module(_WATCHDOG)
        self._folder = tempfile.TemporaryDirectory(prefix="nvrx-")
        self._address = os.path.join(self._folder.name, "control")
        self._count = 0
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen()
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            self._process = subprocess.Popen(
                [sys.executable, nvrx_monitor.__file__, str(listener.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                env={**os.environ, "PYTHONPATH": path, "TMPDIR": self._folder.name},
            )

    def start(self, limits: NvrxLimits, now: float) -> Monitor:
        """A fresh monitor."""
        self._count += 1
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        path = os.path.join(self._folder.name, f"monitor-{self._count}")
        return Monitor(connection, limits, path, now)

    def close(self) -> None:
        """End them all."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


class Progress:
    """What in-process restart knows of the rank's progress: NVRx's watchdog, and its rule.

    ``ping`` is that of its CallWrapper, ``send_timestamp`` that of its monitor process, which ends
    the attempt when ``is_timed_out`` says so.
    """

    def __init__(self, soft_s: float, module: Any) -> None:
        self._soft = timedelta(seconds=soft_s)
        self._watchdog = module.ProgressWatchdog(1, self, timedelta(seconds=_REAL_TICK_S))
        self.ping: Callable[[], None] = self._watchdog.ping
        self._last: Any = None
        self._watchdog.reset()
        self._watchdog.daemon = True
        self._watchdog.start()

    def send_timestamp(self, timestamp: Any) -> None:
        """The newest times of progress."""
        self._last = dataclasses.replace(timestamp)

    def hung(self) -> bool:
        """Whether the rank makes no progress, by NVRx's rule."""
        return bool(self._last.is_timed_out(self._soft))

    def run_until(self, now: float) -> None:
        """The main thread runs Python until NVRx has noticed that it does at ``now``."""
        assert _spin(lambda: self._last.auto >= now), "NVRx does not see the main thread"

    def close(self) -> None:
        """End the watchdog, which waits for the main thread to run Python."""
        ending = threading.Thread(target=self._watchdog.shutdown)
        ending.start()
        assert _spin(lambda: not ending.is_alive()), "NVRx's watchdog does not end"


def _spin(reached: Callable[[], bool]) -> bool:
    deadline = SYSTEM.mono() + _DEADLINE_S
    while not reached() and SYSTEM.mono() < deadline:
        SYSTEM.sleep(_REAL_TICK_S / 4)
    return reached()


class _Heartbeat(NvrxHeartbeat):
    """Tells how often its thread has sent what there was to send."""

    turns = 0

    def _turn(self) -> bool:
        goes_on = super()._turn()
        self.turns += 1
        return goes_on

    def settle(self) -> None:
        """Until the thread has begun and ended a turn after this call."""
        wanted = self.turns + 2
        assert _spin(lambda: self.turns >= wanted), "the rank's thread sends nothing"


class WatchedRank:
    """A rank's heartbeat with NVRx's watchers, all on a clock that stands still by itself.

    Args:
        runtime: The rank. limits: NVRx's. clock: everybody's time. monitor: of its launcher.
        progress: in-process restart's; None without.
    """

    def __init__(
        self,
        runtime: Runtime,
        limits: NvrxLimits,
        clock: FakeClock,
        monitor: Monitor,
        progress: Progress | None,
    ) -> None:
        self.step_limit_s = limits.soft if progress is not None else limits.ft_heartbeat
        self.section_limit_s = limits.ft_section
        self._runtime, self._clock = runtime, clock
        self._monitor, self._progress = monitor, progress
        often = dataclasses.replace(limits, ft_check_interval=2 * _REAL_TICK_S)
        self._sender = _Heartbeat(runtime, often, lambda: progress)
        self.heartbeat: Heartbeat = self._sender
        self._stopped = False

    def seen(self) -> Seen:
        """Steps and names as the board shows them, which ``keepstep run`` reads: NVRx's monitor
        only knows whether there is a section."""
        self._sender.settle()
        board, known = self._runtime.board, self._monitor.look(self._clock.mono()).sections
        in_steps = board.phase in (Phase.STEP, Phase.SECTION) and board.step > 0
        name = board.label
        if known != ([SECTION] if name else []):
            name = f"{name!r} on the board, and to NVRx's monitor {known}"
        return Seen(board.step if in_steps else None, name)

    def silent_for(self, seconds: float, *, in_call: bool = False) -> bool:
        if not in_call:
            return self._pass(seconds, running=True)
        found: list[bool] = []
        other = threading.Thread(target=lambda: found.append(self._pass(seconds, running=False)))
        other.start()
        other.join()  # one call, in which the main thread runs no Python
        return found[0]

    def _pass(self, seconds: float, *, running: bool) -> bool:
        hung = False
        for _ in range(round(seconds / _TICK_S)):
            self._clock.advance(_TICK_S)
            now = self._clock.mono()
            self._sender.settle()
            if self._progress is not None:
                if running:
                    self._progress.run_until(now)
                hung = self._progress.hung() or hung
            hung = self._monitor.look(now).hung or hung
        return hung

    def train(self, step_s: float) -> bool:
        return self.steps(STEPS, step_s)

    def steps(self, count: int, step_s: float) -> bool:
        """Complete ``count`` steps; whether that is a hang."""
        hung, done = False, self._runtime.step
        for step in range(done + 1, done + 1 + count):
            self.heartbeat.beat(step)
            hung = self.silent_for(step_s) or hung
            self._runtime.end_step(step, None)
        return hung

    def stop(self, *, gone: bool) -> None:
        self._stopped = True
        if gone:
            self._monitor.kill()
        else:
            self._monitor.freeze()

    def close(self) -> None:
        """End the heartbeat; a monitor that stands still is not told."""
        if self._stopped:
            self._monitor.kill()
        self._sender.end()
        self._monitor.kill()


@contextlib.contextmanager
def heartbeat(engine: EngineSettings, monitors: Monitors, folder: Path) -> Iterator[WatchedRank]:
    """A rank under NVRx's launcher, with its in-process restart or without."""
    config = _config(engine)
    limits, clock = nvrx_limits(config), FakeClock()
    watchdog = monitors.watchdog
    fd = shm.create()
    board = Board(fd)
    os.close(fd)
    time = SimpleNamespace(monotonic=clock.mono, sleep=SYSTEM.sleep)
    with (
        contextlib.closing(board),
        mock.patch("keepstep.rank.runtime.SYSTEM", clock),
        mock.patch("keepstep.engines.nvrx.heartbeat.SYSTEM", clock),
        mock.patch.object(watchdog, "time", time),
        pytest.MonkeyPatch.context() as patch,
        contextlib.ExitStack() as stack,
    ):
        monitor = monitors.start(limits, clock.mono())
        stack.callback(monitor.kill)
        patch.setenv(SOCKET_VARIABLE, monitor.path)
        patch.setenv("RANK", "1")
        progress = None
        if engine.parts.restart == "nvrx":
            progress = stack.enter_context(contextlib.closing(Progress(limits.soft, watchdog)))
        runtime = Runtime(start(folder), config, None, board)  # type: ignore[arg-type]
        watched = WatchedRank(runtime, limits, clock, monitor, progress)
        stack.callback(watched.close)
        watched.steps(5, _TICK_S)
        yield watched
