"""The pool of staging slots: made ahead, populated, taken, given back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.errors import NotEnoughMemory, SaveFailed
from keepstep.rank.slots import HEADROOM, Made, SlotPool

_LIMIT_S = 30.0


class _Maker:
    """Makes memory of this process; stands still while ``gate`` is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[tuple[int, int]] = []
        self.most = 9
        self.error: Exception | None = None
        self.made = 0

    def __call__(self, capacity: int, count: int) -> Made:
        self.gate.wait(_LIMIT_S)
        self.asked.append((capacity, count))
        if self.error is not None:
            raise self.error
        made: Made = []
        for _ in range(min(count, self.most)):
            self.made += 1
            fd = os.memfd_create("test", os.MFD_CLOEXEC)
            os.ftruncate(fd, capacity)
            made.append((self.made, capacity, fd))
        return made


@pytest.fixture
def maker() -> _Maker:
    return _Maker()


@pytest.fixture
def pool(maker: _Maker) -> Iterator[SlotPool]:
    made = SlotPool(maker, rank=3)
    yield made
    maker.gate.set()
    made.close()


def _populated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_prepare_returns_at_once_and_the_memory_is_there_before_the_first_save(
    pool: SlotPool, maker: _Maker
) -> None:
    maker.gate.clear()
    pool.prepare(1 << 20, 2)
    assert maker.asked == [] and pool.count == 0, "the maker stands still, this thread does not"
    pool.prepare(1 << 20, 2)
    maker.gate.set()
    first, second = pool.acquire(1 << 20, _LIMIT_S, 2), pool.acquire(1 << 20, _LIMIT_S, 2)
    assert len(maker.asked) == 1, "and was asked once"
    assert (pool.count, pool.free) == (2, 0)
    for slot in (first, second):
        assert slot.capacity >= (1 << 20) + HEADROOM
        assert _populated(pool.fd(slot.id)) == slot.capacity
    assert first.id != second.id


def test_a_slot_is_busy_until_it_is_freed_or_given_back(pool: SlotPool) -> None:
    first = pool.acquire(10, _LIMIT_S, 2)
    second = pool.acquire(10, _LIMIT_S, 2)
    with pytest.raises(SaveFailed, match=r"no staging slot became free in 0 s \(rank 3, 2 slots"):
        pool.acquire(10, 0.0, 2)
    pool.release(first)
    assert pool.acquire(10, 0.0, 2) is first
    pool.written(second.id)
    pool.release(second)  # too late: it is the writer's
    with pytest.raises(SaveFailed):
        pool.acquire(10, 0.0, 2)
    pool.freed(second.id)
    assert pool.acquire(10, 0.0, 2) is second


def test_who_waits_gets_the_slot_that_is_freed_by_another_thread(pool: SlotPool) -> None:
    slot = pool.acquire(10, _LIMIT_S, 1)
    pool.written(slot.id)
    got: list[int] = []
    waiter = threading.Thread(target=lambda: got.append(pool.acquire(10, _LIMIT_S, 1).id))
    waiter.start()
    pool.freed(slot.id)
    waiter.join(_LIMIT_S)
    assert got == [slot.id]


def test_a_slot_that_an_abort_left_half_filled_is_free_in_the_next_round(pool: SlotPool) -> None:
    left, written = pool.acquire(10, _LIMIT_S, 2), pool.acquire(10, _LIMIT_S, 2)
    pool.written(written.id)
    pool.reclaim()
    assert pool.acquire(10, 0.0, 2) is left
    with pytest.raises(SaveFailed):
        pool.acquire(10, 0.0, 2)


def test_slots_grow_once_all_are_free_so_that_no_more_memory_is_used_than_stated(
    pool: SlotPool, maker: _Maker
) -> None:
    small = pool.acquire(10, _LIMIT_S, 2)
    pool.written(small.id)
    large = small.capacity + 1
    with pytest.raises(SaveFailed):
        pool.acquire(large, 0.0, 2)
    pool.prepare(large, 2)
    assert len(maker.asked) == 1, "not while one is in use"
    pool.freed(small.id)
    grown = pool.acquire(large, _LIMIT_S, 2)
    assert grown.capacity > small.capacity and pool.count == 2
    assert small.buffer.closed
    pool.freed(small.id)  # of a slot that is no more: nothing happens
    pool.release(small)
    assert pool.acquire(large, _LIMIT_S, 2).id != grown.id


def test_a_state_that_grows_a_little_needs_no_other_slots(pool: SlotPool, maker: _Maker) -> None:
    pool.release(pool.acquire(1000, _LIMIT_S, 2))
    pool.release(pool.acquire(1000 + HEADROOM // 2, _LIMIT_S, 2))
    assert len(maker.asked) == 1


def test_fewer_slots_than_wanted_are_taken_as_they_come(pool: SlotPool, maker: _Maker) -> None:
    maker.most = 1
    pool.acquire(10, _LIMIT_S, 2)
    assert pool.count == 1
    with pytest.raises(SaveFailed, match="1 slots in use"):
        pool.acquire(10, 0.0, 2)


def test_a_lack_of_memory_is_told_at_the_next_call_and_tried_again_after_it(
    pool: SlotPool, maker: _Maker
) -> None:
    maker.error = NotEnoughMemory("3 GB are needed")
    pool.prepare(10, 2)
    with pytest.raises(NotEnoughMemory, match="3 GB"):
        pool.acquire(10, _LIMIT_S, 2)
    pool.check()
    with pytest.raises(NotEnoughMemory, match="3 GB"):
        pool.acquire(10, _LIMIT_S, 2)
    maker.error = None
    pool.acquire(10, _LIMIT_S, 2)


def test_what_the_maker_could_not_do_is_told_by_check_too(pool: SlotPool, maker: _Maker) -> None:
    maker.error = OSError(12, "Cannot allocate memory")
    maker.gate.clear()
    pool.prepare(10, 2)
    maker.gate.set()
    error: list[NotEnoughMemory] = []
    while not error:
        try:
            pool.check()
        except NotEnoughMemory as told:
            error.append(told)
    assert "Cannot allocate memory" in str(error[0]) and "rank 3" in str(error[0])


def test_closing_ends_the_maker_and_gives_everything_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    gone: list[int] = []
    pool = SlotPool(_Maker(), rank=0, gone=gone.append)
    pool.prepare(64 << 20, 2)
    pool.close()
    pool.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [one for one in threading.enumerate() if one.name == "keepstep-slots"]
    with pytest.raises(SaveFailed):
        pool.acquire(10, _LIMIT_S, 1)
    assert gone in ([], [1, 2])


def test_a_view_that_somebody_still_has_does_not_hinder_closing(pool: SlotPool) -> None:
    slot = pool.acquire(10, _LIMIT_S, 1)
    view = memoryview(slot.buffer)
    pool.close()
    view[0] = 7
    assert view[0] == 7
    view.release()


def test_memory_that_is_let_go_of_is_free_although_the_writer_has_it_mapped(
    pool: SlotPool,
) -> None:
    free, taken = pool.acquire(1 << 20, _LIMIT_S, 2), pool.acquire(1 << 20, _LIMIT_S, 2)
    fds = [os.dup(pool.fd(slot.id)) for slot in (free, taken)]  # as the writer has them
    pool.release(free)
    pool.close()
    assert _populated(fds[0]) == 0
    assert _populated(fds[1]) >= 1 << 20, "it may be written at this moment"
    for fd in fds:
        os.close(fd)
