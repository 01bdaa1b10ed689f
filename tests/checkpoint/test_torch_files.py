"""Files of torch.save: where the storages lie, and that nothing odd is believed."""

from __future__ import annotations

import contextlib
import math
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint import torch_files
from keepstep.checkpoint.torch_files import archives, misplaced, records
from keepstep.errors import CheckpointCorrupt
from tests.checkpoint.foreign_files import Trap, content, write_archives

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
)
END = 22
SECOND_END = END + 20 + 56


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.arange(1, nbytes + 1, dtype=torch.int64).remainder(2).to(torch.uint8)
    return raw.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)


TENSORS = st.lists(
    st.builds(tensor, st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(DTYPES)),
    max_size=13,
)


def at(path: Path, span: tuple[int, int]) -> bytes:
    return path.read_bytes()[slice(*span)]


@settings(max_examples=40)
@given(TENSORS)
def test_the_storages_of_a_dict_are_its_tensors_in_order(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[torch.Tensor]
) -> None:
    path = tmp_path_factory.mktemp("files") / "file.pt"
    torch.save({f"name {number}": one for number, one in enumerate(tensors)}, path)
    found = records(path)
    assert [at(path, span) for span in found] == [content(one) for one in tensors]
    assert all(start % 64 == 0 for start, _ in found)
    assert archives(path) == [(0, path.stat().st_size)]


@settings(max_examples=25)
@given(TENSORS)
def test_archives_one_after_the_other_are_told_apart(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[torch.Tensor]
) -> None:
    path = tmp_path_factory.mktemp("files") / "__0_0.distcp"
    parts = write_archives(path, tensors)
    assert archives(path) == parts
    for part, one in zip(parts, tensors, strict=True):
        (span,) = records(path, *part)
        assert at(path, span) == content(one)
    if len(parts) > 1:
        for wrong in ((parts[0][0], parts[1][1]), (parts[1][0] - 1, parts[1][1]), (0, None)):
            with pytest.raises(CheckpointCorrupt):
                records(path, *wrong)


def test_tensors_that_share_a_storage_have_one_and_a_file_without_tensors_none(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file.pt"
    whole = torch.arange(8.0)
    torch.save({"a": whole, "b": whole[2:]}, path)
    (span,) = records(path)
    assert at(path, span) == content(whole)
    start = span[0]
    assert misplaced(path, "torch", {"a": span, "b": (start + 8, start + 32)}) == ""
    torch.save({}, path)
    assert records(path) == []


def test_more_than_4_gib_are_found_where_they_lie(tmp_path: Path) -> None:
    path = tmp_path / "large.pt"
    large = torch.empty(5 << 30, dtype=torch.uint8)  # never touched: takes no memory
    with torch.serialization.skip_data():  # a hole in the file: takes no space
        torch.save({"a": torch.empty(10), "b": large, "c": torch.empty(3)}, path)
    first, second, third = records(path)
    assert [stop - start for start, stop in (first, second, third)] == [40, 5 << 30, 12]
    assert first[1] < second[0] and second[1] < third[0] < path.stat().st_size
    torch.save(torch.ones(3), later := tmp_path / "later.pt")
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(later.read_bytes())
    assert archives(path) == [(0, size), (size, path.stat().st_size)]
    assert records(path, 0, size) == [first, second, third]


def test_the_description_of_the_objects_is_never_decoded(tmp_path: Path) -> None:
    path, trap = tmp_path / "file.pt", tmp_path / "sprung"
    torch.save({"w": torch.ones(3), "evil": Trap(trap)}, path)
    (span,) = records(path)
    assert at(path, span) == content(torch.ones(3))
    assert not trap.exists()
    torch.load(path, weights_only=False)
    assert trap.exists(), "the trap does not work"


def test_a_span_outside_every_storage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.ones(4), "b": torch.ones(4)}, path)
    a, b = records(path)
    assert misplaced(path, "torch", {"a": a, "b": b, "empty": (7, 7)}) == ""
    for wrong in (
        (a[0] - 1, a[0] + 3),
        (a[1] - 1, a[1] + 1),
        (a[0], b[1]),
        (0, 4),
        (b[1], b[1] + 4),
    ):
        assert "'b' should lie at" in misplaced(path, "torch", {"a": a, "b": wrong})


# Hostile files -----------------------------------------------------------------------------------


