"""Event files: what rings hold reaches the disk, also of a rank that is gone."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep import shm
from keepstep.agent.files import EventFiles
from tests.process.job import wait_until


def _board() -> tuple[shm.Board, shm.Board]:
    """The agent's and the rank's view of one board."""
    fd = shm.create()
    views = shm.Board(fd), shm.Board(fd)
    os.close(fd)
    return views


def test_everything_given_before_close_is_on_disk_after_it(tmp_path: Path) -> None:
    files = EventFiles(tmp_path / "events", "agent.jsonl")
    agents, ranks = _board()
    files.add(agents, "rank-0.jsonl")
    files.put(b"agent 1\n")
    for number in range(1000):
        assert ranks.put_line(b"rank %d\n" % number)
    files.put(b"agent 2\n")
    files.close()
    lines = (tmp_path / "events" / "rank-0.jsonl").read_bytes().splitlines()
    assert lines == [b"rank %d" % number for number in range(1000)]
    assert (tmp_path / "events" / "agent.jsonl").read_bytes() == b"agent 1\nagent 2\n"
    for board in (agents, ranks):
        board.close()


def test_what_a_dead_rank_left_in_its_ring_is_kept_and_its_board_is_closed(
    tmp_path: Path,
) -> None:
    files = EventFiles(tmp_path / "events", "agent.jsonl")
    agents, ranks = _board()
    files.add(agents, "rank-0.jsonl")
    ranks.put_line(b"last words\n")
    files.end(agents)
    files.close()
    assert (tmp_path / "events" / "rank-0.jsonl").read_bytes() == b"last words\n"
    with pytest.raises(ValueError, match=r"closed|released"):
        _ = agents.step
    ranks.close()


def test_a_folder_that_holds_events_of_an_earlier_agent_keeps_them(tmp_path: Path) -> None:
    for number in (1, 2):
        files = EventFiles(tmp_path, "agent.jsonl")
        files.put(b"%d\n" % number)
        files.close()
    assert (tmp_path / "agent.jsonl").read_bytes() == b"1\n2\n"


@contextlib.contextmanager
def _no_space_beyond(size: int, pid: int) -> Iterator[None]:
    """Files of process ``pid`` cannot grow beyond ``size`` bytes."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


def test_events_that_storage_does_not_take_wait_until_it_does(tmp_path: Path) -> None:
    files = EventFiles(tmp_path, "agent.jsonl")
    agents, ranks = _board()
    files.add(agents, "rank-0.jsonl")
    lines = [b"event number %03d\n" % number for number in range(20)]
    with _no_space_beyond(100, files.writer.pid):
        for line in lines[:10]:
            files.put(line)
            ranks.put_line(line)
        wait_until(
            lambda: [file.stat().st_size for file in tmp_path.iterdir()] == [100, 100],
            "storage is full",
        )
    for line in lines[10:]:
        files.put(line)
        ranks.put_line(line)
    files.close()
    for name in ("agent.jsonl", "rank-0.jsonl"):
        assert (tmp_path / name).read_bytes() == b"".join(lines)
    for board in (agents, ranks):
        board.close()


def test_a_file_that_cannot_be_opened_yet_gets_all_its_lines_later(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    files = EventFiles(folder, "agent.jsonl")
    folder.rmdir()  # as if the storage were gone for a while
    files.put(b"one\n")
    files.put(b"two\n")
    folder.mkdir()
    files.close()
    assert (folder / "agent.jsonl").read_bytes() == b"one\ntwo\n"


def test_lines_that_somebody_else_drained_go_to_the_file_that_is_named(tmp_path: Path) -> None:
    files = EventFiles(tmp_path, "agent.jsonl")
    files.append("first.jsonl", [b"1\n", b"2\n"])
    files.finish("first.jsonl")
    files.append("second.jsonl", [b"3\n"])
    files.append("first.jsonl", [b"late\n"])
    files.finish("never-used.jsonl")
    files.close()
    assert (tmp_path / "first.jsonl").read_bytes() == b"1\n2\nlate\n"
    assert (tmp_path / "second.jsonl").read_bytes() == b"3\n"
    assert not (tmp_path / "never-used.jsonl").exists()


def test_a_finished_file_that_storage_does_not_take_yet_is_written_later(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    files = EventFiles(folder, "agent.jsonl")
    folder.rmdir()
    files.append("rank.jsonl", [b"1\n"])
    files.finish("rank.jsonl")
    folder.mkdir()
    wait_until(lambda: (folder / "rank.jsonl").exists(), "the file is written")
    files.close()
    assert (folder / "rank.jsonl").read_bytes() == b"1\n"


def test_a_writer_that_was_killed_is_replaced(tmp_path: Path) -> None:
    files = EventFiles(tmp_path, "agent.jsonl")
    files.put(b"1\n")
    wait_until(lambda: (tmp_path / "agent.jsonl").exists(), "the first line is written")
    first = files.writer
    first.kill()

    def replaced() -> bool:
        files.put(b"2\n")
        return files.writer is not first

    wait_until(replaced, "another process writes")
    files.put(b"3\n")
    files.close()
    lines = (tmp_path / "agent.jsonl").read_bytes().split()
    assert (lines[0], lines[-1]) == (b"1", b"3")


def test_a_writer_that_storage_does_not_let_end_is_left_behind(tmp_path: Path) -> None:
    files = EventFiles(tmp_path, "agent.jsonl")
    writer = files.writer
    writer.send_signal(signal.SIGSTOP)
    try:
        files.put(b"1\n")
        assert not files.close(limit_s=0.1)
        assert writer.poll() is None
    finally:
        writer.send_signal(signal.SIGCONT)
    assert writer.wait(30.0) == 0
    assert (tmp_path / "agent.jsonl").read_bytes() == b"1\n"
