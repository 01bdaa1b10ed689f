"""Which checkpoints a folder holds. What has no good manifest does not exist.

Cheap enough for every restart: manifests are decoded and sizes compared, data is not read (see
``verify`` for that). Used by coordinator, agent, ranks and the command line.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path

import msgspec

from keepstep.checkpoint import layout, manifest
from keepstep.checkpoint.manifest import Layout, Manifest
from keepstep.checkpoint.writer import owner
from keepstep.errors import CheckpointCorrupt
from keepstep.wire.types import Version

_REASON_BYTES = 1000


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint: ``nbytes`` of all files, ``created`` in seconds of wall time.

    ``layout`` says who wrote the files; a ``pinned`` one is not removed by retention.
    """

    step: int
    folder: str
    version: Version
    nbytes: int
    created: float
    layout: Layout = "safetensors"
    pinned: bool = False


def load(root: Path, folder: str) -> Manifest:
    """The manifest of the checkpoint ``folder``; every file is there with the right size.

    Raises:
        CheckpointCorrupt: it is not committed, a file is missing or has another size, or the
            manifest is damaged.
        CheckpointError: it was written by a newer keepstep.
        OSError: storage failed.
    """
    path = root / folder
    file = path / layout.MANIFEST
    try:
        found = manifest.decode(layout.read(file), str(file))
    except FileNotFoundError:
        raise _unusable("it has no manifest, so it was never committed", path) from None
    name = layout.parse_folder(folder)
    if name is not None and name.step != found.version.step:
        raise _unusable(f"the folder's manifest is of step {found.version.step}", path)
    for shard, info in found.all_files().items():
        try:
            size = layout.inside(path, shard).stat().st_size
        except FileNotFoundError:
            raise _unusable(f"{shard} is missing", path) from None
        if size != info.size:
            raise _unusable(f"{shard} has {size} bytes, committed were {info.size}", path)
    return found


def committed(root: Path) -> list[CheckpointInfo]:
    """The checkpoints under ``root`` that can be offered, newest (step, term, round) first.

    Raises:
        CheckpointError: one was written by a newer keepstep; passing over it in silence would start
            again from an older step.
    """
    infos: list[CheckpointInfo] = []
    for folder in layout.list_folders(root):
        with contextlib.suppress(CheckpointCorrupt, OSError):  # as if it did not exist
            found = load(root, folder)
            infos.append(
                CheckpointInfo(
                    step=found.version.step,
                    folder=folder,
                    version=found.version,
                    nbytes=found.nbytes,
                    created=found.created,
                    layout=found.layout,
                    pinned=is_pinned(root, folder),
                )
            )
    infos.sort(key=age, reverse=True)
    return infos


def age(info: CheckpointInfo) -> tuple[int, int, int, float]:
    """Sort key: a restore takes the checkpoint with the highest one."""
    return (info.step, info.version.term, info.version.round, info.created)


def newest(
    root: Path,
    run: str | None = None,
    below: int | None = None,
    exclude: Collection[str] = (),
) -> CheckpointInfo | None:
    """The newest checkpoint, or None.

    Args:
        root: Folder of all checkpoints.
        run: Only of this run.
        below: Only of steps smaller than this.
        exclude: Folder names not to offer (found damaged).
    """
    for info in committed(root):
        if (
            (run is None or info.version.run == run)
            and (below is None or info.step < below)
            and info.folder not in exclude
        ):
            return info
    return None


def published(root: Path) -> list[str]:
    """Names of the folders that have a manifest, good or damaged, in name order."""
    return [n for n in layout.list_folders(root) if layout.is_published(root / n / layout.MANIFEST)]


def unfinished(root: Path) -> list[str]:
    """Names of the folders without a manifest: saves in flight, given up, or half removed."""
    with_manifest = set(published(root))
    return [name for name in layout.list_folders(root) if name not in with_manifest]


def remove_unfinished(root: Path, exclude: Collection[str] = ()) -> list[str]:
    """Remove unfinished folders that a newer committed checkpoint has overtaken.

    A folder is overtaken if its (term, round, step) is lower than that of a committed checkpoint of
    its run. The step alone does not count: after a rollback lower steps are the newer ones. Folders
    of other runs, or of nobody, are overtaken if they were last touched before a manifest was
    published.

    Args:
        root: Folder of all checkpoints.
        exclude: Folder names of saves in flight.

    Returns:
        Names of the removed folders.
    """
    infos = committed(root)
    if not infos:
        return []
    removed: list[str] = []
    for folder in unfinished(root):
        if folder not in exclude and _overtaken(root, folder, infos):
            remove(root, folder)
            removed.append(folder)
    return removed


