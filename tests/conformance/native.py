"""The native engine under the conformance suites: how each seam is set up."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from keepstep import shm
from keepstep.agent.hangs import HangWatch, bounds_of
from keepstep.config import Config
from keepstep.config.settings import HeartbeatSettings
from keepstep.ports import Heartbeat
from keepstep.rank.heartbeat import NativeHeartbeat
from keepstep.rank.runtime import Runtime
from keepstep.shm import Board, Phase
from keepstep.testing import FakeClock
from keepstep.testing.conformance.heartbeat import STEPS, Seen
from tests.rank.starts import start

_TICK_S = 0.1
_CONFIG = dataclasses.replace(
    Config(),
    heartbeat=HeartbeatSettings(min_limit_s=2.0, start_limit_s=100.0, section_limit_s=20.0),
)


@dataclass
class _Process:
    """The rank as its agent sees it."""

    board: Board
    ticket: int = 1
    rank: int = 1
    inc: int = 0
    pid: int = field(default_factory=os.getpid)
    adopted: bool = True
    resumed_at: int = 0


class WatchedBoard:
    """A rank's board with the agent's watch over it, on a clock that stands still by itself."""

    step_limit_s = _CONFIG.heartbeat.min_limit_s
    section_limit_s = _CONFIG.heartbeat.section_limit_s

    def __init__(self, folder: Path, rank: Board, agent: Board, clock: FakeClock) -> None:
        self._runtime = Runtime(start(folder), _CONFIG, None, rank)  # type: ignore[arg-type]
        self._rank, self._clock = rank, clock
        self._watch = HangWatch[_Process](bounds_of(_CONFIG), folder, _TICK_S)
        self._process = _Process(agent)
        self.heartbeat: Heartbeat = NativeHeartbeat(self._runtime)
        self._steps(5, _TICK_S)

    def _steps(self, count: int, step_s: float) -> bool:
        hung = False
        for step in range(self._runtime.step + 1, self._runtime.step + 1 + count):
            self.heartbeat.beat(step)
            hung = self.silent_for(step_s) or hung
            self._runtime.end_step(step, None)
        return hung

    def seen(self) -> Seen:
        board = self._process.board
        in_steps = board.phase in (Phase.STEP, Phase.SECTION)
        return Seen(board.step if in_steps else None, board.label)

    def silent_for(self, seconds: float, *, in_call: bool = False) -> bool:
        hung = False
        for _ in range(round(seconds / _TICK_S)):
            self._clock.advance(_TICK_S)
            self._rank.beat(self._clock.mono(), 0)
            stalled, _ = self._watch.look([self._process], self._clock.mono())
            hung = hung or stalled is not None
        return hung

    def train(self, step_s: float) -> bool:
        return self._steps(STEPS, step_s)

    def stop(self, *, gone: bool) -> None:
        """From now on nobody looks, and nobody takes lines out of the ring."""
        if gone:
            self._process.board.close()


@contextlib.contextmanager
def heartbeat(folder: Path) -> Iterator[WatchedBoard]:
    """A native heartbeat and the agent's watch."""
    fd = shm.create()
    rank, agent = Board(fd), Board(fd)
    os.close(fd)
    clock = FakeClock()
    with (
        contextlib.closing(rank),
        contextlib.closing(agent),
        mock.patch("keepstep.rank.runtime.SYSTEM", clock),
    ):
        yield WatchedBoard(folder, rank, agent, clock)
