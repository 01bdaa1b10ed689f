"""Each fault kind strikes for real, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from keepstep.errors import InternalError, UsageError
from keepstep.faults import Fault, cgroup, triggers

LIMIT_S = 60.0
CHILD = """
import sys
from keepstep.faults import Fault, triggers
{before}
triggers.fire(Fault(kind={kind!r}, step=3, rank=1, index=0), run="test run/1")
sys.stdout.write("went on")
"""


def fault(kind: str) -> Fault:
    return Fault(kind=kind, step=3, rank=1, index=0)


def start(kind: str, before: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD.format(kind=kind, before=before)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Woken(Exception):
    """Ends a fake sleep that would not end."""


class Impatient:
    """A clock whose third sleep raises."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def wall(self) -> float:
        return 0.0

    def mono(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.slept) == 3:
            raise Woken


def test_exception_raises_an_error_that_says_it_was_injected() -> None:
    with pytest.raises(triggers.InjectedFault, match="injected exception in step 3 on rank 1"):
        triggers.fire(fault("exception"))
    assert issubclass(triggers.InjectedFault, RuntimeError)


def test_hang_sleeps_again_and_again() -> None:
    clock = Impatient()
    with pytest.raises(Woken):
        triggers.fire(fault("hang"), clock=clock)
    assert len(clock.slept) == 3


def test_desync_calls_back_and_without_a_callback_says_what_it_needs() -> None:
    called: list[int] = []
    triggers.fire(fault("desync"), desync=lambda: called.append(1))
    assert called == [1]
    with pytest.raises(InternalError, match="needs a process group"):
        triggers.fire(fault("desync"))


@pytest.mark.parametrize(("kind", "code"), [("kill", -signal.SIGKILL), ("exit", 3)])
def test_the_process_ends_as_the_kind_says(kind: str, code: int) -> None:
    child = start(kind)
    out, err = child.communicate(timeout=LIMIT_S)
    assert (child.returncode, out, err) == (code, "", "")


def test_stop_stops_the_process_until_it_is_continued() -> None:
    child = start("stop")
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    child.send_signal(signal.SIGCONT)
    out, _ = child.communicate(timeout=LIMIT_S)
    assert (child.returncode, out) == (0, "went on")


SPY = """
import faulthandler, linecache, os, threading
main = threading.get_ident()
def other_thread():
    # The main thread gives the lock away only by a call that releases it: if this code ever runs
    # while it stands at that call, the lock was not held.
    while True:
        frame = sys._current_frames()[main]
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if frame.f_code.co_name == "_spin" and line.startswith("stuck("):
            os._exit(9)
        threading.Event().wait(0.001)
sys.setswitchinterval(1000)
threading.Thread(target=other_thread, daemon=True).start()
faulthandler.dump_traceback_later(0.5, exit=True)  # needs no interpreter lock
"""


def test_spin_lets_no_other_thread_of_the_process_run() -> None:
    child = start("spin", SPY)
    _, err = child.communicate(timeout=LIMIT_S)
    assert child.returncode == 1
    assert "in _spin" in err


def test_oom_is_killed_by_the_kernel_and_the_agents_side_can_tell() -> None:
    reason = cgroup.available()
    if reason:
        pytest.skip(f"no memory cgroup: {reason}")
    child = start("oom")
    out, err = child.communicate(timeout=LIMIT_S)
    folder = cgroup.Limited(cgroup.group_name("test run/1", child.pid)).path
    try:
        assert (child.returncode, out, err) == (-signal.SIGKILL, "", "")
        assert folder.is_dir()
        assert cgroup.collect("test run/1", child.pid) == 1
        assert not folder.exists()
    finally:
        if folder.exists():
            folder.rmdir()


def test_oom_without_the_means_is_refused_before_the_run_and_when_it_fires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroup, "available", lambda: "the folder is not writable")
    triggers.check_means([fault("kill")])
    with pytest.raises(UsageError, match="the folder is not writable"):
        triggers.check_means([fault("kill"), fault("oom")])
    with pytest.raises(UsageError, match="needs a memory cgroup"):
        triggers.fire(fault("oom"))
