"""One real ``keepstep run`` in a folder of the test, and what it left behind.

The run's processes inherit a mark in their environment; so every one of them is found, also those
that left their parents, sessions and groups.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import psutil

import keepstep
from keepstep.clock import SYSTEM
from keepstep.events import Event, read

T = TypeVar("T")
LIMIT_S = 60.0
"""How long anything may take before a test says that it did not happen."""
GONE_S = 10.0
"""How long processes may outlive an agent that was killed."""
_MARK = "PROCESS_TEST_MARK"
_SHM = Path("/dev/shm")
_ENTRY = "import sys; from keepstep.cli.main import main; sys.exit(main())"
SMALL_LIMITS = (
    *("--set", "heartbeat.min_limit_s=1"),
    *("--set", "heartbeat.interval_s=0.05"),
    *("--set", "heartbeat.start_limit_s=20"),
)
"""Flags with which a hang is found after a second instead of half a minute."""
LOOP = """
import os, sys, time
import keepstep

@keepstep.restartable
def main():
    while not os.path.exists(sys.argv[1]):
        keepstep.heartbeat()
        time.sleep(0.01)
main()
"""
"""A restartable script that counts steps until the file in its first argument exists."""


def wait_until(
    probe: Callable[[], T], what: str, limit_s: float = LIMIT_S, about: Callable[[], str] = str
) -> T:
    """Poll ``probe`` until it gives something true, and return that.

    Args:
        what: What is waited for. about: More to say when it does not come.
    """
    deadline = SYSTEM.mono() + limit_s
    pause = threading.Event()
    while True:
        found = probe()
        if found:
            return found
        if SYSTEM.mono() >= deadline:
            raise AssertionError(f"not within {limit_s:.0f} s: {what}\n{about()}")
        pause.wait(0.02)


def lives(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


class Job:
    """``keepstep run`` as a context manager; leaving it asserts that nothing is left.

    Args:
        folder: For the script, the output and (``run_dir``) the run.
        script: Source of the script; empty: none is written and ``arguments`` say what to run.
        flags: keepstep's flags. arguments: the script's.
        nproc: Ranks; 0: no such flag. environ: variables added to this process's.
        preload: Whether to leave ``rank.preload`` as it is by default (torch).
        run_dir: The run folder; by default ``run`` in ``folder``.
    """

    def __init__(
        self,
        folder: Path,
        script: str = "",
        *,
        flags: Sequence[str] = (),
        arguments: Sequence[str] = (),
        nproc: int = 2,
        environ: dict[str, str] | None = None,
        preload: bool = False,
        run_dir: Path | None = None,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.run_dir = run_dir or folder / "run"
        self._mark = secrets.token_hex(8)
        target = []
        if script:
            (folder / "script.py").write_text(textwrap.dedent(script))
            target = ["script.py"]
        options = ["--nproc-per-node", str(nproc)] if nproc else []
        options += [] if preload else ["--set", "rank.preload="]
        options += ["--run-dir", str(self.run_dir)]
        self._command = ["run", *options, *flags, *target, *arguments]
        source = str(Path(keepstep.__file__).parents[1])
        known = {**os.environ, **(environ or {})}.get("PYTHONPATH", "")
        self._environ = {
            **os.environ,
            **(environ or {}),
            "PYTHONPATH": f"{source}:{known}" if known else source,
            _MARK: self._mark,
        }
        self._shm_before = set(os.listdir(_SHM))
        self._process: subprocess.Popen[bytes] | None = None

    # --- life -------------------------------------------------------------------------------------

    def __enter__(self) -> Job:
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _ENTRY, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.folder,
                env=self._environ,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self.process
        killed = process.poll() is None or process.returncode == -signal.SIGKILL
        process.kill()
        process.wait(LIMIT_S)
        try:
            if error is None:
                self.assert_nothing_is_left(GONE_S if killed else 0.0)
            else:
                error.add_note(self.story())
        finally:
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The agent."""
        assert self._process is not None
        return self._process

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """The agent's exit code; a negative number is a signal's.

        An agent that ends by itself has ended everything else before.
        """
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"keepstep did not end within {limit_s:.0f} s") from None
        if code >= 0:
            self.assert_nothing_is_left(0.0)
        return code

    def signal(self, number: int) -> None:
        """Send a signal to the agent alone."""
        self.process.send_signal(number)

    def until(self, probe: Callable[[], T], what: str, limit_s: float = LIMIT_S) -> T:
        """``wait_until``, which fails at once if the agent ends before."""

        def look() -> T:
            ended = self.process.poll() is not None
            found = probe()
            if ended and not found:
                raise AssertionError(f"keepstep ended before: {what}")
            return found

        return wait_until(look, what, limit_s)

    # --- what it says and writes ------------------------------------------------------------------

    @property
    def out(self) -> str:
        """stdout so far."""
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        """stderr so far."""
        return (self.folder / "err").read_text()

    @property
    def ending(self) -> str:
        """keepstep's last sentence: why the run ended, with the exit code."""
        lines = [
            line for line in self.err.splitlines() if line.endswith(")") and "(exit code" in line
        ]
        return lines[-1] if lines else ""

    def log(self, rank: int, incarnation: int = 0, stream: str = "stdout") -> str:
        """A rank's log."""
        name = f"rank-{rank:05d}-{incarnation:03d}.{stream}.log"
        return (self.run_dir / "logs" / name).read_text()

    def events(self, *kinds: str) -> list[Event]:
        """Events of these kinds (none given: all) so far, in time order."""
        if not (self.run_dir / "events").is_dir():
            return []
        return [one for one in read(self.run_dir) if not kinds or one.kind in kinds]

    def data(self, kind: str) -> list[dict[str, object]]:
        """The data of all events of ``kind`` so far."""
        return [one.data for one in self.events(kind)]

    def causes(self) -> list[tuple[object, object, object]]:
        """(cause, guilty rank, level) of each restart so far."""
        return [(d["cause"], d["guilty"], d["level"]) for d in self.data("restart.cause")]

    def rank_pids(self) -> list[int]:
        """By rank, the newest process."""
        newest = {one.rank: one.data["pid"] for one in self.events("rank.start")}
        return [int(str(newest[rank])) for rank in sorted(newest, key=lambda rank: rank or 0)]

    def steps(self, round: int) -> dict[int | None, int]:
        """By rank, the newest completed step of a round."""
        return {e.rank: e.step or 0 for e in self.events("step.end") if e.round == round}

    def running(self, round: int = 1, nproc: int = 2, step: int = 5) -> list[int]:
        """Wait until every rank has completed ``step`` in ``round``; returns the pids by rank."""

        def look() -> bool:
            done = self.steps(round)
            return len(done) == nproc and min(done.values()) >= step

        self.until(look, f"all {nproc} ranks complete step {step} in round {round}")
        return self.rank_pids()

    def story(self) -> str:
        """All there is to say when a test failed."""
        lines = [f"{e.src} rank={e.rank} round={e.round} {e.kind} {e.data}" for e in self._told()]
        told = "\n".join(line[:400] for line in lines)
        logs = [
            f"--- {path.name}\n{path.read_text()[-2000:]}"
            for path in sorted(self.run_dir.glob("logs/*.log"))
            if path.stat().st_size
        ]
        code = self.process.returncode
        parts = [
            f"exit code {code}",
            "--- stdout",
            self.out[-2000:],
            "--- stderr",
            self.err[-4000:],
        ]
        return "\n".join([*parts, "--- events", told, *logs])

    def _told(self) -> list[Event]:
        return [event for event in self.events() if event.kind != "step.end"]

    # --- processes --------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """Every living process that carries the run's mark, the agent too."""
        wanted = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return [pid for pid in found if lives(pid)]

    def helper(self, module: str) -> int:
        """The process of the agent that runs ``python -m keepstep.<module>``, or its file."""
        names = (f"keepstep.{module}", f"keepstep/{module.replace('.', '/')}.py")

        def look() -> int:
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if any(name in word for word in child.cmdline() for name in names):
                        return int(child.pid)
            return 0

        return self.until(look, f"the {module} process is there")

    def listening(self) -> list[str]:
        """Ports that the run's processes listen on."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(psutil.Error):
                found += [
                    f"{one.laddr} of process {pid}"
                    for one in psutil.Process(pid).net_connections()
                    if one.status == psutil.CONN_LISTEN
                ]
        return found

    def assert_nothing_is_left(self, limit_s: float) -> None:
        """No process of the run, and so no port of its own, and no named shared memory."""
        left = self.pids()
        deadline = SYSTEM.mono() + limit_s
        pause = threading.Event()
        while left and SYSTEM.mono() < deadline:
            pause.wait(0.02)
            left = self.pids()
        told = []
        for pid in left:
            with contextlib.suppress(psutil.Error):
                told.append(f"{pid}: {' '.join(psutil.Process(pid).cmdline())}")
        assert not told, f"still running after {limit_s:.0f} s: {told}"
        named = set(os.listdir(_SHM)) - self._shm_before
        assert not {name for name in named if "keepstep" in name}


def finish_file(folder: Path) -> Path:
    """The file whose existence ends the script ``LOOP``."""
    return folder / "finish"
