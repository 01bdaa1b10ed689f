"""Where the tensors lie in a file that ``torch.save`` wrote, without decoding any of it.

Used by whoever seals or verifies such a file. A ``torch.save`` file is a zip archive of stored (not
compressed) entries: ``NAME/data.pkl`` says what the objects are, and is never read here, and
``NAME/data/0``, ``NAME/data/1`` and so on are the bytes of the storages, in the order in which the
objects mention them. torch's distributed checkpoints put one such archive a tensor into one file,
one after the other.

The file may come from anybody: whatever contradicts itself is refused. Of the archive's own
redundancy everything that says where an entry lies must agree: the directory at its end, the header
before each entry and the sizes behind it; entries lie one after the other without gaps. Checksums
of entries are not computed; those of our manifest cover the whole file.
"""

from __future__ import annotations

import bisect
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.checkpoint.manifest import Layout
from keepstep.errors import CheckpointCorrupt

MAX_DIRECTORY = 100_000_000
"""Bytes of an archive's directory; about 70 an entry."""

_END = struct.Struct("<4sHHHHIIH")
_END_MAGIC = b"PK\x05\x06"
_LOCATOR = struct.Struct("<4sIQI")
_LOCATOR_MAGIC = b"PK\x06\x07"
_END64 = struct.Struct("<4sQHHIIQQQQ")
_END64_MAGIC = b"PK\x06\x06"
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_ENTRY_MAGIC = b"PK\x01\x02"
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_LOCAL_MAGIC = b"PK\x03\x04"
_SIZES = struct.Struct("<4sIII")
_SIZES64 = struct.Struct("<4sIQQ")
_SIZES_MAGIC = b"PK\x07\x08"
_EXTRA = struct.Struct("<HH")
_EXTRA64 = 1
_IN_EXTRA16, _IN_EXTRA32 = 0xFFFF, 0xFFFFFFFF
_SIZES_FOLLOW, _UTF8 = 1 << 3, 1 << 11
_STORAGE = re.compile(rb"data/(0|[1-9][0-9]{0,9})")
_BYTE_ORDER = b"byteorder"
_OBJECTS = b"data.pkl"


@dataclass(frozen=True, slots=True)
class _Directory:
    """An archive's list of entries; all places are counted from the start of the file.

    The archive is ``start`` to ``stop``, its list ``at`` to ``end``.
    """

    start: int
    stop: int
    at: int
    end: int
    count: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """``name`` with the archive's own name in front; ``header`` is where it begins in the file."""

    name: bytes
    header: int
    size: int
    flags: int
    checksum: int


class _Odd(Exception):
    """Something in an archive is not as torch writes it."""


@dataclass(frozen=True, slots=True)
class Archive:
    """Where things lie in one archive, each by its first byte and the byte after its last one.

    ``storages`` are in the order of their numbers; ``objects`` is the pickle that says what they
    are.
    """

    storages: list[tuple[int, int]]
    objects: tuple[int, int]


def archive(path: Path, start: int, stop: int) -> Archive:
    """What lies where in the archive at ``start`` to ``stop``. Raises as ``records``."""
    with path.open("rb", buffering=0) as file:
        return _archive(file.fileno(), path, start, stop)


