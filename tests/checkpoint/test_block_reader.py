"""Reading blocks: each one once, verified, in any number of pieces."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint import blocks
from keepstep.checkpoint.block_reader import BlockReader
from keepstep.checkpoint.source import StoredFile
from keepstep.errors import CheckpointCorrupt

BLOCK = 4096


@dataclass
class Wanted:
    """A piece that remembers what it got."""

    start: int
    stop: int
    shared: bool = False
    got: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.got = bytearray(b"\xaa" * (self.stop - self.start))
        self.parts = 0

    def take(self, at: int, data: memoryview) -> None:
        assert self.start <= at and at + len(data) <= self.stop and len(data)
        self.got[at - self.start : at - self.start + len(data)] = data
        self.parts += len(data)


def stored(path: Path, data: bytes, head: int = 0) -> StoredFile:
    path.write_bytes(data)
    digests = [blocks.digest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    return StoredFile(
        path=path, size=len(data), block_bytes=BLOCK, blocks=blocks.encode(digests), head=head
    )


def read(info: StoredFile, pieces: Sequence[Wanted], *, alone: bool = True, place: int = 0) -> int:
    reader = BlockReader(alone=alone, place=place)
    reader.add(info, pieces)
    reader.run()
    return reader.bytes


@settings(max_examples=30)
@given(
    size=st.integers(1, 40 * BLOCK),
    cuts=st.lists(st.tuples(st.integers(0, 40 * BLOCK), st.integers(0, 3 * BLOCK), st.booleans())),
    alone=st.booleans(),
    place=st.integers(0, 5),
)
def test_every_piece_gets_its_bytes_once_and_blocks_are_read_once(
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    cuts: list[tuple[int, int, bool]],
    alone: bool,
    place: int,
) -> None:
    data = os.urandom(size)
    info = stored(tmp_path_factory.mktemp("any") / "file", data)
    pieces = [
        Wanted(min(start, size), min(start + length, size), shared)
        for start, length, shared in cuts
    ]
    count = read(info, pieces, alone=alone, place=place)
    for piece in pieces:
        assert piece.got == data[piece.start : piece.stop]
        assert piece.parts == piece.stop - piece.start
    touched = {
        at
        for piece in pieces
        if piece.start < piece.stop
        for at in range(piece.start // BLOCK, -(-piece.stop // BLOCK))
    }
    assert count == sum(min(BLOCK, size - at * BLOCK) for at in touched)


@pytest.mark.parametrize("index", range(6))
def test_damage_in_any_needed_block_is_named_and_not_handed_on(tmp_path: Path, index: int) -> None:
    data = os.urandom(5 * BLOCK + 10)
    info = stored(tmp_path / "file", data)
    at = index * BLOCK + 5
    info.path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    piece = Wanted(0, len(data))
    with pytest.raises(CheckpointCorrupt) as caught:
        read(info, [piece])
    stop = min((index + 1) * BLOCK, len(data))
    assert f"bytes {index * BLOCK} to {stop} differ" in caught.value.what
    assert caught.value.where == str(info.path)
    assert piece.got[index * BLOCK : stop] == b"\xaa" * (stop - index * BLOCK)


def test_damage_where_nothing_is_needed_is_not_read(tmp_path: Path) -> None:
    data = os.urandom(3 * BLOCK)
    info = stored(tmp_path / "file", data)
    info.path.write_bytes(bytes(BLOCK) + data[BLOCK:])
    piece = Wanted(BLOCK, 2 * BLOCK)
    assert read(info, [piece]) == BLOCK
    assert piece.got == data[BLOCK : 2 * BLOCK]


def test_the_head_is_verified_though_no_piece_lies_in_it(tmp_path: Path) -> None:
    data = os.urandom(3 * BLOCK)
    info = stored(tmp_path / "file", data, head=10)
    info.path.write_bytes(b"\0" + data[1:])
    with pytest.raises(CheckpointCorrupt, match="bytes 0 to 4096"):
        read(info, [Wanted(2 * BLOCK, 3 * BLOCK)])


@pytest.mark.parametrize("size", [0, BLOCK, 2 * BLOCK + 3])
def test_a_file_that_was_cut_is_damage(tmp_path: Path, size: int) -> None:
    info = stored(tmp_path / "file", os.urandom(3 * BLOCK))
    os.truncate(info.path, size)
    with pytest.raises(CheckpointCorrupt, match=f"it ends at byte {size}, committed were 12288"):
        read(info, [Wanted(0, 3 * BLOCK)])


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    info = stored(tmp_path / "file", os.urandom(BLOCK))
    info.path.unlink()
    with pytest.raises(FileNotFoundError, match=str(info.path)):
        read(info, [Wanted(0, BLOCK)])


def test_a_piece_outside_of_the_file_is_refused(tmp_path: Path) -> None:
    info = stored(tmp_path / "file", os.urandom(BLOCK))
    with pytest.raises(CheckpointCorrupt, match="bytes 4000 to 4097 are outside"):
        read(info, [Wanted(4000, 4097)])


def test_a_device_that_refuses_direct_reads_is_read_in_the_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(3 * BLOCK + 1)
    info, piece, opened = stored(tmp_path / "file", data), Wanted(0, 3 * BLOCK + 1), []
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        opened.append(bool(flags & os.O_DIRECT))
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reads")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    read(info, [piece])
    assert piece.got == data
    assert opened == [True, False]


def test_what_only_this_process_needs_goes_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(6 * BLOCK)
    info = stored(tmp_path / "file", data, head=100)
    reads: dict[int, bool] = {}
    real = os.preadv

    def watch(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        direct = bool(os.readlink(f"/proc/self/fd/{fd}")) and _is_direct(fd)
        count = real(fd, buffers, at)
        reads.update({block: direct for block in range(at // BLOCK, (at + count) // BLOCK)})
        return count

    monkeypatch.setattr(os, "preadv", watch)
    own, shared = Wanted(100, 4 * BLOCK + 9), Wanted(4 * BLOCK + 9, 5 * BLOCK, shared=True)
    read(info, [own, shared], alone=False)
    # The head and the block that others want too, at its end, are read through the cache.
    assert reads == {0: False, 1: True, 2: True, 3: True, 4: False}
    reads.clear()
    read(info, [own, shared], alone=True)
    assert reads == dict.fromkeys(range(5), True)


def _is_direct(fd: int) -> bool:
    flags = next(
        line for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines() if "flags" in line
    )
    return bool(int(flags.split()[1], 8) & os.O_DIRECT)


def reading() -> tuple[list[str], list[str]]:
    """Files in a test's folder that are open, and threads that read."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if os.path.lexists(link)]
    files = [target for target in targets if Path(target).name in ("good", "bad", "file")]
    return files, [one.name for one in threading.enumerate() if one.name == "keepstep-read"]


def test_no_descriptor_and_no_thread_is_left(tmp_path: Path) -> None:
    data = os.urandom(64 * BLOCK)
    good, bad = stored(tmp_path / "good", data), stored(tmp_path / "bad", data)
    bad.path.write_bytes(bytes(len(data)))
    reader = BlockReader(alone=False)
    for info in (good, bad):
        reader.add(info, [Wanted(0, len(data))])
    with pytest.raises(CheckpointCorrupt):
        reader.run()
    assert reading() == ([], [])


def test_an_interruption_ends_the_threads(tmp_path: Path) -> None:
    class Stop(BaseException):
        pass

    class Interrupted(Wanted):
        def take(self, at: int, data: memoryview) -> None:
            raise Stop

    info = stored(tmp_path / "file", os.urandom(BLOCK))
    with pytest.raises(Stop):
        read(info, [Interrupted(0, BLOCK)])
    assert reading() == ([], [])
