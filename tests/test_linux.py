"""Linux calls: nothing outlives the process it belongs to."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import keepstep
from keepstep import linux, shm
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


def test_how_a_child_ended_can_be_read_until_its_parent_has_waited_for_it() -> None:
    for code, text in ((3, "import sys; sys.exit(3)"), (-9, "import os; os.kill(os.getpid(), 9)")):
        process = subprocess.Popen([sys.executable, "-c", text])
        found = wait_until(lambda child=process: linux.exit_code(child.pid), "it has ended")  # type: ignore[misc]
        assert found == code
        assert process.wait() == code
        assert linux.exit_code(process.pid) is None
    assert linux.exit_code(os.getpid()) is None


def test_what_an_ended_rank_owned_is_ended_with_its_descendants_and_nothing_else() -> None:
    sleep = ["sleep", "1000"]
    dead = subprocess.Popen(["true"])
    dead.wait()
    owned = subprocess.Popen(
        ["sh", "-c", "sleep 1000 & echo $!; wait"],
        env={**os.environ, linux.OWNER: str(dead.pid)},
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    [child] = _first_line(owned)
    other = subprocess.Popen(sleep, env={**os.environ, linux.OWNER: str(os.getpid())})
    linux.end_owned(dead.pid)
    assert owned.wait() == -signal.SIGKILL
    wait_until(lambda: not lives(child), "its child has ended")
    assert other.poll() is None
    other.kill()
    other.wait()
    assert owned.stdout is not None
    owned.stdout.close()


def test_the_orphans_of_a_session_are_ended_though_its_leader_is_gone() -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 1000 >&2 & echo $!"],
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as leader:
        [orphan] = _first_line(leader)
        leader.wait()
        assert lives(orphan)
        linux.end_owned(leader.pid)
        wait_until(lambda: not lives(orphan), "the orphan has ended")


def test_only_what_was_started_with_the_variables_and_early_enough_is_ended() -> None:
    def sleeper(**variables: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "1000"], env={**os.environ, **variables})

    wanted = {"PROCESS_TEST_ONE": "1", "PROCESS_TEST_TWO": "2"}
    old, half = sleeper(**wanted), sleeper(PROCESS_TEST_ONE="1")
    assert linux.started_with(old.pid, "PROCESS_TEST_TWO") == "2"
    assert linux.started_with(half.pid, "PROCESS_TEST_TWO") == ""
    begun = linux.uptime()
    linux.end_older(wanted, begun - 60.0)
    assert [old.poll(), half.poll()] == [None, None]
    linux.end_older(wanted, begun + 60.0)
    assert old.wait() == -signal.SIGKILL
    assert half.poll() is None
    half.kill()
    half.wait()


def test_a_resource_tracker_outlives_the_tree_until_it_has_cleaned_up() -> None:
    code = """
    import multiprocessing, sys
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    from multiprocessing import resource_tracker
    print(semaphore._semlock.name, resource_tracker._resource_tracker._pid, flush=True)
    sys.stdin.read()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with child:
        assert child.stdout is not None
        name, tracker = child.stdout.readline().split()
        path = Path("/dev/shm") / f"sem.{name.lstrip('/')}"
        assert path.exists() and linux.is_tracker(int(tracker))
        linux.kill_tree(child.pid)
        child.wait()
        wait_until(lambda: not lives(int(tracker)), "the tracker has ended")
        assert not path.exists()


def test_a_forked_daemon_still_has_its_ranks_board_mapped() -> None:
    fd = shm.create()
    board = shm.Board(fd)
    inode = os.fstat(fd).st_ino
    os.close(fd)
    try:
        assert linux.mapped(os.getpid(), shm.NAME) == {inode}
        assert linux.mapped(os.getpid(), "another") == set()
    finally:
        board.close()
    assert linux.mapped(os.getpid(), shm.NAME) == set()
    assert linux.mapped(2**22 + 1, shm.NAME) == set()


def test_a_process_that_has_ended_has_no_memory_any_more() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not linux.ending(child.pid)
    child.kill()
    wait_until(lambda: linux.ending(child.pid), "it is a zombie")
    child.communicate()
    assert linux.ending(child.pid)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("old_kernel", [False, True])
def test_every_page_has_its_memory_afterwards(
    old_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old_kernel:
        monkeypatch.setattr(linux, "_POPULATE_WRITE", 9999)
    size = (17 << 20) + 4096
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as buffer:
        assert os.fstat(fd).st_blocks == 0
        assert linux.populate(buffer, fd)
        assert os.fstat(fd).st_blocks * 512 == size
        assert buffer[size - 1] == 0
    os.close(fd)


def test_what_is_there_stays_and_the_rest_is_left_when_it_is_told_to_stop() -> None:
    size = 64 << 20
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    asked: list[bool] = []

    def stopped() -> bool:
        asked.append(len(asked) == 2)
        return asked[-1]

    with mmap.mmap(fd, size) as buffer:
        buffer[5] = 7
        assert not linux.populate(buffer, fd, stopped)
        assert os.fstat(fd).st_blocks * 512 == 32 << 20
        assert buffer[5] == 7
    os.close(fd)


def test_memory_that_cannot_be_had_is_an_error_and_no_signal() -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, 1 << 20)
    with mmap.mmap(fd, 1 << 20) as buffer:
        os.ftruncate(fd, 4096)  # pages that no longer exist
        with pytest.raises(OSError, match=r"Bad address|allocate"):
            linux.populate(buffer, fd)
    os.close(fd)


def test_what_a_process_does_is_told_by_a_letter_and_when_it_started_by_a_number() -> None:
    child = subprocess.Popen(["sleep", "100"])
    started = linux.started_ticks(child.pid)
    assert started >= linux.started_ticks(os.getpid()) > 0
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: linux.state(child.pid) == "T", "it is stopped")
    assert linux.started_ticks(child.pid) == started
    child.kill()
    wait_until(lambda: linux.state(child.pid) == "Z", "it has ended")
    assert linux.started_ticks(child.pid) == 0
    child.wait()
    assert (linux.state(child.pid), linux.written(child.pid)) == ("", -1)


def test_bytes_given_to_storage_are_counted(tmp_path: Path) -> None:
    before = linux.written(os.getpid())
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    assert linux.written(os.getpid()) >= before >= 0
