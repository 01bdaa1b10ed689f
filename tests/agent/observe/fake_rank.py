"""A rank without torch, under ``fake_launcher``: it takes its board and writes events as real ones
do, and it meets the others through files.

Arguments: steps, then faults ``KIND@STEP:RANK``, each once unless ``KIND`` ends in ``!``. With
``in_process`` among them a failure makes all ranks leave the round and join the next one, as with
NVRx's in-process restart; without it, the process ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from keepstep import events, linux
from keepstep.clock import SYSTEM
from keepstep.config import env
from keepstep.rank.attached import attach
from keepstep.rank.bootstrap import _answer_stack_signal
from keepstep.shm import Phase
from keepstep.wire.messages import Failed, Go

_SAVE_EVERY = 5
_STEP_S = 0.02
_HANG_S = 2.0
"""How long a hung rank lives before something like NVRx's monitor kills it."""
_SLOW_S = 2.0
"""Longer than the observer's limit, which is two thirds of the soft limit of ``watched``."""


class _Leave(Exception):
    """Another rank has failed."""


class FakeRank:
    """One process of one rank."""

    def __init__(self, arguments: list[str]) -> None:
        self.runtime = attach(arguments)
        env.update({linux.OWNER: str(os.getpid())})
        self.steps = int(arguments[0])
        self.in_process = "in_process" in arguments
        self.faults = [one for one in arguments[1:] if "@" in one]
        self.rank, self.world = self.runtime.start.rank, self.runtime.start.world
        self.place = self.runtime.run_dir / "fake"
        self.place.mkdir(exist_ok=True)
        self.saved = self.place / "saved"
        self.attempts = self.entered = self.fatal = 0
        self.runtime.sequence_numbers = lambda: {"world": self.entered}
        self.pause = threading.Event()
        _answer_stack_signal(self.runtime)
        self.runtime.start_beating()

    def run(self) -> int:
        """To the end."""
        self.runtime.enter(Phase.SCRIPT)
        number = 100 * int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        while True:
            self.attempts += 1
            number += 1
            try:
                self._round(number)
                return 0
            except _Leave:
                continue
            except RuntimeError as error:
                self._report(error)
                (self.place / f"abort-{number}").touch()
                if not self.in_process:
                    return 1

    def _round(self, number: int) -> None:
        runtime = self.runtime
        runtime.enter(Phase.WAIT)
        (self.place / f"join-{number}-{self.rank}").touch()
        while any(not (self.place / f"join-{number}-{r}").exists() for r in range(self.world)):
            self.pause.wait(0.005)
        runtime.recorder.round = number
        runtime.enter_round(Go(term=0, round=number, resume=0, folder=""))
        runtime.recorder.emit(events.RankJoined(pid=os.getpid()))
        while runtime.start.node == 0 and runtime.board.admitted < number:
            self.pause.wait(0.002)
        (self.place / f"begun-{number}-{self.rank}").touch()
        step = int(self.saved.read_text()) if self.saved.exists() else 0
        if step:
            runtime.recorder.emit(events.RestoreBegin(tier="storage"), step=step)
            done = events.RestoreEnd(tier="storage", s=0.0, bytes=1)
            runtime.recorder.emit(done, step=step)
        stop = 0
        while step < self.steps and not 0 < stop <= step:
            step += 1
            runtime.begin_step(step)
            self._faults(step)
            self.pause.wait(_STEP_S)
            self._meet(number, step)
            runtime.end_step(step, 1.0 / step)
            stop = stop or self._stop_after(step)
            if step % _SAVE_EVERY == 0 or 0 < stop <= step:
                self._save(step)
        runtime.leave_steps()

    def _meet(self, number: int, step: int) -> None:
        """As a collective: wait for the others, unless one of them has failed."""
        self.entered += 1
        (self.place / f"at-{number}-{self.rank}").write_text(f"{step}.")
        while True:
            if (self.place / f"abort-{number}").exists():
                raise _Leave
            files = [self.place / f"at-{number}-{rank}" for rank in range(self.world)]
            if all(self._reached(file) >= step for file in files):
                return
            self.pause.wait(0.002)

    def _stop_after(self, step: int) -> int:
        """The step to stop after, 0: none. Nobody is more than a step ahead of the others."""
        agreed = self.place / "stop"
        if self.runtime.board.stop_signal and not agreed.exists():
            own = self.place / f"stop-{self.rank}"
            own.write_text(str(step + 2))
            with contextlib.suppress(FileExistsError):
                os.link(own, agreed)
        if not agreed.exists():
            return 0
        if self.runtime.board.stop_signal == 0 and self.runtime.start.local_rank == 0:
            self.runtime.recorder.emit(events.StopNotice(signal="SIGTERM"))
        return int(agreed.read_text())

    def _reached(self, file: Path) -> int:
        try:
            text = file.read_text()
        except FileNotFoundError:
            return 0
        return int(text[:-1]) if text.endswith(".") else 0

    def _save(self, step: int) -> None:
        if self.rank == 0:
            (self.place / "saving").write_text(str(step))
            os.replace(self.place / "saving", self.saved)
            folder = f"step-{step:08d}"
            commit = events.CheckpointCommit(folder=folder, bytes=10, save_s=0.01)
            self.runtime.recorder.emit(commit, step=step)

    def _faults(self, step: int) -> None:
        for index, fault in enumerate(self.faults):
            kind, _, place = fault.partition("@")
            fired = self.place / f"fired-{index}"
            if place != f"{step}:{self.rank}" or fired.exists():
                continue
            if not kind.endswith("!"):
                fired.touch()
            told = events.FaultInjected(fault=kind.rstrip("!"), index=index)
            self.runtime.recorder.emit(told, step=step)
            self._fire(kind.rstrip("!"))

    def _fire(self, kind: str) -> None:
        if kind in ("exception", "fatal"):
            self.fatal = 64 if kind == "fatal" else 0
            raise RuntimeError("a fault")
        if kind == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if kind == "slow":
            self.pause.wait(_SLOW_S)
        if kind == "litter":
            self._litter()
        if kind in ("kill", "litter"):
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exit":
            os._exit(7)
        if kind == "hang":
            end = threading.Timer(_HANG_S, os.kill, (os.getpid(), signal.SIGKILL))
            end.daemon = True
            end.start()
        if kind in ("hang", "stubborn"):
            while True:
                self.pause.wait(60)

    def _litter(self) -> None:
        """Leave a child behind, and something that has left the session without an exec."""
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                (self.place / "litter").write_text(f"{child.pid} {os.getpid()}\n")
                while True:
                    signal.pause()
            os._exit(0)
        os.wait()
        while not (self.place / "litter").exists() or not (self.place / "litter").read_text():
            self.pause.wait(0.005)

    def _report(self, error: Exception) -> None:
        self.runtime.control.send(
            Failed(
                inc=self.runtime.start.inc,
                round=self.runtime.recorder.round or 0,
                failure="exception",
                error=f"RuntimeError: {error}",
                location="train.py:7",
                step=self.runtime.step,
                t=SYSTEM.mono(),
                stack="Traceback: here\n",
                fatal=self.fatal,
                fresh=self.attempts == 1,
            )
        )
        sys.stderr.write(f"RuntimeError: {error}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    print("hello", flush=True)
    code = FakeRank(sys.argv[1:]).run()
    print(f"rank ends with {code}", flush=True)
    os._exit(code)
