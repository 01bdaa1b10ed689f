"""Writes one rank's staged file image to storage, durable and with a receipt.

Runs in the node's writer process. Needs no torch: the image is byte for byte the shard file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash

from keepstep.checkpoint import blocks, direct_io, layout, manifest, shard_file
from keepstep.checkpoint.images import Images
from keepstep.checkpoint.manifest import Receipt
from keepstep.checkpoint.shard_file import ShardHeader
from keepstep.errors import CheckpointError, SaveFailed
from keepstep.wire.types import Version

_ATTEMPTS = 5
_CHUNK = 16 << 20


def write_shard(
    source_fd: int,
    size: int,
    root: Path,
    version: Version,
    rank: int,
    images: Images | None = None,
) -> tuple[Receipt, str]:
    """Write the file image in ``source_fd`` as ``rank``'s shard of ``version``.

    The shard gets its name only when it is durable, and the receipt only after the shard. Once a
    receipt exists its shard never changes: writing the same bytes again does nothing, writing
    others fails. What a killed writer left of the same shard is removed first.

    Args:
        source_fd: Descriptor of a memfd or file that holds the image from its start.
        size: Bytes of the image; the descriptor may hold more.
        root: Folder of all checkpoints; made if missing.
        version: The state that the image belongs to.
        rank: Whose shard it is.
        images: Where mappings of earlier images are kept for the next ones.

    Returns:
        The receipt, and the name of the checkpoint's folder under ``root``.

    Raises:
        SaveFailed: the shard is not durable; its partial file was removed. Trying again may help if
            ``was_refused`` says so.
    """
    shown = f"{root}, rank {rank}, step {version.step}"
    try:
        images = Images() if images is None else images
        with images.open(source_fd, size, rank) as image:
            header = shard_file.parse_header(image, size, where="shared memory")
            if (header.version, header.rank) != (version, rank):
                raise _failed(
                    f"the staged image is rank {header.rank}'s of {header.version}, asked for was "
                    f"rank {rank}'s of {version}",
                    shown,
                )
            folder = _claim(root, version)
            receipt = _written_before(root / folder, image, rank)
            if receipt is None:
                receipt = _write(image, header, root / folder)
            else:
                _settle_claim(root / folder)
            return receipt, folder
    except SaveFailed:
        raise
    except CheckpointError as error:
        raise _failed(error.what, error.where or shown) from error
    except OSError as error:
        done = _DONE if _remove_leftovers(root, version, rank) else _NOT_REMOVED
        raise _failed(_with_numbers(error, size, root), shown, done) from error
    except ValueError as error:
        raise _failed(str(error), shown) from error


def was_refused(failure: SaveFailed) -> bool:
    """Whether a ``write_shard`` failed because storage refused it: that may pass."""
    return isinstance(failure.__cause__, OSError)


def _remove_leftovers(root: Path, version: Version, rank: int) -> bool:
    """Remove unfinished files of the shard; False if one is still there, or may be."""
    try:
        for name in layout.list_folders(root):
            parsed = layout.parse_folder(name)
            if parsed and parsed.step == version.step and read_owner(root / name) == version:
                _remove_unfinished(root / name, rank)
    except OSError:
        return False
    return True


def _remove_unfinished(folder: Path, rank: int) -> None:
    """Remove what a killed writer of this shard left; one that still lives fails, and says so."""
    own = (f".{layout.shard_name(rank)}.", f".{layout.receipt_name(rank)}.")
    for name in os.listdir(folder):
        if name.startswith(own) and layout.is_temporary_name(name):
            (folder / name).unlink(missing_ok=True)


def claim_folder(root: Path, version: Version) -> str:
    """Find or make the folder of ``version``; it holds no other version's files.

    Returns:
        The folder's name under ``root``; it is durable.

    Raises:
        SaveFailed: every name for it is taken.
        OSError: the folder cannot be made.
    """
    name = _claim(root, version)
    _settle_claim(root / name)
    return name


def _settle_claim(folder: Path) -> None:
    """Make the folder's name durable, and whose it is. Whoever made it may have been killed."""
    layout.settle(folder / layout.VERSION_FILE)
    layout.sync_folder(folder.parent)


