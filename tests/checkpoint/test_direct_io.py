from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.checkpoint import blocks, direct_io
from keepstep.checkpoint.direct_io import ALIGNMENT

_BLOCK = 2 * ALIGNMENT
"""Small, so that a small image has many."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", _BLOCK)


def _memory(size: int) -> mmap.mmap:
    """Aligned memory in which no two blocks are equal."""
    memory = mmap.mmap(-1, max(size, 1))
    for at in range(0, size, 512):
        memory[at : min(at + 8, size)] = at.to_bytes(8, "little")[: min(8, size - at)]
    return memory


def _write(path: Path, size: int, meanwhile: Callable[[], object] | None = None) -> bytes:
    """Write an image of ``size`` bytes and check what is returned; returns the image."""
    memory = _memory(size)
    with memoryview(memory)[:size] as image:
        fd = direct_io.open_new(path)
        try:
            digests = direct_io.write_image(image, fd, meanwhile)
            with direct_io.syncing(fd, size) as synced:
                synced()
        finally:
            os.close(fd)
        data = bytes(image)
    parts = [data[at : at + _BLOCK] for at in range(0, size, _BLOCK)]
    assert digests == [xxhash.xxh3_128_digest(part) for part in parts]
    return data


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    st.one_of(
        st.integers(0, 6 * _BLOCK),
        st.builds(
            lambda blocks, off: max(0, blocks * ALIGNMENT + off),
            st.integers(0, 12),
            st.integers(-2, 2),
        ),
    )
)
def test_a_file_of_any_size_is_the_image_byte_for_byte(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.unlink(missing_ok=True)
    assert _write(path, size) == path.read_bytes()


def test_writes_are_direct_aligned_and_several_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(direct_io.THREADS)
    real = os.pwrite
    seen: list[tuple[int, int]] = []

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        assert direct_io._is_direct(fd)
        place = ctypes.addressof(ctypes.c_char.from_buffer(data))
        assert place % ALIGNMENT == at % ALIGNMENT == len(data) % ALIGNMENT == 0
        seen.append((at, len(data)))
        together.wait(60)
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    size = 2 * direct_io.THREADS * _BLOCK
    data = _write(tmp_path / "file", size)
    assert (tmp_path / "file").read_bytes() == data
    assert sorted(seen) == [(at, _BLOCK) for at in range(0, size, _BLOCK)]


def test_storage_that_refuses_direct_writes_gets_buffered_ones_that_are_flushed_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_sync = os.open, os.fdatasync
    refused: list[Any] = []
    flushed: list[int] = []

    def no_direct(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            os.close(real_open(path, flags & ~os.O_DIRECT, *rest))
            raise OSError(errno.EINVAL, "no direct writes")
        return real_open(path, flags, *rest, **more)

    def fdatasync(fd: int) -> None:
        flushed.append(fd)
        real_sync(fd)

    monkeypatch.setattr(os, "open", no_direct)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    data = _write(tmp_path / "file", 40 * _BLOCK + 17)
    assert refused
    assert len(flushed) == 2
    assert (tmp_path / "file").read_bytes() == data


def test_storage_that_refuses_direct_writes_half_way_gets_buffered_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    calls: list[int] = []

    def short_then_refused(fd: int, data: memoryview, at: int) -> int:
        calls.append(at)
        if len(calls) == 1:
            return real(fd, data[:ALIGNMENT], at)
        if direct_io._is_direct(fd):
            raise OSError(errno.EINVAL, "not aligned")
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", short_then_refused)
    data = _write(tmp_path / "file", 5 * _BLOCK + 17)
    assert len(calls) > 6
    assert (tmp_path / "file").read_bytes() == data


def test_an_invalid_argument_that_has_nothing_to_do_with_direct_writes_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def invalid(fd: int, data: memoryview, at: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "pwrite", invalid)
    with pytest.raises(OSError, match="Invalid argument"):
        _write(tmp_path / "file", 3 * _BLOCK)


def test_the_first_error_of_a_block_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def full(fd: int, data: memoryview, at: int) -> int:
        calls.append(at)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        _write(tmp_path / "file", 200 * _BLOCK)
    assert 1 <= len(calls) <= direct_io.THREADS


def _fallocate(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Have space refused with error ``number``; returns the sizes that are asked for."""
    asked: list[int] = []

    def refuse(fd: int, mode: int, start: int, size: int) -> int:
        asked.append(size)
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(direct_io, "_fallocate", lambda: refuse)
    return asked


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_storage_that_cannot_reserve_space_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    asked = _fallocate(monkeypatch, number)
    assert _write(tmp_path / "file", 100_001) == (tmp_path / "file").read_bytes()
    assert asked == [102_400]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_missing_space_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    _fallocate(monkeypatch, number)
    monkeypatch.setattr(os, "pwrite", lambda *args: pytest.fail("nothing may be written"))
    with pytest.raises(OSError) as caught:
        _write(tmp_path / "file", 100_000)
    assert caught.value.errno == number


def test_space_is_really_reserved(tmp_path: Path) -> None:
    fd = direct_io.open_new(tmp_path / "file")
    try:
        try:
            direct_io.reserve(fd, 1 << 20)
        finally:
            held = os.fstat(fd).st_blocks * 512
    finally:
        os.close(fd)
    assert held >= 1 << 20


def test_something_else_is_done_while_the_disk_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        assert done.wait(60)
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = _write(tmp_path / "file", 4 * _BLOCK, done.set)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("size", [10, 4 * _BLOCK])
def test_an_error_of_what_is_done_meanwhile_or_of_the_flush_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        _write(tmp_path / "one", size, fail)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        _write(tmp_path / "two", size)


def test_a_file_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        direct_io.open_new(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"old"
