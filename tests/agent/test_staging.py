"""Staging slots: memory that outlives its rank, until nobody reads it."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator

import pytest

from keepstep import memory
from keepstep.agent.staging import Freed, Slots
from keepstep.errors import NotEnoughMemory
from keepstep.wire.channel import Channel, pair
from keepstep.wire.messages import (
    FROM_WRITER,
    TO_WRITER,
    ShardFailed,
    ShardWritten,
    SlotGrant,
    Staged,
    WriteShard,
)
from keepstep.wire.types import Version

_VERSION = Version(run="r", term=1, round=1, step=5, world=2)


class _Writer:
    """The other end of the agent's channel to its writer."""

    def __init__(self) -> None:
        ours, theirs = pair()
        self.channel: Channel[FROM_WRITER] = Channel(ours, FROM_WRITER, blocking=False)
        self._end: Channel[TO_WRITER] = Channel(theirs, TO_WRITER, blocking=True)

    def take(self) -> tuple[WriteShard, int]:
        """The next message and its descriptor."""
        message = self._end.receive()
        assert isinstance(message, WriteShard)
        return message, self._end.take_fd()

    def close(self) -> None:
        self.channel.close()
        self._end.close()


@pytest.fixture
def writer() -> Iterator[_Writer]:
    with contextlib.closing(_Writer()) as made:
        yield made


@pytest.fixture
def slots() -> Iterator[Slots]:
    with contextlib.closing(Slots("/checkpoints")) as made:
        yield made


def _staged(slot: int) -> Staged:
    return Staged(inc=0, slot=slot, size=4, version=_VERSION, t=0.0)


def _written(ticket: int) -> ShardWritten:
    return ShardWritten(
        ticket=ticket, rank=3, version=_VERSION, folder="step-00000005", bytes=4, write_s=0.1
    )


def _granted(slots: Slots, owner: int, size: int, count: int) -> list[tuple[SlotGrant, int]]:
    return slots.ask(owner, size, count, [owner]).grants


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_filled_slot_goes_to_the_writer_with_its_memory_and_comes_back_free(
    slots: Slots, writer: _Writer
) -> None:
    (grant, fd), (other, _) = _granted(slots, 7, 4096, 2)
    assert grant.size == 4096
    assert grant.slot != other.slot
    os.pwrite(fd, b"data", 0)
    assert slots.write(3, _staged(grant.slot), writer.channel)
    message, received = writer.take()
    with os.fdopen(received, "rb") as file:
        assert file.read(4) == b"data"
    assert (message.rank, message.size, message.root) == (3, 4, "/checkpoints")
    assert message.version == _VERSION
    assert slots.writing == 1
    assert slots.written(_written(message.ticket)) == Freed(owner=7, number=grant.slot)
    assert slots.writing == 0


def test_memory_outlives_its_rank_until_the_writer_has_read_it(
    slots: Slots, writer: _Writer
) -> None:
    (read, fd), (unread, idle) = _granted(slots, 7, 4096, 2)
    slots.write(3, _staged(read.slot), writer.channel)
    message, received = writer.take()
    os.close(received)
    slots.release(7)
    assert _is_open(fd)
    assert not _is_open(idle)
    failed = ShardFailed(ticket=message.ticket, rank=3, version=_VERSION, error="disk full")
    assert slots.written(failed) is None  # nobody is there to use it again
    assert not _is_open(fd)
    assert not slots.write(3, _staged(unread.slot), writer.channel)


def test_the_memory_of_a_dead_process_is_free_although_the_writer_has_it_mapped(
    slots: Slots, writer: _Writer
) -> None:
    ((grant, fd),) = _granted(slots, 1, 4096, 1)
    os.pwrite(fd, bytes(4096), 0)
    slots.write(3, _staged(grant.slot), writer.channel)
    message, copy = writer.take()
    with mmap.mmap(copy, 4096):
        slots.release(1)
        assert os.fstat(copy).st_blocks > 0  # not before it is written
        slots.written(_written(message.ticket))
        assert os.fstat(copy).st_blocks == 0
    os.close(copy)


def test_slots_that_a_living_process_lets_go_of_keep_their_bytes(
    slots: Slots, writer: _Writer
) -> None:
    ((grant, fd),) = _granted(slots, 1, 4096, 1)
    os.pwrite(fd, b"seen", 0)
    slots.write(3, _staged(grant.slot), writer.channel)
    message, copy = writer.take()
    _granted(slots, 1, 8192, 1)
    slots.written(_written(message.ticket))
    assert os.pread(copy, 4, 0) == b"seen"
    os.close(copy)


def test_a_slot_with_two_writes_is_kept_until_both_are_done(slots: Slots, writer: _Writer) -> None:
    [(grant, fd)] = _granted(slots, 7, 4096, 1)
    tickets = []
    for _ in range(2):
        slots.write(3, _staged(grant.slot), writer.channel)
        message, received = writer.take()
        os.close(received)
        tickets.append(message.ticket)
    slots.release(7)
    slots.written(_written(tickets[0]))
    assert _is_open(fd)
    slots.written(_written(tickets[1]))
    assert not _is_open(fd)


def test_larger_slots_replace_the_owners_earlier_ones_and_nobody_elses(slots: Slots) -> None:
    [(_, small)] = _granted(slots, 7, 4096, 1)
    [(_, foreign)] = _granted(slots, 8, 4096, 1)
    [(grant, large)] = _granted(slots, 7, 8192, 1)
    assert os.fstat(large).st_size == 8192
    assert os.fstat(foreign).st_size == 4096
    assert small == large or not _is_open(small)
    assert grant.size == 8192