def _overtaken(root: Path, folder: str, infos: list[CheckpointInfo]) -> bool:
    version = owner(root / folder)
    if version is not None:
        same_run = [_lineage(info.version) for info in infos if info.version.run == version.run]
        if same_run:
            return _lineage(version) < max(same_run)
    # Both times come from the storage itself, so that clocks of different hosts do not matter.
    with contextlib.suppress(OSError):
        touched = (root / folder).stat().st_mtime_ns
        published_at = [(root / info.folder / layout.MANIFEST).stat().st_mtime_ns for info in infos]
        return touched < max(published_at)
    return False


def remove_temporary(root: Path, exclude: Collection[str] = ()) -> list[Path]:
    """Remove unfinished forms of files that killed processes left in ``root`` and in its folders.

    Only those that were last touched before the newest manifest was published, in the root, beside
    its leases and terms, and in committed folders but the newest: nobody writes those any more.

    Args:
        root: Folder of all checkpoints.
        exclude: Folder names of saves in flight.

    Returns:
        The removed files.
    """
    published_at: dict[str, int] = {}
    for folder in published(root):
        with contextlib.suppress(FileNotFoundError):
            published_at[folder] = (root / folder / layout.MANIFEST).stat().st_mtime_ns
    if not published_at:
        return []
    newest_folder = max(published_at, key=lambda folder: published_at[folder])
    removed: list[Path] = []
    places = [root, *(root / one for one in published_at if one != newest_folder)]
    for place in (*places, *(root / name for name in layout.RECORDS)):
        if place.name in exclude:
            continue
        with contextlib.suppress(FileNotFoundError), os.scandir(place) as entries:
            for entry in entries:
                # Both times come from the storage itself, as above.
                if (
                    layout.is_temporary_name(entry.name)
                    and entry.is_file(follow_symlinks=False)
                    and entry.stat(follow_symlinks=False).st_mtime_ns < published_at[newest_folder]
                ):
                    os.unlink(entry.path)
                    removed.append(Path(entry.path))
    return removed


def is_pinned(root: Path, folder: str) -> bool:
    """Whether the checkpoint ``folder`` is kept whatever the retention says."""
    return os.path.lexists(root / folder / layout.PINNED)


def pin_reason(root: Path, folder: str) -> str:
    """Why the checkpoint is pinned, as one line; empty if it is not, or if nobody said."""
    with contextlib.suppress(OSError), (root / folder / layout.PINNED).open("rb") as file:
        return " ".join(file.read(_REASON_BYTES).decode(errors="replace").split())
    return ""


def pin(root: Path, folder: str, reason: str = "") -> bool:
    """Keep the checkpoint ``folder`` whatever the retention says; False if it is pinned already.

    Raises:
        OSError: storage failed.
    """
    try:
        layout.publish(root / folder / layout.PINNED, reason.encode()[:_REASON_BYTES])
    except FileExistsError:
        return False
    return True


def unpin(root: Path, folder: str) -> bool:
    """Leave the checkpoint ``folder`` to retention again; False if it was not pinned.

    Raises:
        OSError: storage failed.
    """
    try:
        (root / folder / layout.PINNED).unlink()
    except FileNotFoundError:
        return False
    layout.sync_folder(root / folder)
    return True


def _lineage(version: Version) -> tuple[int, int, int]:
    return (version.term, version.round, version.step)


def remove(root: Path, folder: str) -> None:
    """Remove a checkpoint: its manifest first and durably, so that it is never offered in part.

    Raises:
        OSError: storage failed; what is left is no checkpoint any more.
    """
    path = root / folder
    with contextlib.suppress(FileNotFoundError):
        (path / layout.MANIFEST).unlink()
        layout.sync_folder(path)
    with os.scandir(path) as entries:
        # The owner's name goes last: until then no other version can move in.
        names = sorted(entries, key=lambda entry: entry.name == layout.VERSION_FILE)
    for entry in names:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)
    path.rmdir()
    layout.sync_folder(root)


def _unusable(what: str, path: Path) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        what, where=str(path), done="it was not used", advice="use an older checkpoint"
    )