def zipped(path: Path, entries: list[tuple[str, bytes]], **options: int) -> Path:
    """A zip archive by Python's own library."""
    with zipfile.ZipFile(path, "w", **options) as archive:  # type: ignore[call-overload]
        for name, data in entries:
            archive.writestr(name, data)
    return path


def test_an_archive_of_another_program_is_read_if_it_has_the_same_form(tmp_path: Path) -> None:
    path = zipped(
        tmp_path / "z", [("x/data/1", b"second"), ("x/data.pkl", b""), ("x/data/0", b"1")]
    )
    assert [at(path, span) for span in records(path)] == [b"1", b"second"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("entries", "options", "why"),
    [
        ([("x/data/0", b"a" * 99)], {"compression": zipfile.ZIP_DEFLATED}, "compressed"),
        ([("x/data/0", b"a" * 99)], {"compression": zipfile.ZIP_BZIP2}, "compressed"),
        ([("x/data/0", b"a"), ("x/data/2", b"a")], {}, "no number or an odd one"),
        ([("x/data/0", b"a"), ("x/data/0", b"b")], {}, "there twice"),
        ([("x/data/0", b"a"), ("y/data/1", b"b")], {}, "of another archive"),
        ([("data", b"a")], {}, "of another archive"),
        ([("x/byteorder", b"big")], {}, "little-endian"),
        ([("x/byteorder", b"little" * 9)], {}, "little-endian"),
        ([], {}, "nothing lies at the start"),
    ],
)
def test_what_torch_does_not_write_is_refused(
    tmp_path: Path, entries: list[tuple[str, bytes]], options: dict[str, int], why: str
) -> None:
    path = zipped(tmp_path / "z", entries, **options)
    with pytest.raises(CheckpointCorrupt, match=why) as caught:
        records(path)
    assert caught.value.where == str(path)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.arange(5.0), "b": torch.arange(7), "c": torch.empty(0)}, path)
    return path


def test_what_is_no_archive_is_refused(tmp_path: Path, good: Path) -> None:
    data = good.read_bytes()
    other = tmp_path / "other"
    legacy = tmp_path / "legacy"
    torch.save({"a": torch.ones(2)}, legacy, _use_new_zipfile_serialization=False)
    for text in (b"", b"x", bytes(400), legacy.read_bytes(), data + b"\0", b"\0" + data, data[:-1]):
        other.write_bytes(text)
        with pytest.raises(CheckpointCorrupt):
            records(other)
        if text:
            with pytest.raises(CheckpointCorrupt):
                archives(other)
    for start, stop in ((-1, None), (5, 4), (0, len(data) + 1), (len(data), None)):
        with pytest.raises(CheckpointCorrupt):
            records(good, start, stop)
    with pytest.raises(FileNotFoundError):
        records(tmp_path / "none")


def patch(path: Path, at: int, form: str, *values: int) -> bool:
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, at if at >= 0 else len(data) + at, *values)
    path.write_bytes(data)
    return True


def entry(path: Path, name: bytes) -> int:
    """Where the directory's entry ``name`` begins."""
    return path.read_bytes().rindex(name) - 46


Damage = Callable[[Path], object]
HOSTILE: dict[str, Damage] = {
    "a huge count": lambda path: patch(path, -SECOND_END + 24, "<QQ", 1 << 60, 1 << 60),
    "a huge directory": lambda path: patch(path, -SECOND_END + 40, "<Q", 1 << 62),
    "a directory far off": lambda path: patch(path, -SECOND_END + 48, "<Q", (1 << 64) - 1),
    "a count too low": lambda path: (
        patch(path, -SECOND_END + 24, "<QQ", 3, 3) and patch(path, -END + 8, "<HH", 3, 3)
    ),
    "two ends that differ": lambda path: patch(path, -END + 8, "<HH", 3, 3),
    "two parts": lambda path: patch(path, -END + 4, "<HH", 1, 1),
    "a comment": lambda path: patch(path, -END + 20, "<H", 1),
    "a storage outside": lambda path: patch(path, entry(path, b"file/data/0") + 42, "<I", 1 << 30),
    "a large size": lambda path: patch(
        path, entry(path, b"file/data/0") + 20, "<II", 1 << 30, 1 << 30
    ),
    "a size of one byte more": lambda path: patch(
        path, entry(path, b"file/data/0") + 20, "<II", 21, 21
    ),
    "a size of one byte less": lambda path: patch(
        path, entry(path, b"file/data/0") + 20, "<II", 19, 19
    ),
    "sizes that are missing": lambda path: patch(
        path, entry(path, b"file/data/0") + 20, "<II", 0xFFFFFFFF, 0xFFFFFFFF
    ),
    "a compressed storage": lambda path: patch(path, entry(path, b"file/data/0") + 10, "<H", 8),
    "an encrypted storage": lambda path: patch(path, entry(path, b"file/data/0") + 8, "<H", 0x809),
    "the place of another": lambda path: patch(
        path,
        entry(path, b"file/data/0") + 42,
        "<I",
        struct.unpack_from("<I", path.read_bytes(), entry(path, b"file/data/1") + 42)[0],
    ),
    "another number": lambda path: patch(path, entry(path, b"file/data/0") + 56, "<B", ord("1")),
}


