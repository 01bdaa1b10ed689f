"""Finds out whether a checkpoint is still what was committed. Used by restore and command line.

Our own files say themselves what is in them, and are compared with the manifest. Of files of other
libraries nothing is decoded: every tensor must lie inside a storage of them, and receipts that are
still there must say the same as the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from keepstep.checkpoint import blocks, layout, manifest, shard_file, torch_files
from keepstep.checkpoint.manifest import FileInfo, Manifest, Receipt
from keepstep.errors import CheckpointError, KeepstepError
from keepstep.wire.types import Version

_CHUNK = 16 << 20
_SHOWN = 4
_READERS = 4
_STRIP = 64 << 20
"""Bytes of a file that one thread reads before it takes others."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something wrong with ``file``.

    ``kind`` is manifest, missing, size, checksum, header or receipt (what only says how the
    checkpoint came about, a restore does without it). ``ranges`` are the first byte
    and the byte after the last of each damaged part of the file, where its blocks tell.
    """

    file: str
    kind: str
    detail: str
    ranges: tuple[tuple[int, int], ...] = ()


def verify(
    root: Path, folder: str, deep: bool = True, progress: Callable[[int], None] | None = None
) -> list[Problem]:
    """Compare the checkpoint ``folder`` with its manifest.

    Args:
        root: Folder of all checkpoints.
        folder: Name of the checkpoint's folder.
        deep: Also read all data and compare the checksums; else only sizes, headers and receipts.
        progress: Told how many more bytes were read, by any thread.

    Returns:
        What is wrong, in file order; empty if the checkpoint is good.
    """
    path = root / folder
    try:
        found = manifest.decode(layout.read(path / layout.MANIFEST))
    except (CheckpointError, OSError) as error:
        return [_problem(layout.MANIFEST, "manifest", error)]
    problems: list[Problem] = []
    name = layout.parse_folder(folder)
    if name is not None and name.step != found.version.step:
        detail = f"it is of step {found.version.step}"
        problems.append(Problem(file=layout.MANIFEST, kind="manifest", detail=detail))
    receipts: list[Receipt] = []
    for file, info in found.all_files().items():
        problem = _check_bytes(path, file, info, deep, progress)
        if problem is None and file in found.files:
            result = _check_content(path, file, info, found)
            if isinstance(result, Receipt):
                receipts.append(result)
            else:
                problem = result
        if problem is not None:
            problems.append(problem)
    if not problems and len(receipts) == len(found.files):
        problems = _compare(found, receipts)
    return problems or _check_notes(path, found, receipts)


def _check_bytes(
    path: Path, file: str, info: FileInfo, deep: bool, progress: Callable[[int], None] | None
) -> Problem | None:
    """What is wrong with the size or, if ``deep``, the checksum of the file."""
    try:
        target = layout.inside(path, file)
        size = target.stat().st_size
        if size != info.size:
            detail = f"it has {size} bytes, committed were {info.size}"
            return Problem(file=file, kind="size", detail=detail)
        if not deep:
            return None
        if info.block_bytes:
            return _check_blocks(target, file, info, progress)
        checksum = file_checksum(target, progress=progress)
        if checksum != info.checksum:
            detail = f"its checksum is {checksum}, committed was {info.checksum}"
            return Problem(file=file, kind="checksum", detail=detail)
    except FileNotFoundError:
        return Problem(file=file, kind="missing", detail="it is not there")
    except OSError as error:
        return _problem(file, "missing", error)
    except CheckpointError as error:
        return _problem(file, "header", error)
    return None


def _check_blocks(
    target: Path, file: str, info: FileInfo, progress: Callable[[int], None] | None
) -> Problem | None:
    found = _block_digests(target, info.block_bytes, progress)
    committed = info.block_digests()
    if len(found) != len(committed):
        return Problem(file=file, kind="size", detail="its size changed while it was read")
    wrong = [at for at, one in enumerate(committed) if found[at] != one]
    if not wrong:
        return None
    ranges = _joined([info.block_span(at) for at in wrong])
    shown = ", ".join(f"{start} to {stop - 1}" for start, stop in ranges[:_SHOWN])
    more = f" and {len(ranges) - _SHOWN} more ranges" if len(ranges) > _SHOWN else ""
    detail = (
        f"{len(wrong)} of its {len(committed)} blocks differ from what was committed: bytes "
        f"{shown}{more}"
    )
    return Problem(file=file, kind="checksum", detail=detail, ranges=tuple(ranges))


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours among sorted spans as one."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined


def _check_content(
    path: Path, file: str, info: FileInfo, found: Manifest
) -> Receipt | Problem | None:
    """The receipt that the file as it is now would get, or what is wrong with it.

    None: it is a good file of another library, and its receipt is not there any more.
    """
    try:
        target = layout.inside(path, file)
        if found.layout != "safetensors":
            return _check_foreign(path, file, info, found)
        header = shard_file.read_header(target)
    except OSError as error:
        return _problem(file, "missing", error)
    except CheckpointError as error:
        return _problem(file, "header", error)
    if (header.version, header.rank) != (found.version, info.rank):
        detail = f"it is rank {header.rank}'s of {header.version}, the manifest says otherwise"
        return Problem(file=file, kind="header", detail=detail)
    return manifest.receipt_of(header, info.checksum, info.block_bytes, info.blocks)


def _check_notes(path: Path, found: Manifest, receipts: Sequence[Receipt]) -> list[Problem]:
    """What is wrong with the receipts and the owner's name, as far as they are still there."""
    problems: list[Problem] = []
    for receipt in receipts:
        name = layout.receipt_name(receipt.rank)
        try:
            if manifest.decode_receipt((path / name).read_bytes(), name) != receipt:
                detail = "it says otherwise than the manifest and the file that it belongs to"
                problems.append(Problem(file=name, kind="receipt", detail=detail))
        except FileNotFoundError:
            pass
        except (CheckpointError, OSError) as error:
            problems.append(_problem(name, "receipt", error))
    name = layout.VERSION_FILE
    try:
        if msgspec.json.decode((path / name).read_bytes(), type=Version) != found.version:
            detail = "it names another version than the manifest"
            problems.append(Problem(file=name, kind="receipt", detail=detail))
    except FileNotFoundError:
        pass
    except (msgspec.DecodeError, OSError) as error:
        detail = f"it cannot be read: {error}"
        problems.append(Problem(file=name, kind="receipt", detail=detail))
    return problems


