from __future__ import annotations

import math
import mmap
import os
import random
import signal
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keepstep import shm
from keepstep.shm import RING_BYTES, Board, Phase

LINE_HEAD = 4
Pair = tuple[Board, Board]


@pytest.fixture
def fd() -> Iterator[int]:
    made = shm.create()
    yield made
    os.close(made)


@pytest.fixture
def ends(fd: int) -> Iterator[Pair]:
    """The rank's and the agent's view of one board."""
    rank, agent = Board(fd), Board(fd)
    yield rank, agent
    rank.close()
    agent.close()


def in_child(act: Callable[[], None]) -> int:
    """Run ``act`` in a forked process; returns its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def numbered(number: int) -> bytes:
    """A line whose bytes say whether it is whole."""
    return b"%d:" % number + bytes([number % 251]) * (number * 7919 % 900) + b"\n"


# --- words ---------------------------------------------------------------------------------------


def test_a_new_board_is_empty_and_closed_on_exec(fd: int, ends: Pair) -> None:
    _, agent = ends
    assert agent.phase is Phase.PARKED
    assert (agent.step, agent.done, agent.round, agent.seq, agent.steps, agent.dropped) == (0,) * 6
    assert (agent.last_beat, agent.last_progress, agent.step_s) == (0.0, 0.0, 0.0)
    assert agent.label == ""
    assert agent.take_lines() == []
    assert not os.get_inheritable(fd)


def test_the_agent_sees_what_the_rank_does(ends: Pair) -> None:
    rank, agent = ends
    rank.enter_round(3, resume=10)
    assert (agent.round, agent.step, agent.done) == (3, 10, 10)
    rank.begin_step(11, 100.5)
    assert (agent.phase, agent.step, agent.last_progress) == (Phase.STEP, 11, 100.5)
    rank.beat(101.25, 42)
    assert (agent.last_beat, agent.seq) == (101.25, 42)
    rank.end_step(11, 0.5, 2.25)
    assert (agent.done, agent.step_s, agent.loss, agent.steps) == (11, 0.5, 2.25, 1)
    rank.end_step(12, 0.5, math.nan)
    assert math.isnan(agent.loss)
    assert agent.steps == 2
    rank.enter(Phase.SECTION, 102.0, "eval")
    assert (agent.phase, agent.label) == (Phase.SECTION, "eval")
    rank.enter(Phase.WAIT, 103.0)
    assert (agent.phase, agent.label, agent.last_progress) == (Phase.WAIT, "", 103.0)


@given(st.text(max_size=80))
def test_a_label_keeps_its_first_63_bytes(text: str) -> None:
    fd = shm.create()
    board = Board(fd)
    os.close(fd)
    board.enter(Phase.SECTION, 1.0, text)
    wanted = text.encode()[:63].split(b"\0")[0].decode(errors="replace")
    assert board.label == wanted
    assert board.last_progress == 1.0
    board.close()


def test_the_board_outlives_its_descriptor(ends: Pair) -> None:
    fd = shm.create()
    rank, agent = Board(fd), Board(fd)
    os.close(fd)
    rank.put_line(b"line\n")
    assert agent.take_lines() == [b"line\n"]
    rank.close()
    agent.close()


def test_a_time_is_stored_in_one_go() -> None:
    """A torn time would be a third value beside the two that another process stores in turn."""
    fd = shm.create()
    board = Board(fd)
    os.close(fd)
    two = struct.unpack("<2d", bytes(range(1, 9)) + bytes(range(0x31, 0x39)))

    def flip() -> None:
        while True:
            board.beat(two[0], 0x0101010101010101)
            board.beat(two[1], 0x3232323232323232)

    pid = in_child(flip)
    try:
        seen: set[float] = set()
        counts: set[int] = set()
        while not (seen >= set(two) and len(counts) > 1):
            seen |= {board.last_beat for _ in range(30_000)}
            counts |= {board.seq for _ in range(30_000)}
    finally:
        os.kill(pid, signal.SIGKILL)
        ended(pid)
        board.close()
    assert seen <= {0.0, *two}
    assert counts <= {0, 0x0101010101010101, 0x3232323232323232}


# --- the ring ------------------------------------------------------------------------------------


def at_offset(board: Board, offset: int) -> None:
    """Bring the ring's ends to ``offset`` by traffic."""
    step = 60_000
    while offset:
        length = offset if offset <= step else min(step, offset - LINE_HEAD)
        assert board.put_line(bytes(length - LINE_HEAD))
        board.take_lines()
        offset -= length


@settings(max_examples=150)
@given(
    before_end=st.integers(0, 40),
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=5),
)
def test_the_ring_wraps_around_at_every_alignment(before_end: int, lengths: list[int]) -> None:
    fd = shm.create()
    rank, agent = Board(fd), Board(fd)
    os.close(fd)
    at_offset(rank, RING_BYTES - before_end)
    lines = [bytes([65 + place]) * length for place, length in enumerate(lengths)]
    assert all(rank.put_line(line) for line in lines)
    assert agent.take_lines() == lines
    assert agent.take_lines() == []
    rank.close()
    agent.close()