@pytest.mark.parametrize("damage", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_archive_is_refused(good: Path, damage: Damage) -> None:
    assert len(records(good)) == 3
    damage(good)
    with pytest.raises(CheckpointCorrupt):
        records(good)


def test_storages_that_overlap_are_refused(tmp_path: Path) -> None:
    """The bytes of the first are made to hold the whole second entry."""
    inner = zipped(tmp_path / "inner", [("x/data/1", b"hidden")])
    text = inner.read_bytes()
    local = text[: text.index(b"PK\x01\x02")]
    path = zipped(tmp_path / "outer", [("x/data/0", b"...." + local), ("x/data/1", b"hidden")])
    data = path.read_bytes()
    hidden = data.index(local)
    patch(path, data.rindex(b"x/data/1") - 46 + 42, "<I", hidden)
    with pytest.raises(CheckpointCorrupt, match="does not follow"):
        records(path)


def test_a_directory_over_the_limit_is_not_read(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_files, "MAX_DIRECTORY", 100)
    monkeypatch.setattr(os, "pread", _bounded(os.pread))
    with pytest.raises(CheckpointCorrupt, match="bytes of directory"):
        records(good)


def _bounded(real: Callable[[int, int, int], bytes]) -> Callable[[int, int, int], bytes]:
    def pread(fd: int, size: int, at: int) -> bytes:
        assert size <= 100
        return real(fd, size, at)

    return pread


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["set", "cut", "put", "zero", "copy"]),
        st.integers(0, 10_000),
        st.integers(0, 10_000),
        st.integers(1, 80),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, edits: list[tuple[str, int, int, int, int]]) -> bytes:
    """``data`` with bytes changed, removed, added, cleared, or copied from elsewhere."""
    text = bytearray(data)
    for kind, first, second, size, value in edits:
        here, there = first % (len(text) or 1), second % (len(text) or 1)
        if kind == "set":
            text[here : here + 1] = bytes([value])
        elif kind == "cut":
            del text[here : here + size]
        elif kind == "put":
            text[here:here] = bytes([value]) * size
        elif kind == "zero":
            text[here : here + size] = bytes(len(text[here : here + size]))
        else:
            text[here : here + size] = text[there : there + size]
    return bytes(text)


@settings(max_examples=400)
@given(EDITS)
def test_damage_of_any_kind_is_refused_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[str, int, int, int, int]]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damage"
    path = folder / "file.pt"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        torch.save({"a": torch.arange(5.0), "b": torch.arange(7), "c": torch.empty(0)}, path)
    expected = records(path)
    broken = folder / "broken.pt"
    broken.write_bytes(edited(path.read_bytes(), edits))
    with contextlib.suppress(CheckpointCorrupt):
        assert records(broken) == expected
    with contextlib.suppress(CheckpointCorrupt):
        parts = archives(broken)
        assert [span for part in parts for span in records(broken, *part)] in (expected, [])


def test_a_flipped_bit_anywhere_in_a_file_is_refused_or_changes_nothing(good: Path) -> None:
    expected, data = records(good), good.read_bytes()
    refused = 0
    for index in range(0, len(data), 3):
        changed = bytearray(data)
        changed[index] ^= 1 << index % 8
        good.write_bytes(changed)
        try:
            assert records(good) == expected
        except CheckpointCorrupt:
            refused += 1
    assert refused > 100