def test_a_result_that_nobody_asked_for_is_passed_over(slots: Slots) -> None:
    assert slots.written(_written(99)) is None


def test_a_new_writer_gets_what_the_dead_one_left_unfinished(slots: Slots, writer: _Writer) -> None:
    (done, _), (left, fd), (late, _) = _granted(slots, 7, 4096, 3)
    os.pwrite(fd, b"data", 0)
    for grant in (done, left):
        slots.write(3, _staged(grant.slot), writer.channel)
    message, received = writer.take()
    os.close(received)
    slots.written(_written(message.ticket))
    writer.close()
    assert slots.write(3, _staged(late.slot), writer.channel)  # nobody has noticed yet
    with contextlib.closing(_Writer()) as successor:
        assert slots.write_again(successor.channel) == 2
        tickets = []
        for _ in range(2):
            message, received = successor.take()
            tickets.append(message.ticket)
            with os.fdopen(received, "rb") as file:
                assert file.read(4) == (b"data" if len(tickets) == 1 else bytes(4))
        freed = [slots.written(_written(ticket)) for ticket in tickets]
    assert freed == [Freed(owner=7, number=left.slot), Freed(owner=7, number=late.slot)]
    assert slots.writing == 0


# --- memory ---------------------------------------------------------------------------------------

_SLOT = 1 << 20


@pytest.fixture
def node() -> Iterator[tuple[Slots, list[int]]]:
    """Slots of a node of which the test says how many bytes it has left."""
    left = [0]

    def room() -> memory.Room:
        return memory.Room(left[0], 64 * _SLOT, "the test's memory")

    with contextlib.closing(Slots("/checkpoints", room=room)) as made:
        yield made, left


def test_the_first_rank_that_asks_gets_slots_only_if_there_is_memory_for_all(
    node: tuple[Slots, list[int]],
) -> None:
    slots, left = node
    left[0] = 9 * _SLOT  # 1 of that is kept free
    granted = slots.ask(7, _SLOT, 2, [7, 8, 9, 10])
    assert [grant.of for grant, _ in granted.grants] == [2, 2]
    assert "8.4 MB" in granted.line and "4 ranks" in granted.line
    # Nobody has touched them yet: what is left is promised to the others.
    assert len(slots.ask(8, _SLOT, 2, [7, 8, 9, 10]).grants) == 2
    left[0] = 6 * _SLOT
    with pytest.raises(NotEnoughMemory, match=r"8 MB|4\.2 MB of that is promised"):
        slots.ask(9, 2 * _SLOT, 2, [7, 8, 9, 10])


def test_memory_that_is_touched_is_not_counted_twice(node: tuple[Slots, list[int]]) -> None:
    slots, left = node
    left[0] = 5 * _SLOT
    for _, fd in slots.ask(7, _SLOT, 2, [7, 8]).grants:
        os.pwrite(fd, bytes(_SLOT), 0)
    left[0] = 3 * _SLOT
    assert len(slots.ask(8, _SLOT, 2, [7, 8]).grants) == 2


def test_if_not_all_fit_every_rank_gets_one_and_it_is_said(node: tuple[Slots, list[int]]) -> None:
    slots, left = node
    left[0] = 4 * _SLOT
    granted = slots.ask(7, _SLOT, 2, [7, 8, 9])
    assert len(granted.grants) == 1
    assert "2 copies do not fit" in granted.line
    left[0] = 60 * _SLOT  # others get no more than the first, or some would skip and some not
    again = slots.ask(8, _SLOT, 2, [7, 8, 9])
    assert (len(again.grants), again.line) == (1, "")


def test_if_not_even_one_fits_nothing_is_taken(node: tuple[Slots, list[int]]) -> None:
    slots, left = node
    left[0] = 3 * _SLOT
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotEnoughMemory, match="the test's memory"):
        slots.ask(7, _SLOT, 2, [7, 8, 9])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_whose_old_slots_are_still_read_asks_for_new_ones_beside_them(
    node: tuple[Slots, list[int]], writer: _Writer
) -> None:
    slots, left = node
    left[0] = 3 * _SLOT
    ((grant, fd),) = slots.ask(7, _SLOT, 1, [7]).grants
    os.pwrite(fd, bytes(_SLOT), 0)
    slots.write(3, _staged(grant.slot), writer.channel)
    left[0] = 2 * _SLOT
    with pytest.raises(NotEnoughMemory):
        slots.ask(7, 2 * _SLOT, 1, [7])


def test_the_line_about_memory_is_said_once_and_again_if_slots_become_larger(
    node: tuple[Slots, list[int]],
) -> None:
    slots, left = node
    left[0] = 60 * _SLOT
    assert slots.ask(7, _SLOT, 1, [7, 8]).line
    assert not slots.ask(8, _SLOT + 4096, 1, [7, 8]).line
    assert slots.ask(7, 2 * _SLOT, 1, [7, 8]).line


def test_the_writer_is_told_how_often_to_try_again(writer: _Writer) -> None:
    with contextlib.closing(Slots("/checkpoints", 4)) as slots:
        ((grant, _),) = _granted(slots, 7, 4096, 1)
        slots.write(3, _staged(grant.slot), writer.channel)
        message, received = writer.take()
        os.close(received)
        assert message.retries == 4
