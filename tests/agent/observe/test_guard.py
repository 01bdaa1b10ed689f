"""The guard: a launcher is never alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import keepstep
from keepstep.agent.observe.guard import NO_PROGRAM
from tests.process.job import lives, wait_until

_SOURCE = str(Path(keepstep.__file__).parents[1])


@contextmanager
def _guarded(*command: str) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    ours, theirs = socket.socketpair()
    guard = [sys.executable, "-m", "keepstep.agent.observe.guard", "--fd", str(theirs.fileno())]
    with (
        ours,
        subprocess.Popen(
            [*guard, "--", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONPATH": _SOURCE},
        ) as process,
    ):
        theirs.close()
        yield process, ours


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_launcher_s_exit_code_comes_back() -> None:
    for script, code in (("exit 7", b"7"), ("exit 0", b"0"), ("kill -9 $$", b"-9")):
        with _guarded("sh", "-c", script) as (process, sock):
            assert sock.recv(64) == code
            assert process.wait() == 0


def test_a_signal_is_passed_on_to_the_launcher_alone() -> None:
    script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.01; done"
    with _guarded("sh", "-c", script) as (process, sock):
        assert _line(process) == "ready"
        sock.send(bytes([signal.SIGTERM]))
        assert sock.recv(64) == b"9"


def test_what_the_launcher_left_behind_is_ended_before_its_exit_code_is_told() -> None:
    with _guarded("sh", "-c", "setsid sleep 1000 >&2 & echo $!; exit 3") as (process, sock):
        orphan = int(_line(process))
        assert sock.recv(64) == b"3"
        assert not lives(orphan)


def test_without_keepstep_run_the_launcher_and_all_it_started_are_ended() -> None:
    with _guarded("sh", "-c", "setsid sleep 1000 >&2 & echo $$ $!; wait") as (process, sock):
        family = [int(pid) for pid in _line(process).split()]
        assert all(map(lives, family))
        sock.close()
        assert process.wait() == 0
        assert not any(map(lives, family))


def test_a_killed_guard_takes_the_launcher_with_it() -> None:
    with _guarded("sh", "-c", "echo $$; exec sleep 1000") as (process, _):
        launcher = int(_line(process))
        process.kill()
        wait_until(lambda: not lives(launcher), "the launcher has ended")


def test_a_program_that_does_not_exist_is_told() -> None:
    with _guarded("/no/such/launcher") as (process, sock):
        assert sock.recv(64) == str(NO_PROGRAM).encode()
        assert "/no/such/launcher cannot be started" in _line(process)


def test_sockets_that_a_killed_launcher_of_nvrx_leaves_are_removed() -> None:
    make = (
        "import os, socket, sys; "
        "s = socket.socket(socket.AF_UNIX); "
        "s.bind(sys.argv[1] % os.getpid()); "
        "os.kill(os.getpid(), 9)"
    )
    path = Path(tempfile.gettempdir(), "_ft_launcher%d_rmon0.socket")
    before = set(path.parent.glob("_ft_launcher*"))
    with _guarded(sys.executable, "-c", make, str(path)) as (process, sock):
        assert sock.recv(64) == b"-9"
        process.wait()
    made = set(path.parent.glob("_ft_launcher*")) - before
    assert not [one for one in made if not lives(_pid(one))]


def _pid(path: Path) -> int:
    """The process in a socket's name; other runs on this machine may have some."""
    digits = path.name.removeprefix("_ft_launcher").split("_")[0].split(".")[0]
    return int(digits)
