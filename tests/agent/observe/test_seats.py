"""Boards that processes take one after the other; the processes are this one and small others."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep import events, shm
from keepstep.agent.files import EventFiles
from keepstep.agent.launch_spec import Launch
from keepstep.agent.observe.helpers import Boards, hosts_store, store_address
from keepstep.agent.observe.seats import Ended, Gone, Seats, Seen, Started, Told
from keepstep.agent.observe.waiter import Waiter
from keepstep.agent.tail import Tails
from keepstep.clock import SYSTEM
from keepstep.config import Config
from tests.process.job import wait_until


def _spec(folder: Path) -> Launch:
    return Launch(
        nproc=2,
        mode="script",
        target="train.py",
        args=[],
        config=Config(),
        run_id="r",
        run_dir=folder,
        log_dir=folder,
        tee={},
        redirects={0: 0, 1: 2},
        local_ranks_filter=None,
        master_addr="127.0.0.1",
        master_port=0,
        environ={},
        argv=[],
    )


class _Node:
    """Two boards, and what the seats make of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boards = Boards(2)
        self.codes: dict[int, int] = {}
        self.shown: list[str] = []
        self._waiter = Waiter()
        self._files = EventFiles(folder / "events", "agent.jsonl")
        self._tails = Tails(lambda stream, text: self.shown.append(text))
        self.seats = Seats(
            _spec(folder),
            self.boards.boards,
            self._waiter,
            self._files,
            self._tails,
            "nothing",
            self.codes,
        )
        self._open = True

    def look(self) -> list[Seen]:
        """What is new."""
        self._waiter.turn(0.0)
        found = self.seats.look(SYSTEM.mono())
        self._tails.poll()
        return found

    def close(self) -> None:
        """Everything is written after it."""
        if not self._open:
            return
        self._open = False
        self.seats.end_all(SYSTEM.mono())
        self.seats.close()
        self._files.close()
        self.boards.close()
        self._waiter.close()

    def recorder(self, rank: int) -> events.Recorder:
        """As the process that has taken the board would have one."""
        board = self.boards.boards[rank]
        return events.Recorder(board.put_line, run="r", src="rank", rank=rank)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[_Node]:
    made = _Node(tmp_path)
    try:
        yield made
    finally:
        made.close()


def _process(code: str = "import sys; sys.stdin.read()") -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)


def test_a_board_can_be_opened_by_its_path_by_another_process_of_this_user(node: _Node) -> None:
    take = (
        "import os, sys; from keepstep.shm import Board; "
        "b = Board(os.open(sys.argv[1], os.O_RDWR)); b.take(os.getpid()); sys.stdin.read()"
    )
    source = str(Path(shm.__file__).parents[1])
    environ = {**os.environ, "PYTHONPATH": source, "RANK": "5"}
    with subprocess.Popen(
        [sys.executable, "-c", take, node.boards.paths[1]], stdin=subprocess.PIPE, env=environ
    ) as process:
        [started] = wait_until(node.look, "it takes the board")
        assert isinstance(started, Started)
        assert (started.who.pid, started.who.rank, started.who.inc) == (process.pid, 5, 0)
        assert node.seats.living == [started.who]


def test_an_exit_code_is_read_while_the_parent_has_not_waited(node: _Node) -> None:
    with _process("import sys; sys.stdin.read(); sys.exit(9)") as process:
        node.boards.boards[0].take(process.pid)
        node.look()
        assert process.stdin is not None
        process.stdin.close()
        [ended] = wait_until(node.look, "its end is seen")
        assert isinstance(ended, Ended)
        assert (ended.code, ended.seen) == (9, True)
        assert node.seats.living == []


def test_a_code_that_only_the_launcher_saw_is_taken_from_it(node: _Node) -> None:
    process = _process("import sys; sys.exit(4)")
    process.communicate()
    node.boards.boards[0].take(process.pid)
    node.look()
    assert [type(one) for one in node.look()] == [Gone]
    node.codes[process.pid] = 4
    [ended] = node.look()
    assert isinstance(ended, Ended)
    assert (ended.code, ended.seen, ended.who.pid) == (4, True, process.pid)
    assert node.look() == []


def test_what_nobody_saw_is_0_when_everything_is_over(node: _Node) -> None:
    process = _process("")
    process.communicate()
    node.boards.boards[0].take(process.pid)
    node.look()
    node.look()
    [ended] = node.seats.end_all(SYSTEM.mono())
    assert isinstance(ended, Ended)
    assert (ended.code, ended.seen) == (0, False)


def test_lines_of_two_processes_go_to_a_file_each_and_keep_their_order(node: _Node) -> None:
    board = node.boards.boards[0]
    old, new = node.recorder(0), node.recorder(0)
    with _process() as first, _process() as second:
        board.take(first.pid)
        node.look()
        for step in (1, 2, 3):
            old.emit(events.StepEnd(s=0.1), step=step)
        first.kill()
        first.communicate()
        board.take(second.pid)
        for step in (4, 5):
            new.emit(events.StepEnd(s=0.1), step=step)
        seen = node.look()
    names = [type(one) for one in seen]
    assert names == [Told] * 3 + names[3:4] + [Started] + [Told] * 2
    assert names[3] in (Gone, Ended)
    told = [(one.who.pid, one.event.step) for one in seen if isinstance(one, Told)]
    assert told == [(first.pid, s) for s in (1, 2, 3)] + [(second.pid, s) for s in (4, 5)]
    node.close()
    files = (node.folder / "events").glob("rank-00000-*.jsonl")
    lines = {path.stem.split("-")[-1]: len(path.read_bytes().splitlines()) for path in files}
    assert lines == {str(first.pid): 3, str(second.pid): 2}


def test_a_line_that_is_no_event_is_kept_in_the_file_and_told_to_nobody(node: _Node) -> None:
    node.boards.boards[0].take(os.getpid())
    node.boards.boards[0].put_line(b"{broken\n")
    assert [type(one) for one in node.look()] == [Started]
    wait_until(
        lambda: [p.read_bytes() for p in (node.folder / "events").glob("rank-*")] == [b"{broken\n"],
        "it is on disk",
    )


def test_logs_are_followed_once_they_are_there_but_not_hidden_streams_nor_old_lines(
    tmp_path: Path,
) -> None:
    (tmp_path / "rank-00000-000.stdout.log").write_text("of an earlier launch\n")
    node = _Node(tmp_path)
    for board in node.boards.boards:
        board.take(os.getpid())
    node.look()
    for rank in (0, 1):
        for name in ("stdout", "stderr"):
            with (tmp_path / f"rank-{rank:05d}-000.{name}.log").open("a") as file:
                file.write(f"{name} of {rank}\n")
    node.look()
    shown = sorted(node.shown)
    node.close()
    assert shown == ["[rank 0] stderr of 0", "[rank 0] stdout of 0", "[rank 1] stdout of 1"]


def test_where_the_store_is(tmp_path: Path) -> None:
    one = _spec(tmp_path)
    assert (store_address(one), hosts_store(one)) == (("127.0.0.1", 0), True)
    several = dataclasses.replace(one, nnodes=2, rdzv_endpoint="[fd00::1]:29500", node_rank=0)
    assert (store_address(several), hosts_store(several)) == (("fd00::1", 29501), True)
    assert not hosts_store(dataclasses.replace(several, node_rank=1))
    unnumbered = dataclasses.replace(several, node_rank=None, rdzv_is_host=True)
    assert hosts_store(unnumbered)
    assert not hosts_store(dataclasses.replace(unnumbered, rdzv_is_host=None))
