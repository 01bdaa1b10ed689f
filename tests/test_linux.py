"""Linux calls: nothing outlives the process it belongs to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import keepstep
from keepstep import linux
from tests.process.job import lives, wait_until

_SOURCE = str(Path(keepstep.__file__).parents[1])
_PID_OF_NOBODY = 2**22 + 1


def _python(code: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": _SOURCE, **environ},
    )


def _first_line(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def test_a_tree_is_killed_with_those_who_left_the_session_and_the_orphans_in_it() -> None:
    with _python(
        """
        import os, subprocess, time
        os.setsid()
        sleep = ["sleep", "1000"]
        out = subprocess.DEVNULL
        own = [subprocess.Popen(sleep, stdout=out).pid]
        own.append(subprocess.Popen(sleep, stdout=out, start_new_session=True).pid)
        orphan = ["sh", "-c", "sleep 1000 >&2 & echo $!"]
        own.append(int(subprocess.run(orphan, stdout=subprocess.PIPE).stdout))
        print(*own, flush=True)
        time.sleep(1000)
        """
    ) as process:
        family = _first_line(process)
        assert len(family) == 3
        assert all(map(lives, family))
        linux.kill_tree(process.pid)
        assert process.wait() == -signal.SIGKILL
        wait_until(lambda: not any(map(lives, family)), "all have ended")


def test_killing_the_tree_of_nobody_is_no_error() -> None:
    linux.kill_tree(_PID_OF_NOBODY)


def test_a_subreaper_ends_its_children_and_adopted_ones_but_those_it_is_to_keep() -> None:
    with _python(
        """
        import subprocess, sys
        from keepstep import linux
        linux.become_subreaper()
        sleep = ["sleep", "1000"]
        kept = subprocess.Popen(sleep, stdout=subprocess.DEVNULL)
        child = subprocess.Popen(sleep, stdout=subprocess.DEVNULL)
        orphan = ["sh", "-c", "setsid sleep 1000 >&2 & echo $!"]
        made = int(subprocess.run(orphan, stdout=subprocess.PIPE).stdout)
        assert linux.children() == {kept.pid, child.pid, made}, linux.children()
        linux.end_children(keep={kept.pid}, limit_s=30.0)
        assert linux.children() == {kept.pid}, linux.children()
        assert kept.poll() is None
        linux.end_children(keep=(), limit_s=30.0)
        print(kept.pid, child.pid, made, flush=True)
        child.returncode = kept.returncode = 0
        """
    ) as process:
        family = _first_line(process)
        assert process.wait() == 0
    assert not any(map(lives, family))


def test_who_dies_with_its_parent_is_killed_when_the_parent_is() -> None:
    with _python(
        """
        import os, time
        from keepstep import linux
        parent = os.getpid()
        if os.fork() == 0:
            linux.die_with_parent(parent)
            print(os.getpid(), flush=True)
        time.sleep(1000)
        """
    ) as process:
        [child] = _first_line(process)
        assert lives(child)
        process.kill()
        process.wait()
        wait_until(lambda: not lives(child), "the child has ended")


def test_who_comes_too_late_to_die_with_its_parent_dies_at_once() -> None:
    with _python(
        f"""
        from keepstep import linux
        linux.die_with_parent({_PID_OF_NOBODY})
        """
    ) as process:
        assert process.wait() == -signal.SIGKILL


def test_the_owner_is_read_from_the_environment_a_process_was_started_with() -> None:
    def owner_with(**environ: str) -> int:
        with _python("print(1, flush=True); input()", **environ) as process:
            _first_line(process)
            found = linux.owner(process.pid)
            process.kill()
        return found

    assert owner_with(KEEPSTEP_RANK_PID="4711") == 4711
    assert owner_with(KEEPSTEP_RANK_PID="") == 0
    assert owner_with() == 0
    assert linux.owner(_PID_OF_NOBODY) == 0


def test_the_table_of_processes_holds_this_one_with_its_parent_and_session() -> None:
    assert linux.parents()[os.getpid()] == (os.getppid(), os.getsid(0))