def _claim(root: Path, version: Version) -> str:
    """As ``claim_folder``, but a power cut may take it back until ``_settle_claim``."""
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
            if layout.is_published(folder / layout.MANIFEST):
                break
            try:
                layout.publish(folder / layout.VERSION_FILE, text, durable=False)
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
        return msgspec.json.decode(layout.read(folder / layout.VERSION_FILE), type=Version)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _written_before(folder: Path, image: memoryview, rank: int) -> Receipt | None:
    """The receipt of an earlier, equal write.

    Raises:
        SaveFailed: there is one, and its shard has other bytes.
    """
    path = folder / layout.receipt_name(rank)
    if not layout.is_published(path):
        if layout.is_published(folder / layout.MANIFEST):
            raise _failed("the version is committed already", str(folder))
        path.unlink(missing_ok=True)  # empty: a writer was killed while it took the name
        return None
    receipt = manifest.decode_receipt(layout.read(path), str(path))
    if receipt.size == len(image) and receipt.checksum == _checksum(image, receipt.block_bytes):
        return receipt
    raise _failed(
        f"the shard was written before with other bytes ({receipt.size} then, {len(image)} now)",
        str(folder / receipt.file),
    )


def _checksum(image: memoryview, block_bytes: int) -> str:
    """The checksum that a receipt of ``image`` has."""
    whole, digests = xxhash.xxh3_128(), []
    for at in range(0, len(image), block_bytes or _CHUNK):
        with image[at : at + (block_bytes or _CHUNK)] as part:
            if block_bytes:
                digests.append(blocks.digest(part))
            else:
                whole.update(part)
    return blocks.combine(digests) if block_bytes else whole.hexdigest()


def _write(image: memoryview, header: ShardHeader, folder: Path) -> Receipt:
    """Write ``image`` under a temporary name, make it durable, name it, publish its receipt.

    What takes a flush of the disk is done while the disk is busy with the data, where it can be.
    """
    final = folder / layout.shard_name(header.rank)
    _remove_unfinished(folder, header.rank)
    temporary = folder / layout.temporary_name(final.name)
    try:
        fd = direct_io.open_new(temporary)
        try:
            digests = direct_io.write_image(image, fd, lambda: _settle_claim(folder))
            checksum, texts = blocks.combine(digests), blocks.encode(digests)
            receipt = manifest.receipt_of(header, checksum, blocks.BLOCK_BYTES, texts)
            with direct_io.syncing(fd, len(image)) as synced:
                _publish(receipt, folder, lambda: _name(temporary, final, synced))
        finally:
            os.close(fd)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error says more
            temporary.unlink(missing_ok=True)
        raise
    return receipt


def _publish(receipt: Receipt, folder: Path, before_name: Callable[[], object]) -> None:
    text = manifest.encode_receipt(receipt)
    path = folder / layout.receipt_name(receipt.rank)
    try:
        layout.publish(path, text, before_name=before_name)
    except FileExistsError:  # another writer of the same shard was quicker
        if path.read_bytes() != text:
            raise
        layout.sync_folder(folder)


def _name(temporary: Path, final: Path, synced: Callable[[], None]) -> None:
    """Give the shard its name once it is durable. The receipt's name, which comes next, makes this
    one durable as well: they are in the same folder."""
    synced()
    if layout.is_published(final.parent / layout.MANIFEST):
        raise _failed("the version was committed meanwhile", str(final.parent))
    layout.move(temporary, final)


def _with_numbers(error: OSError, size: int, root: Path) -> str:
    reason = error.strerror or str(error)
    try:
        space = os.statvfs(root)
    except OSError:
        return f"writing a shard of {size} bytes failed: {reason}"
    free = space.f_bavail * space.f_frsize
    return f"writing a shard of {size} bytes failed: {reason}; {free} bytes are free"


_DONE = "the partial file was removed and nothing was committed"
_NOT_REMOVED = "nothing was committed; the partial file is removed by a later save"


def _failed(what: str, where: str, done: str = _DONE) -> SaveFailed:
    return SaveFailed(
        what,
        where=where,
        done=done,
        advice="check space, quota and rights of the checkpoint folder",
    )