def records(path: Path, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
    """Where the storages of one ``torch.save`` archive lie, in the order of their numbers.

    Args:
        path: The file.
        start: First byte of the archive.
        stop: The byte after its last one; None: the end of the file.

    Returns:
        For storage 0, 1, 2, ... its first byte and the byte after its last one, counted from the
        start of the file.

    Raises:
        CheckpointCorrupt: the bytes are not exactly one whole archive as torch writes it.
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        return _archive(file.fileno(), path, start, stop).storages


def _archive(fd: int, path: Path, start: int, stop: int | None) -> Archive:
    size = os.fstat(fd).st_size
    stop = size if stop is None else stop
    try:
        if not 0 <= start <= stop <= size:
            raise _Odd(f"bytes {start} to {stop} are not inside it, it has {size}")
        directory = _directory(fd, start, stop)
        if directory.start != start:
            raise _Odd(f"the archive that ends at {stop} starts at {directory.start}")
        return _contents(fd, directory)
    except _Odd as odd:
        raise _corrupt(str(odd), path) from odd


def archives(path: Path) -> list[tuple[int, int]]:
    """First byte and byte after the last of each archive in a file that is made of nothing else.

    Found from the end backwards: an archive says at its end where it starts.

    Raises:
        CheckpointCorrupt: there is something else in the file.
        OSError: the file cannot be read.
    """
    found: list[tuple[int, int]] = []
    with path.open("rb", buffering=0) as file:
        fd = file.fileno()
        stop = os.fstat(fd).st_size
        try:
            while stop > 0:
                directory = _directory(fd, 0, stop)
                found.append((directory.start, stop))
                stop = directory.start
        except _Odd as odd:
            raise _corrupt(str(odd), path) from odd
    return found[::-1]


def misplaced(path: Path, layout: Layout, spans: Mapping[str, tuple[int, int]]) -> str:
    """Which of ``spans`` is not inside a storage of the file; empty if all are.

    Args:
        path: The file.
        layout: "torch": one archive; "dcp": archives one after the other.
        spans: By tensor, its first byte and the byte after its last one. Tensors without bytes may
            be anywhere.

    Raises:
        CheckpointCorrupt: the file is not such a file.
        OSError: it cannot be read.
    """
    parts = archives(path) if layout == "dcp" else [(0, None)]
    storages = sorted(span for start, stop in parts for span in records(path, start, stop))
    starts = [start for start, _ in storages]
    for name, (start, stop) in spans.items():
        around = bisect.bisect_right(starts, start) - 1
        # Storages without bytes may start where another one does: the last of them is the longest.
        if start < stop and (around < 0 or storages[around][1] < stop):
            return f"{name!r} should lie at {start} to {stop}, and there is no storage there"
    return ""


def _directory(fd: int, lowest: int, stop: int) -> _Directory:
    """The directory of the archive that ends at ``stop`` and starts at ``lowest`` or later."""
    at = stop - _END.size
    magic, disk, first, here, count, size, offset, comment = _unpack(_END, fd, at, lowest)
    if magic != _END_MAGIC or disk or first or comment:
        raise _Odd(f"no archive ends at {stop}")
    end = at
    has_locator = at - _LOCATOR.size >= lowest
    if has_locator and _read(fd, at - _LOCATOR.size, 4) == _LOCATOR_MAGIC:
        locator = _unpack(_LOCATOR, fd, at - _LOCATOR.size, lowest)
        end = at - _LOCATOR.size - _END64.size
        wide = _unpack(_END64, fd, end, lowest)
        if wide[0] != _END64_MAGIC or wide[1] != _END64.size - 12 or any(wide[4:6]):
            raise _Odd(f"the archive that ends at {stop} has no whole second end")
        narrow = (here, count, size, offset)
        limits = (_IN_EXTRA16, _IN_EXTRA16, _IN_EXTRA32, _IN_EXTRA32)
        here, count, size, offset = wide[6:]
        for value, same, limit in zip(narrow, wide[6:], limits, strict=True):
            if value not in (same, limit):
                raise _Odd(f"the two ends of the archive that ends at {stop} differ")
        if locator[1] or locator[3] != 1 or locator[2] != offset + size:
            raise _Odd(f"the archive that ends at {stop} is in parts or has gaps")
    start = end - size - offset
    if here != count or start < lowest or size > MAX_DIRECTORY or count * _ENTRY.size > size:
        raise _Odd(f"{count} entries, {size} bytes of directory and {offset} of data before {end}")
    return _Directory(start=start, stop=stop, at=end - size, end=end, count=count)


def _contents(fd: int, directory: _Directory) -> Archive:
    """Spans of the storages of an archive, and of its objects."""
    entries = sorted(_entries(fd, directory), key=lambda entry: entry.header)
    if not entries or entries[0].header != directory.start:
        raise _Odd("nothing lies at the start of the archive")
    archive, slash, _ = entries[0].name.partition(b"/")
    seen: set[bytes] = set()
    numbered: dict[int, tuple[int, int]] = {}
    objects = (directory.at, directory.at)
    free = directory.start
    for entry in entries:
        if entry.name in seen or not slash or not entry.name.startswith(archive + b"/"):
            raise _Odd(f"the name {entry.name!r} is there twice or is of another archive")
        seen.add(entry.name)
        if entry.header != free:
            raise _Odd(f"{entry.name!r} at {entry.header} does not follow the entry before it")
        span, free = _locate(fd, entry, directory.at)
        inner = entry.name[len(archive) + 1 :]
        match = _STORAGE.fullmatch(inner)
        if match:
            numbered[int(match[1])] = span
        elif inner == _OBJECTS:
            objects = span
        elif inner == _BYTE_ORDER and _read(fd, span[0], min(entry.size, 8)) != b"little":
            raise _Odd("its bytes are not in little-endian order")
    if free != directory.at:
        raise _Odd(f"its entries end at {free}, its directory begins at {directory.at}")
    if numbered.keys() != set(range(len(numbered))):
        raise _Odd(f"of {len(numbered)} storages some have no number or an odd one")
    return Archive([numbered[number] for number in range(len(numbered))], objects)


def _entries(fd: int, directory: _Directory) -> Iterator[_Entry]:
    """Entries of the directory, in its order."""
    text = _read(fd, directory.at, directory.end - directory.at)
    at = 0
    for _ in range(directory.count):
        if at + _ENTRY.size > len(text):
            raise _Odd("the directory is shorter than its entries")
        fields = _ENTRY.unpack_from(text, at)
        magic, flags, method, checksum = fields[0], fields[3], fields[4], fields[7]
        stored, size, name_size, extra_size, comment, disk = fields[8:14]
        at += _ENTRY.size
        name = text[at : at + name_size]
        extra = text[at + name_size : at + name_size + extra_size]
        at += name_size + extra_size
        if magic != _ENTRY_MAGIC or comment or disk or at > len(text):
            raise _Odd("an entry of the directory is not whole")
        if method or flags & ~(_SIZES_FOLLOW | _UTF8):
            raise _Odd(f"{name!r} is compressed or encrypted: method {method}, flags {flags:#x}")
        size, stored, offset = _wide((size, stored, fields[16]), extra)
        if stored != size:
            raise _Odd(f"{name!r} has {size} bytes and {stored} stored ones")
        yield _Entry(
            name=name,
            header=directory.start + offset,
            size=size,
            flags=flags,
            checksum=checksum,
        )
    if at != len(text):
        raise _Odd("the directory is longer than its entries")


def _wide(fields: tuple[int, int, int], extra: bytes) -> tuple[int, int, int]:
    """Replace the numbers that do not fit into 32 bits by those of the extra field."""
    values: list[int] = []
    at = 0
    while at < len(extra):
        if at + _EXTRA.size > len(extra):
            raise _Odd("an extra field is cut off")
        kind, size = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if at + size > len(extra):
            raise _Odd("an extra field is cut off")
        if kind == _EXTRA64:
            if values or size % 8:
                raise _Odd("an entry has odd large sizes")
            values = [value[0] for value in struct.iter_unpack("<Q", extra[at : at + size])]
        at += size
    if len(values) != sum(field == _IN_EXTRA32 for field in fields):
        raise _Odd("an entry has odd large sizes")
    rest = iter(values)
    first, second, third = (next(rest) if one == _IN_EXTRA32 else one for one in fields)
    return first, second, third


def _locate(fd: int, entry: _Entry, limit: int) -> tuple[tuple[int, int], int]:
    """Span of the entry's bytes, and the first byte after all that belongs to it.

    Compares what the directory says with the header before the bytes and the sizes behind them.
    """
    fields = _unpack(_LOCAL, fd, entry.header, 0)
    magic, flags, method, name_size, extra_size = fields[0], *fields[2:4], *fields[9:]
    start = entry.header + _LOCAL.size + name_size + extra_size
    stop = start + entry.size
    if magic != _LOCAL_MAGIC or stop > limit:
        raise _Odd(f"{entry.name!r} does not lie at {entry.header} to {stop}")
    if _read(fd, entry.header + _LOCAL.size, name_size) != entry.name:
        raise _Odd(f"at {entry.header} lies another entry than {entry.name!r}")
    if (flags, method) != (entry.flags, 0):
        raise _Odd(f"{entry.name!r} is described in two ways")
    if not entry.flags & _SIZES_FOLLOW:
        told = fields[6:9]
        if told != (entry.checksum, entry.size, entry.size):
            raise _Odd(f"{entry.name!r} has sizes {told[1:]}, the directory says {entry.size}")
        return (start, stop), stop
    for form in (_SIZES, _SIZES64):
        behind = stop + form.size
        wanted = (_SIZES_MAGIC, entry.checksum, entry.size, entry.size)
        if behind <= limit and form.unpack(_read(fd, stop, form.size)) == wanted:
            return (start, stop), behind
    raise _Odd(f"behind the {entry.size} bytes of {entry.name!r} are other sizes")


def _unpack(form: struct.Struct, fd: int, at: int, lowest: int) -> tuple[Any, ...]:
    if at < lowest:
        raise _Odd(f"it is too short: {form.size} bytes are wanted at {at}")
    return form.unpack(_read(fd, at, form.size))


def _read(fd: int, at: int, size: int) -> bytes:
    """``size`` bytes at ``at``; the caller has bounded both."""
    parts: list[bytes] = []
    while size > 0:
        part = os.pread(fd, size, at)
        if not part:
            raise _Odd(f"it ends at {at}, {size} bytes more were expected")
        parts.append(part)
        at, size = at + len(part), size - len(part)
    return b"".join(parts)


def _corrupt(why: str, path: Path) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"this is not a whole file of torch.save: {why}",
        where=str(path),
        done="nothing was read from it",
        advice="verify the checkpoint; use an older one",
    )
