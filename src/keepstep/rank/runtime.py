"""What one rank's process holds together: its place, its settings, its board, events and faults.

There is at most one ``Runtime`` in a process, made when a parked process becomes a rank. A script
that was not started by ``keepstep run`` has none.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from keepstep import events
from keepstep.clock import SYSTEM
from keepstep.config import Config
from keepstep.errors import UsageError
from keepstep.faults import plan as fault_plan
from keepstep.faults import triggers
from keepstep.rank.control import Control
from keepstep.shm import Board, Phase
from keepstep.wire.messages import Go, Start


class Runtime:
    """The rank behind the running script.

    Args:
        start: What the agent said this process is. config: settings. control, board: see there.
    """

    def __init__(self, start: Start, config: Config, control: Control, board: Board) -> None:
        self.start = start
        self.config = config
        self.control = control
        self.board = board
        self.run_dir = Path(start.run_dir)
        self.recorder = events.Recorder(
            board.put_line,
            run=start.run,
            src="rank",
            node=start.node,
            rank=start.rank,
            world=start.world,
        )
        self.recorder.round = start.round
        self.faults = fault_plan.FaultPlan.parse(config.faults.inject, world=start.world)
        self.driven = False
        """Whether the script counts its own steps through a Job."""
        self.step = 0
        """Step in progress, or last completed between steps."""
        self._begun = SYSTEM.mono()
        self.sequence_numbers: Callable[[], dict[str, int]] = dict
        self.desync: Callable[[bool], None] | None = None
        """Set per round when the plan has a desync fault: True for the rank that skips."""
        self.desync_due: set[int] = set()
        self.store = ""
        """HOST:PORT of the store outside the ranks, where another launcher started this rank."""
        self.own_backend = ""
        """Backend of the process group that keepstep made; empty while there is none."""
        self._warned = False
        self.stack_file: TextIO | None = None
        self._beats = threading.Thread(target=self._beat, name="keepstep-beat", daemon=True)

    # --- heartbeat ------------------------------------------------------------------------------

    def start_beating(self) -> None:
        """Start the heartbeat thread; it lives as long as the process."""
        self._beats.start()

    def _beat(self) -> None:
        interval = self.config.heartbeat.interval_s
        told: dict[str, int] = {}
        while True:
            numbers = self.sequence_numbers()
            if numbers != told:
                self.board.put_sequence_numbers(numbers)
                told = numbers
            self.board.beat(SYSTEM.mono(), sum(numbers.values()))
            SYSTEM.sleep(interval)

    # --- rounds and steps -------------------------------------------------------------------------

    def enter_round(self, go: Go) -> None:
        """A new round starts from step ``go.resume``."""
        self.recorder.round = go.round
        self.step = go.resume
        self.board.enter_round(go.round, go.resume)
        self.board.enter(Phase.LOAD, SYSTEM.mono())

    def begin_step(self, step: int) -> None:
        """``step`` is in progress."""
        self.step = step
        self._begun = SYSTEM.mono()
        self.board.begin_step(step, self._begun)

    def end_step(self, step: int, loss: float | None) -> None:
        """``step`` is completed."""
        seconds = SYSTEM.mono() - self._begun
        self.step = step
        self.board.end_step(step, seconds, math.nan if loss is None else loss)
        self.recorder.emit(events.StepEnd(s=round(seconds, 6), loss=loss), step=step)

    def leave_steps(self) -> None:
        """The loop is over: what follows is not a step."""
        self.enter(Phase.SCRIPT)

    def enter(self, phase: Phase, label: str = "") -> None:
        """The main thread is now in ``phase``."""
        self.board.enter(phase, SYSTEM.mono(), label)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """A named span with its own learned limit and goodput category."""
        phase, label = self.board.phase, self.board.label
        begun = SYSTEM.mono()
        self.recorder.emit(events.SectionBegin(name=name), step=self.step)
        self.enter(Phase.SECTION, name)
        try:
            yield
        finally:
            seconds = round(SYSTEM.mono() - begun, 6)
            self.recorder.emit(events.SectionEnd(name=name, s=seconds), step=self.step)
            self.enter(phase, label)

    def accepts_init(self, backend: str | None) -> bool:
        """Whether a script's own ``init_process_group`` is one of what keepstep has made already.

        Raises:
            UsageError: it asks for another backend.
        """
        if not self.own_backend:
            return False
        made = self.own_backend.replace(":", ",").split(",")
        if backend not in (None, "", self.own_backend, *made):
            raise UsageError(
                f"the script asks for the backend {backend}, keepstep.run has made {made[-1]}",
                advice=f"leave init_process_group out, or set restart.backend = {backend}",
            )
        if self.start.rank == 0 and not self._warned:
            sys.stderr.write(
                "keepstep: warning: init_process_group in the script does nothing: keepstep.run "
                "has made the process group already\n"
            )
        self._warned = True
        return True

    # --- injected faults ------------------------------------------------------------------------

    def fire_due_faults(self, step: int) -> None:
        """Fire what the plan says for this rank at ``step``; each fault once in a run."""
        if not self.faults.faults:
            return
        for fault in self.faults.at(step):
            mine = fault.rank == self.start.rank
            if fault.kind == "desync":
                if self.desync is not None and fault.index in self.desync_due:
                    self.desync_due.discard(fault.index)
                    if mine:
                        self._claim(fault)
                    self.desync(mine)
                elif mine and self.desync is None and self._unfired(fault):
                    raise UsageError(
                        f"the fault {fault} needs a script that uses keepstep.run",
                        advice="there is no collective of ours to skip; use exception or hang",
                    )
            elif mine and self._claim(fault):
                triggers.fire(fault, run=self.start.run)

    def _claim(self, fault: fault_plan.Fault) -> bool:
        if not fault_plan.claim(self.run_dir, fault.index):
            return False
        self.recorder.emit(
            events.FaultInjected(fault=fault.kind, index=fault.index), step=fault.step
        )
        return True

    def _unfired(self, fault: fault_plan.Fault) -> bool:
        return not fault_plan.claimed(self.run_dir, fault.index)

    def expect_desync(self) -> bool:
        """Note which desync faults are still to come; the same on every rank at a round's start.

        Returns:
            Whether there are any.
        """
        self.desync_due = {
            fault.index
            for fault in self.faults.faults
            if fault.kind == "desync" and self._unfired(fault)
        }
        return bool(self.desync_due)


class _Holder:
    """The process's runtime."""

    current: Runtime | None = None


def set_current(runtime: Runtime | None) -> None:
    """Make ``runtime`` the process's own."""
    _Holder.current = runtime


def current() -> Runtime | None:
    """The process's runtime; None in a script that ``keepstep run`` did not start."""
    return _Holder.current
