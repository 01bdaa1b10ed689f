"""Writes one rank's staged file image to storage, durable and with a receipt.

Runs in the node's writer process. Needs no torch: the image is byte for byte the shard file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from keepstep.checkpoint import blocks, layout, manifest, shard_file
from keepstep.checkpoint.manifest import Receipt
from keepstep.errors import CheckpointError, SaveFailed
from keepstep.wire.types import Version

CHUNK = 16 << 20
"""Bytes of one write; large, so that storage works at full speed without many in flight."""
BLOCK = 4096
"""Direct writes start and end at multiples of this."""
_ATTEMPTS = 5


def write_shard(
    source_fd: int, size: int, root: Path, version: Version, rank: int
) -> tuple[Receipt, str]:
    """Write the file image in ``source_fd`` as ``rank``'s shard of ``version``.

    The shard gets its name only when it is durable, and the receipt only after the shard. Once a
    receipt exists its shard never changes: writing the same bytes again does nothing, writing
    others fails.

    Args:
        source_fd: Descriptor of a memfd or file that holds the image from its start.
        size: Bytes of the image; the descriptor may hold more.
        root: Folder of all checkpoints; made if missing.
        version: The state that the image belongs to.
        rank: Whose shard it is.

    Returns:
        The receipt, and the name of the checkpoint's folder under ``root``.

    Raises:
        SaveFailed: the shard is not durable; its partial file was removed.
    """
    shown = f"{root}, rank {rank}, step {version.step}"
    try:
        with _image(source_fd, size) as image:
            header = shard_file.parse_header(image, size, where="shared memory")
            if (header.version, header.rank) != (version, rank):
                raise _failed(
                    f"the staged image is rank {header.rank}'s of {header.version}, asked for was "
                    f"rank {rank}'s of {version}",
                    shown,
                )
            folder = claim_folder(root, version)
            path = root / folder
            receipt = _written_before(path, image, rank)
            if receipt is None:
                digests = _write(image, path, rank)
                receipt = manifest.receipt_of(
                    header, blocks.combine(digests), blocks.BLOCK_BYTES, blocks.encode(digests)
                )
                try:
                    text = manifest.encode_receipt(receipt)
                    layout.publish(path / layout.receipt_name(rank), text)
                except FileExistsError:  # somebody else wrote it meanwhile
                    receipt = _written_before(path, image, rank) or receipt
            return receipt, folder
    except SaveFailed:
        raise
    except CheckpointError as error:
        raise _failed(error.what, error.where or shown) from error
    except (OSError, ValueError) as error:
        raise _failed(_with_numbers(error, size, root), shown) from error


def claim_folder(root: Path, version: Version) -> str:
    """Find or make the folder of ``version``; it holds no other version's files.

    Returns:
        The folder's name under ``root``.

    Raises:
        SaveFailed: every name for it is taken.
        OSError: the folder cannot be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    for name in layout.list_folders(root):
        parsed = layout.parse_folder(name)
        if parsed and parsed.step == version.step and read_owner(root / name) == version:
            return name
    text = msgspec.json.encode(version)
    for name in layout.folder_names(version):
        folder = root / name
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                layout.sync_folder(root)
            if (folder / layout.MANIFEST).exists():
                break
            try:
                layout.publish(folder / layout.VERSION_FILE, text)
            except FileExistsError:
                pass
            except FileNotFoundError:
                continue  # it was the empty rest of a removed checkpoint; make it anew
            if read_owner(folder) == version:
                return name
            break
    raise _failed(f"every folder name for step {version.step} is taken", str(root))


def owner(folder: Path) -> Version | None:
    """The version that ``folder`` belongs to, or None if nobody says so readably."""
    try:
        return read_owner(folder)
    except OSError:
        return None


def read_owner(folder: Path) -> Version | None:
    """As ``owner``, for those who act on a None. Raises OSError: storage failed."""
    try:
        return msgspec.json.decode((folder / layout.VERSION_FILE).read_bytes(), type=Version)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