def _check_foreign(
    path: Path, file: str, info: FileInfo, found: Manifest
) -> Receipt | Problem | None:
    spans = found.spans.get(info.rank, {})
    misplaced = torch_files.misplaced(layout.inside(path, file), found.layout, spans)
    if misplaced:
        return Problem(file=file, kind="header", detail=misplaced)
    name = layout.receipt_name(info.rank)
    try:
        return manifest.decode_receipt(layout.read(path / name), name)
    except FileNotFoundError:
        return None  # the manifest says all that a reader needs
    except CheckpointError as error:
        return _problem(name, "receipt", error)


def _compare(found: Manifest, receipts: list[Receipt]) -> list[Problem]:
    """Whether what the files or their receipts say adds up to the manifest again."""
    try:
        again = manifest.assemble(receipts, found.created)
    except CheckpointError as error:
        return [_problem(layout.MANIFEST, "header", error)]
    if again == found:
        return []
    wrong = [
        field for field in found.__struct_fields__ if getattr(again, field) != getattr(found, field)
    ]
    detail = f"the files' own descriptions say otherwise about: {', '.join(wrong)}"
    return [Problem(file=layout.MANIFEST, kind="header", detail=detail)]


def _problem(file: str, kind: str, error: KeepstepError | OSError) -> Problem:
    if isinstance(error, KeepstepError):
        return Problem(file=file, kind=kind, detail=error.what)
    return Problem(file=file, kind=kind, detail=error.strerror or str(error))


def file_checksum(
    path: Path, block_bytes: int = 0, progress: Callable[[int], None] | None = None
) -> str:
    """The checksum of the file as 32 hex digits: see ``manifest.FileInfo``.

    Args:
        path: The file.
        block_bytes: Bytes of its blocks; 0: it is xxh3-128 of the bytes as a whole.
        progress: Told how many more bytes were read.

    Raises:
        OSError: it cannot be read.
    """
    if block_bytes:
        return blocks.combine(_block_digests(path, block_bytes, progress))
    digest = xxhash.xxh3_128()
    _read(path, _CHUNK, digest.update, progress)
    return digest.hexdigest()


def _block_digests(
    path: Path, block_bytes: int, progress: Callable[[int], None] | None
) -> list[bytes]:
    """Digests of all blocks, read by several threads."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        strip = max(1, _STRIP // block_bytes) * block_bytes

        def digests(start: int) -> list[bytes]:
            found: list[bytes] = []
            with memoryview(bytearray(min(block_bytes, size))) as buffer:
                for at in range(start, min(start + strip, size), block_bytes):
                    filled = _fill(fd, buffer[: min(block_bytes, size - at)], at)
                    found.append(blocks.digest(buffer[:filled]))
                    if progress is not None:
                        progress(filled)
            return found

        with ThreadPoolExecutor(_READERS, "verify") as pool:
            return [one for found in pool.map(digests, range(0, size, strip)) for one in found]
    finally:
        os.close(fd)


def _fill(fd: int, buffer: memoryview, at: int) -> int:
    """Fill ``buffer`` with what lies at ``at``; returns how much there was."""
    filled = 0
    while filled < len(buffer):
        count = os.preadv(fd, [buffer[filled:]], at + filled)
        if not count:
            break  # the file has become shorter meanwhile
        filled += count
    return filled


def _read(
    path: Path,
    size: int,
    take: Callable[[memoryview], object],
    progress: Callable[[int], None] | None,
) -> None:
    """Give the file to ``take`` in parts of ``size`` bytes; only the last may be shorter."""
    with path.open("rb", buffering=0) as file, memoryview(bytearray(size)) as buffer:
        ended = False
        while not ended:
            filled = 0
            while filled < size and not ended:
                count = file.readinto(buffer[filled:])
                filled += count
                ended = count == 0
            if filled:
                take(buffer[:filled])
                if progress is not None:
                    progress(filled)
