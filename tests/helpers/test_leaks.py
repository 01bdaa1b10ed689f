from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers import leaks
from tests.helpers.leaks import MARK, Snapshot


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "PATIENCE_S", 0.1)


@pytest.fixture
def before() -> Iterator[Snapshot]:
    yield Snapshot.take(os.environ[MARK])


def test_a_clean_test_has_no_leaks(before: Snapshot) -> None:
    assert before.leaks_since() == []


def test_an_open_socket_is_found_by_its_descriptor(before: Snapshot) -> None:
    with socket.socket() as leaked:
        number = leaked.fileno()
        target = os.readlink(f"/proc/self/fd/{number}")
        assert before.leaks_since() == [f"descriptor {number} is still open ({target})"]


def test_a_reused_descriptor_number_is_found_by_its_target(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as first:
        number = first.fileno()
        before = Snapshot.take(os.environ[MARK])
    with (tmp_path / "b").open("w") as second:
        assert second.fileno() == number
        assert before.leaks_since() == [f"descriptor {number} is still open ({tmp_path / 'b'})"]


def test_a_mapped_board_is_found_after_its_descriptor_is_closed(before: Snapshot) -> None:
    fd = os.memfd_create("leak")
    os.ftruncate(fd, mmap.PAGESIZE)
    with mmap.mmap(fd, mmap.PAGESIZE):
        os.close(fd)
        found = before.leaks_since()
    assert any(sentence.startswith("/memfd:leak is still mapped") for sentence in found)


def test_a_thread_that_goes_on_is_found(before: Snapshot) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="keepstep-test", daemon=True)
    thread.start()
    assert before.leaks_since() == ["thread keepstep-test is still running"]
    stop.set()
    thread.join()


def test_a_child_is_found_and_killed(before: Snapshot) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert any(f"process {child.pid} " in sentence for sentence in before.leaks_since())
        assert not psutil.pid_exists(child.pid)


def test_a_process_whose_parent_died_is_found_and_killed(before: Snapshot) -> None:
    script = (
        "import subprocess, sys; "
        "quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}; "
        "print(subprocess.Popen(['sleep', '60'], **quiet).pid)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    orphan = psutil.Process(int(done.stdout))
    assert orphan not in psutil.Process().children(recursive=True)
    assert before.leaks_since() == [f"process {orphan.pid} (sleep 60) is still running"]
    assert orphan not in leaks.processes(os.environ[MARK])


def test_a_shared_memory_segment_is_found(before: Snapshot) -> None:
    path = Path("/dev/shm") / f"keepstep-leak-{os.getpid()}"
    path.write_bytes(b"x")
    try:
        assert before.leaks_since() == [f"{path} is still there"]
    finally:
        path.unlink()


def test_a_changed_environment_is_found_and_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LEAK_KEPT", "old")
    before = Snapshot.take(os.environ[MARK])
    os.environ["LEAK_KEPT"] = "new"
    os.environ["LEAK_NEW"] = "1"
    assert before.leaks_since() == [
        "environment variable LEAK_KEPT was left changed",
        "environment variable LEAK_NEW was left changed",
    ]
    assert os.environ["LEAK_KEPT"] == "old"
    assert "LEAK_NEW" not in os.environ


def test_whoever_was_no_child_of_a_test_is_not_looked_at_again_but_new_ones_are() -> None:
    mark = os.environ[MARK]
    leaks.processes(mark)
    assert os.getppid() in leaks._strangers[mark]
    with subprocess.Popen(["sleep", "60"], env={"HOME": "/"}) as child:  # without the mark
        try:
            assert psutil.Process(child.pid) in leaks.processes(mark)
            assert psutil.Process(child.pid) in leaks.processes(mark)
        finally:
            child.kill()