def test_a_full_ring_drops_counts_and_goes_on(ends: Pair) -> None:
    rank, agent = ends
    line = bytes(1000)
    fit = RING_BYTES // (len(line) + LINE_HEAD)
    assert [rank.put_line(line) for _ in range(fit + 3)] == [True] * fit + [False] * 3
    assert agent.dropped == 3
    assert len(agent.take_lines()) == fit
    assert rank.put_line(b"after\n")
    assert agent.take_lines() == [b"after\n"]
    assert agent.dropped == 3


def test_a_line_may_fill_the_ring_to_its_last_byte_but_not_more(ends: Pair) -> None:
    rank, agent = ends
    assert not rank.put_line(bytes(RING_BYTES - LINE_HEAD + 1))
    assert rank.put_line(bytes(RING_BYTES - LINE_HEAD))
    assert not rank.put_line(b"")
    assert [len(line) for line in agent.take_lines()] == [RING_BYTES - LINE_HEAD]
    assert rank.put_line(b"")
    assert agent.take_lines() == [b""]


def test_lines_of_several_threads_stay_whole(ends: Pair) -> None:
    rank, agent = ends

    def put(start: int) -> None:
        for number in range(start, start + 300):
            assert rank.put_line(numbered(number))

    threads = [threading.Thread(target=put, args=(start,)) for start in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = agent.take_lines()
    numbers = [int(line.split(b":")[0]) for line in lines]
    assert lines == [numbered(number) for number in numbers]
    for start in (0, 1000, 2000):
        assert [n for n in numbers if start <= n < start + 1000] == list(range(start, start + 300))


def test_a_ring_that_a_script_scribbled_over_does_not_hang_or_fail_its_reader(fd: int) -> None:
    rank, agent = Board(fd), Board(fd)
    for number in range(50):
        rank.put_line(numbered(number))
    scribbler = mmap.mmap(fd, shm.SIZE)
    scribbler[shm.RING_AT :] = random.Random(5).randbytes(RING_BYTES)
    scribbler.close()
    agent.take_lines()
    assert agent.take_lines() == []
    rank.close()
    agent.close()


class Ring(RuleBasedStateMachine):
    """The ring against a plain queue with the same room."""

    def __init__(self) -> None:
        super().__init__()
        fd = shm.create()
        self.rank, self.agent = Board(fd), Board(fd)
        os.close(fd)
        self.held: deque[bytes] = deque()
        self.dropped = 0
        self.count = 0

    @property
    def used(self) -> int:
        return sum(len(line) + LINE_HEAD for line in self.held)

    @rule(length=st.one_of(st.integers(0, 100), st.integers(100_000, 700_000)))
    def put(self, length: int) -> None:
        self.count += 1
        line = (b"%d:" % self.count).ljust(length, bytes([self.count % 251]))
        fits = self.used + len(line) + LINE_HEAD <= RING_BYTES
        assert self.rank.put_line(line) is fits
        if fits:
            self.held.append(line)
        else:
            self.dropped += 1

    @rule()
    def take(self) -> None:
        assert self.agent.take_lines() == list(self.held)
        self.held.clear()

    @invariant()
    def drops_are_counted(self) -> None:
        assert self.agent.dropped == self.dropped

    def teardown(self) -> None:
        self.rank.close()
        self.agent.close()


TestRing = Ring.TestCase
TestRing.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


# --- several processes ---------------------------------------------------------------------------


def test_a_reader_in_another_process_sees_whole_lines_in_order(ends: Pair) -> None:
    rank, agent = ends
    count = 6000  # about 2.7 MB: more than twice around

    def write() -> None:
        for number in range(count):
            while not rank.put_line(numbered(number)):
                os.sched_yield()

    pid = in_child(write)
    seen = 0
    while seen < count:
        for line in agent.take_lines():
            assert line == numbered(seen)
            seen += 1
        assert seen or os.waitpid(pid, os.WNOHANG)[0] == 0
    assert ended(pid) == 0
    assert agent.take_lines() == []


@pytest.mark.parametrize("lines_first", [1, 17, 400, 2500, 5000])
def test_a_writer_killed_at_any_moment_leaves_only_whole_lines(lines_first: int) -> None:
    fd = shm.create()
    rank, agent = Board(fd), Board(fd)
    os.close(fd)

    def write() -> None:
        number = 0
        while True:
            number += rank.put_line(numbered(number))

    pid = in_child(write)
    lines: list[bytes] = []
    while len(lines) < lines_first:
        lines += agent.take_lines()
    os.kill(pid, signal.SIGKILL)
    assert ended(pid) == -signal.SIGKILL
    lines += agent.take_lines()
    assert lines == [numbered(number) for number in range(len(lines))]
    assert agent.take_lines() == []
    rank.close()
    agent.close()


def test_sequence_numbers_by_group_are_told_and_names_that_do_not_fit_are_left_out(
    ends: Pair,
) -> None:
    rank, agent = ends
    assert agent.sequence_numbers == {}
    rank.put_sequence_numbers({"0": 41, "tp": 7})
    assert agent.sequence_numbers == {"0": 41, "tp": 7}
    rank.put_sequence_numbers({"g" * 4000: 1})
    assert agent.sequence_numbers == {}


def test_the_newest_admitted_round_never_goes_back_not_even_with_the_process(ends: Pair) -> None:
    rank, agent = ends
    assert rank.admitted == 0
    agent.admit(3)
    agent.admit(2)
    rank.take(os.getpid())
    assert rank.admitted == 3
