from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.checkpoint.images import KEPT, Images


@contextlib.contextmanager
def _slot(size: int) -> Iterator[int]:
    fd = os.memfd_create("slot", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        yield fd
    finally:
        os.close(fd)


def _mapped(fd: int) -> int:
    """How often the slot is mapped into this process."""
    inode = os.fstat(fd).st_ino
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split()[4] == str(inode) for line in lines if "/memfd:slot" in line)


def _read(images: Images, fd: int, size: int, rank: int = 0) -> bytes:
    with images.open(fd, size, rank) as image:
        return bytes(image)


def test_a_slot_is_mapped_once_and_shows_what_is_written_into_it_later() -> None:
    images = Images()
    with _slot(8192) as fd:
        os.pwrite(fd, b"one", 0)
        assert _read(images, fd, 3) == b"one"
        os.pwrite(fd, b"other", 0)
        with os.fdopen(os.dup(fd), "rb") as again:  # each message brings a descriptor of its own
            assert _read(images, again.fileno(), 5) == b"other"
        assert _mapped(fd) == 1
    assert len(images) == 1


def test_a_slot_is_unmapped_when_its_rank_has_used_others_since() -> None:
    images = Images()
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(_slot(4096))
        slots = [stack.enter_context(_slot(4096)) for _ in range(2)]
        elsewhere = stack.enter_context(_slot(4096))
        _read(images, elsewhere, 1, rank=1)
        _read(images, old, 1)
        for use in range(KEPT):
            assert _mapped(old) == 1
            _read(images, slots[use % 2], 1)
        assert _mapped(old) == 0
        assert [_mapped(fd) for fd in (*slots, elsewhere)] == [1, 1, 1]


def test_a_slot_that_is_in_use_twice_is_whole_for_both() -> None:
    images = Images()
    with _slot(4096) as fd:
        os.pwrite(fd, b"x", 0)
        with images.open(fd, 1, 0) as first, images.open(fd, 1, 0) as second:
            assert bytes(first) == bytes(second) == b"x"
        assert _mapped(fd) == 1


def test_a_slot_that_has_another_size_now_is_mapped_anew() -> None:
    images = Images()
    with _slot(4096) as fd:
        _read(images, fd, 4096)
        os.ftruncate(fd, 12_288)
        os.pwrite(fd, b"end", 12_285)
        assert _read(images, fd, 12_288)[-3:] == b"end"
        os.ftruncate(fd, 4096)
        with pytest.raises(ValueError, match="4097 bytes were announced, the staged image has"):
            _read(images, fd, 4097)


def test_memory_of_a_truncated_slot_is_free_although_it_is_mapped() -> None:
    images = Images()
    with _slot(1 << 20) as fd:
        os.pwrite(fd, bytes(1 << 20), 0)
        _read(images, fd, 1 << 20)
        assert os.fstat(fd).st_blocks * 512 == 1 << 20
        os.ftruncate(fd, 0)
        assert (_mapped(fd), os.fstat(fd).st_blocks) == (1, 0)


@pytest.mark.parametrize("size", [-1, 0, 4097])
def test_a_size_that_the_slot_does_not_have_is_refused(size: int) -> None:
    with _slot(4096) as fd, pytest.raises(ValueError, match="announced"):
        _read(Images(), fd, size)


def test_a_mapping_is_kept_although_the_work_with_it_failed() -> None:
    images = Images()
    with _slot(4096) as fd:
        with pytest.raises(OSError, match="full"), images.open(fd, 1, 0):
            raise OSError("full")
        assert _mapped(fd) == len(images) == 1