@contextlib.contextmanager
def _image(fd: int, size: int) -> Iterator[memoryview]:
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as image:
        yield image


def _written_before(folder: Path, image: memoryview, rank: int) -> Receipt | None:
    """The receipt of an earlier, equal write.

    Raises:
        SaveFailed: there is one, and its shard has other bytes.
    """
    path = folder / layout.receipt_name(rank)
    try:
        receipt = manifest.decode_receipt(path.read_bytes(), str(path))
    except FileNotFoundError:
        if (folder / layout.MANIFEST).exists():
            raise _failed("the version is committed already", str(folder)) from None
        return None
    if receipt.size == len(image) and receipt.checksum == _checksum(image, receipt.block_bytes):
        return receipt
    raise _failed(
        f"the shard was written before with other bytes ({receipt.size} then, {len(image)} now)",
        str(folder / receipt.file),
    )


def _checksum(image: memoryview, block_bytes: int) -> str:
    if block_bytes:
        return blocks.combine(_digests(image, block_bytes))
    digest = xxhash.xxh3_128()
    for at in range(0, len(image), CHUNK):
        with image[at : at + CHUNK] as part:
            digest.update(part)
    return digest.hexdigest()


def _digests(image: memoryview, block_bytes: int) -> list[bytes]:
    found: list[bytes] = []
    for at in range(0, len(image), block_bytes):
        with image[at : at + block_bytes] as block:
            found.append(blocks.digest(block))
    return found


def _write(image: memoryview, folder: Path, rank: int) -> list[bytes]:
    """Write ``image`` under a temporary name, make it durable, rename it; returns its digests."""
    final = folder / layout.shard_name(rank)
    temporary = folder / layout.temporary_name(final.name)
    try:
        fd = _open(temporary)
        try:
            _copy(image, fd)
            os.fsync(fd)
        finally:
            os.close(fd)
        if (folder / layout.MANIFEST).exists():
            raise _failed("the version was committed meanwhile", str(folder))
        temporary.rename(final)
    finally:
        temporary.unlink(missing_ok=True)
    layout.sync_folder(folder)
    return _digests(image, blocks.BLOCK_BYTES)


def _open(path: Path) -> int:
    """Open a new file for direct writes, or for buffered ones where storage refuses those."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # some file systems refuse only after they made the file
        return os.open(path, flags, 0o644)


def _copy(image: memoryview, fd: int) -> None:
    """Write all of ``image`` to ``fd``."""
    whole = len(image) // BLOCK * BLOCK
    for at in range(0, whole, CHUNK):
        with image[at : min(at + CHUNK, whole)] as part:
            _write_all(fd, part)
    if whole < len(image):
        with image[whole:] as tail, mmap.mmap(-1, BLOCK) as padded:  # anonymous: aligned memory
            padded[: len(tail)] = bytes(tail)
            with memoryview(padded) as block:
                _write_all(fd, block)
        os.ftruncate(fd, len(image))


def _write_all(fd: int, part: memoryview) -> None:
    done = 0
    while done < len(part):
        with part[done:] as rest:
            try:
                done += os.write(fd, rest)
            except OSError as error:
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                    raise
                # The device wants larger blocks, or a short write left us between two of them.
                fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def _with_numbers(error: OSError | ValueError, size: int, root: Path) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    try:
        space = os.statvfs(root)
    except OSError:
        return f"writing a shard of {size} bytes failed: {reason}"
    free = space.f_bavail * space.f_frsize
    return f"writing a shard of {size} bytes failed: {reason}; {free} bytes are free"


def _failed(what: str, where: str) -> SaveFailed:
    return SaveFailed(
        what,
        where=where,
        done="the partial file was removed and nothing was committed",
        advice="check space, quota and rights of the checkpoint folder",
    )
