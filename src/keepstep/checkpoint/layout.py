"""Names of the files and folders of a checkpoint, and how a small file becomes durable.

Used by every process that touches checkpoints. A checkpoint is one folder per version under the
checkpoint root::

    checkpoints/step-00000500/              .t2r7 is added when the plain name is another version's
        version.json                        whose folder this is; written first
        rank-00003.safetensors              one rank's shard
        rank-00003.receipt.json             its size and checksum; written after the shard
        manifest.json                       written last; without it the folder does not exist
        pinned                              may be there: retention does not remove the checkpoint

Another library's files take the place of the shards: ``rank-00003.pt`` of ``torch.save``, or
``__3_0.distcp`` and ``.metadata`` of torch's distributed checkpoints. Receipts and manifest name
them and say in which bytes of them each tensor lies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from keepstep.errors import CheckpointCorrupt
from keepstep.wire.types import Version

MANIFEST = "manifest.json"
VERSION_FILE = "version.json"
PINNED = "pinned"
RECORDS = ("leases", "terms")
"""Folders beside those of the checkpoints, of small files that say who saves here."""
_MAX_SAME_NAME = 1000
_STALE_HANDLES = 4
_FOLDER = re.compile(r"step-([0-9]{8,18})(?:\.t([0-9]{1,18})r([0-9]{1,18})(?:-[0-9]{1,4})?)?")
_TEMPORARY = re.compile(r"\..+\.[0-9]+-[0-9a-f]{8}\.tmp", re.DOTALL)
_SHARD = re.compile(r"rank-([0-9]{5,9})\.safetensors")


class FolderName(NamedTuple):
    """What a checkpoint folder's name says; ``term`` and ``round`` are None without a suffix."""

    step: int
    term: int | None
    round: int | None


def folder_names(version: Version) -> Iterator[str]:
    """Names that the folder of ``version`` may have, in the order in which they are tried."""
    plain = f"step-{version.step:08d}"
    yield plain
    suffixed = f"{plain}.t{version.term}r{version.round}"
    yield suffixed
    for number in range(2, _MAX_SAME_NAME):
        yield f"{suffixed}-{number}"


def parse_folder(name: str) -> FolderName | None:
    """The parts of a checkpoint folder's name, or None if it is no such name."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None
    step, term, round_number = match.groups()
    return FolderName(
        int(step),
        None if term is None else int(term),
        None if round_number is None else int(round_number),
    )


def shard_name(rank: int) -> str:
    """File name of ``rank``'s shard."""
    return f"rank-{rank:05d}.safetensors"


def torch_name(rank: int) -> str:
    """File name of ``rank``'s part of a checkpoint that ``torch.save`` wrote."""
    return f"rank-{rank:05d}.pt"


def receipt_name(rank: int) -> str:
    """File name of the receipt of ``rank``'s shard."""
    return f"rank-{rank:05d}.receipt.json"


def parse_shard(name: str) -> int | None:
    """The rank whose shard has this file name, or None if it is no such name."""
    match = _SHARD.fullmatch(name)
    return None if match is None else int(match.group(1))


def temporary_name(name: str) -> str:
    """A fresh hidden name for the unfinished form of ``name``; never that of a finished file."""
    return f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"


def is_temporary_name(name: str) -> bool:
    """Whether ``name`` is one that ``temporary_name`` makes."""
    return _TEMPORARY.fullmatch(name) is not None


def is_plain_name(name: str) -> bool:
    """Whether ``name`` is a relative path without empty, ``.`` or ``..`` parts."""
    return "\0" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def inside(folder: Path, name: str) -> Path:
    """The path of ``name``, which was read from a manifest, inside ``folder``.

    Raises:
        CheckpointCorrupt: the name is absolute, has ``..`` parts, or leads out of the folder
            through a symbolic link.
    """
    if is_plain_name(name):
        path = folder / name
        with contextlib.suppress(OSError, RuntimeError):  # a loop of links does not resolve
            if path.resolve().is_relative_to(folder.resolve()):
                return path
    raise CheckpointCorrupt(
        f"the file name {name!r} leads out of the checkpoint's folder",
        where=str(folder),
        done="nothing was read from it",
        advice="do not use this checkpoint; somebody may have changed its manifest",
    )


def list_folders(root: Path) -> list[str]:
    """Names of the checkpoint folders under ``root`` in name order, committed or not."""
    try:
        with os.scandir(root) as entries:
            return sorted(
                entry.name
                for entry in entries
                if parse_folder(entry.name) and entry.is_dir(follow_symlinks=False)
            )
    except FileNotFoundError:
        return []


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_NOT_OFFERED = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK}
"""Errors by which a file system says that it has no hard links, or no renaming."""


def publish(
    path: Path,
    data: bytes,
    *,
    durable: bool = True,
    before_name: Callable[[], object] | None = None,
) -> None:
    """Create ``path`` with ``data``, whole and durable, unless it exists.

    Of several that publish at once only one succeeds. Others see nothing or all of it. Where
    storage has no hard links they may see an empty file first, and it stays if this process is
    killed: readers take an empty file for one that is not there (see ``is_published``). Where it
    cannot rename either they may see a part of the file, which its digest gives away.

    Args:
        path: The file.
        data: What it holds.
        durable: Return only when it is durable; else the caller sees to that, with ``settle``.
        before_name: Called when the data is durable, before others see the file.

    Raises:
        FileExistsError: the file is there already; it was not changed.
    """
    temporary = path.with_name(temporary_name(path.name))
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if before_name is not None:
            before_name()
        try:
            os.link(temporary, path)
        except FileExistsError:
            # The answer to a request that a network file system had carried out before.
            if not path.samefile(temporary):
                raise
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
            _publish_without_link(temporary, path, data)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def settle(path: Path) -> None:
    """Make durable what ``publish`` left undone."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_folder(path.parent)


def _publish_without_link(temporary: Path, path: Path, data: bytes) -> None:
    """Take the name with an empty file, then put the finished one in its place."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            temporary.replace(path)
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)  # it was ours alone
        raise
    finally:
        os.close(fd)


def move(temporary: Path, final: Path) -> None:
    """Give a durable file its final name; where storage cannot rename, copy it.

    Then others may see a part of it: what tells of it (a receipt) must be written after this.

    Raises:
        OSError: storage failed.
    """
    try:
        temporary.rename(final)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
        shutil.copyfile(temporary, final)
        with final.open("r+b") as file:
            os.fsync(file.fileno())
        temporary.unlink()


def read(path: Path) -> bytes:
    """The bytes of a small file. A handle that has become stale (NFS: somebody replaced the file,
    or its server changed) is no damage: the file is opened anew, a few times.

    Raises:
        OSError: storage failed.
    """
    for _ in range(_STALE_HANDLES):
        try:
            return _read(path)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return _read(path)


def _read(path: Path) -> bytes:
    # Where somebody put a pipe in the file's place, opening or reading it would wait for ever.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # a folder, too
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


def is_published(path: Path) -> bool:
    """Whether a file that ``publish`` makes is there, good or damaged; an empty one is not."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False
