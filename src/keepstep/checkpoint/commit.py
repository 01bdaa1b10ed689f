"""Publishes a checkpoint: all receipts there, then one manifest, once.

Runs in the writer (one node) or in the coordinator (several nodes).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from keepstep.checkpoint import layout, manifest
from keepstep.checkpoint.manifest import Manifest, Receipt
from keepstep.checkpoint.writer import read_owner
from keepstep.clock import SYSTEM, Clock
from keepstep.errors import CheckpointCorrupt, SaveFailed
from keepstep.wire.types import Version


def missing_receipts(root: Path, folder: str, world: int) -> list[int]:
    """Ranks of 0 to ``world`` - 1 whose receipt is not in the folder yet, in order."""
    try:
        names = set(os.listdir(root / folder))
    except FileNotFoundError:
        names = set()
    missing = [rank for rank in range(world) if layout.receipt_name(rank) not in names]
    if missing:
        return missing
    path = root / folder
    return [r for r in range(world) if not layout.is_published(path / layout.receipt_name(r))]


def commit(root: Path, folder: str, version: Version, clock: Clock = SYSTEM) -> Manifest:
    """Publish the manifest of ``version``; afterwards the checkpoint exists.

    Committing the same version again returns the manifest that is there and changes nothing.

    Args:
        root: Folder of all checkpoints.
        folder: Name of the version's folder under it.
        version: What must be in it; a shard of another version is refused.
        clock: Where the creation time comes from.

    Raises:
        SaveFailed: a receipt or file is missing, has the wrong size or another version, or the
            folder holds the manifest of another version.
        CheckpointCorrupt: a receipt is damaged, or the shards do not make up whole tensors.
        OSError: storage failed.
    """
    path = root / folder
    published = _published(path, version)
    if published is not None:
        return published
    found = read_owner(path)
    if found != version:
        raise _refused(f"the folder belongs to {found}, not to {version}", path)
    missing = missing_receipts(root, folder, version.world)
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        raise _refused(
            f"{len(missing)} of {version.world} shards are missing: of the ranks {shown}", path
        )
    receipts = [_receipt(path, version, rank) for rank in range(version.world)]
    result = manifest.assemble(receipts, clock.wall())
    _remove_unfinished_files(path)
    layout.sync_folder(path)
    try:
        layout.publish(path / layout.MANIFEST, manifest.encode(result))
    except FileExistsError:
        published = _published(path, version)
        if published is None:
            raise
        return published
    # The folder's own name is durable: nobody writes a receipt before (see ``claim_folder``).
    return result


def not_published(error: OSError, folder: Path) -> str:
    """What to say where ``commit`` has failed because storage did."""
    return str(
        SaveFailed(
            f"the manifest could not be published: {error.strerror or error}",
            where=str(folder),
            done="the checkpoint does not count as committed",
            advice="check space, quota and rights of the checkpoint folder",
        )
    )


def _remove_unfinished_files(path: Path) -> None:
    """Remove what killed writers left: the finished form of each file is there by now.

    But not unfinished manifests: another committer may be about to publish one.
    """
    with contextlib.suppress(OSError):  # they cost space, not safety
        for name in os.listdir(path):
            if layout.is_temporary_name(name) and not name.startswith(f".{layout.MANIFEST}."):
                (path / name).unlink(missing_ok=True)


def _published(path: Path, version: Version) -> Manifest | None:
    """The manifest that is there already, if any."""
    file = path / layout.MANIFEST
    if not layout.is_published(file):
        return None
    found = manifest.decode(layout.read(file), str(file))
    if found.version != version:
        raise _refused(f"the folder holds the committed {found.version}, not {version}", path)
    return found


def _receipt(path: Path, version: Version, rank: int) -> Receipt:
    file = path / layout.receipt_name(rank)
    receipt = manifest.decode_receipt(layout.read(file), str(file))
    if (receipt.version, receipt.rank) != (version, rank):
        raise _refused(
            f"the receipt of rank {rank} is rank {receipt.rank}'s of {receipt.version}, wanted is "
            f"{version}",
            path,
        )
    if receipt.layout == "safetensors" and receipt.file != layout.shard_name(rank):
        raise CheckpointCorrupt(
            f"the receipt of rank {rank} names the file {receipt.file!r}",
            where=str(path),
            done="nothing was committed",
        )
    wanted = {receipt.file: receipt.size}
    wanted |= {name: info.size for name, info in receipt.others.items()}
    for name, size in wanted.items():
        _check_size(path, name, size)
    return receipt


def _check_size(path: Path, name: str, wanted: int) -> None:
    try:
        size = layout.inside(path, name).stat().st_size
    except FileNotFoundError:
        size = -1
    if size != wanted:
        found = "missing" if size < 0 else f"{size} bytes long"
        raise _refused(f"{name} is {found}, its receipt says {wanted} bytes", path)


def _refused(what: str, path: Path) -> SaveFailed:
    return SaveFailed(
        what,
        where=str(path),
        done="nothing was committed",
        advice="the next save makes a new checkpoint; look at the writer's errors of this one",
    )
