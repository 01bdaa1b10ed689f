"""Finds out whether a checkpoint is still what was committed. Used by restore and command line.

Our own files say themselves what is in them, and are compared with the manifest. Of files of other
libraries nothing is decoded: every tensor must lie inside a storage of them, and receipts that are
still there must say the same as the manifest.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import xxhash

from keepstep.checkpoint import layout, manifest, shard_file, torch_files
from keepstep.checkpoint.manifest import FileInfo, Manifest, Receipt
from keepstep.errors import CheckpointError, KeepstepError

_CHUNK = 16 << 20


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something wrong with ``file``.

    ``kind`` is manifest, missing, size, checksum, header or receipt.
    """

    file: str
    kind: str
    detail: str


def verify(root: Path, folder: str, deep: bool = True) -> list[Problem]:
    """Compare the checkpoint ``folder`` with its manifest.

    Args:
        root: Folder of all checkpoints.
        folder: Name of the checkpoint's folder.
        deep: Also read all data and compare the checksums; else only sizes, headers and receipts.

    Returns:
        What is wrong, in file order; empty if the checkpoint is good.
    """
    path = root / folder
    try:
        found = manifest.decode((path / layout.MANIFEST).read_bytes())
    except (CheckpointError, OSError) as error:
        return [_problem(layout.MANIFEST, "manifest", error)]
    problems: list[Problem] = []
    name = layout.parse_folder(folder)
    if name is not None and name.step != found.version.step:
        detail = f"it is of step {found.version.step}"
        problems.append(Problem(file=layout.MANIFEST, kind="manifest", detail=detail))
    receipts: list[Receipt] = []
    for file, info in found.all_files().items():
        problem = _check_bytes(path, file, info, deep)
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
    return problems


def _check_bytes(path: Path, file: str, info: FileInfo, deep: bool) -> Problem | None:
    """What is wrong with the size or, if ``deep``, the checksum of the file."""
    try:
        target = layout.inside(path, file)
        size = target.stat().st_size
        if size != info.size:
            detail = f"it has {size} bytes, committed were {info.size}"
            return Problem(file=file, kind="size", detail=detail)
        if deep and (checksum := file_checksum(target)) != info.checksum:
            detail = f"its checksum is {checksum}, committed was {info.checksum}"
            return Problem(file=file, kind="checksum", detail=detail)
    except FileNotFoundError:
        return Problem(file=file, kind="missing", detail="it is not there")
    except OSError as error:
        return _problem(file, "missing", error)
    except CheckpointError as error:
        return _problem(file, "header", error)
    return None


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
    return manifest.receipt_of(header, info.checksum)


def _check_foreign(
    path: Path, file: str, info: FileInfo, found: Manifest
) -> Receipt | Problem | None:
    spans = found.spans.get(info.rank, {})
    misplaced = torch_files.misplaced(layout.inside(path, file), found.layout, spans)
    if misplaced:
        return Problem(file=file, kind="header", detail=misplaced)
    name = layout.receipt_name(info.rank)
    try:
        return manifest.decode_receipt((path / name).read_bytes(), name)
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


def file_checksum(path: Path) -> str:
    """xxh3-128 of the file's bytes as 32 hex digits. Raises OSError."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(_CHUNK)
    with path.open("rb", buffering=0) as file, memoryview(buffer) as view:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()
