"""Which checkpoints to remove after a newer one is durable. Runs in writer or coordinator.

What may go is decided by ``to_remove``, which only looks at what it is given; ``apply`` asks it
once a commit is durable, and removes what it names. ``sweep`` removes what killed saves left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from keepstep.checkpoint import catalog, lineage
from keepstep.checkpoint.catalog import CheckpointInfo
from keepstep.wire.types import Version


@dataclass(frozen=True, slots=True)
class Keep:
    """What a run keeps: the ``last`` ones (0 or less: all), and multiples of ``every_steps``.

    ``every_steps`` 0 or less: none for its step alone. Pinned checkpoints are kept in any case.
    """

    last: int
    every_steps: int = 0


def _not_abandoned(version: Version) -> bool:
    return False


def to_remove(
    infos: Sequence[CheckpointInfo],
    keep: Keep,
    abandoned: Callable[[Version], bool] = _not_abandoned,
) -> list[CheckpointInfo]:
    """The checkpoints that ``keep`` no longer covers, oldest first.

    Each run is looked at by itself. Kept are the ``keep.last`` latest by (term, round, step), and
    always the one with the highest step: it is the one that a restore takes. After a rollback these
    are not the same ones; the checkpoint just committed must not lose its place to a higher step of
    an abandoned round. The time of the commit does not count: two saves may commit in the other
    order. A checkpoint that is known to be abandoned takes nobody's place. Whatever is later in the
    order than one that is kept for it stays too.

    Args:
        infos: Committed checkpoints in any order.
        keep: How many to keep, and which ones in any case.
        abandoned: Whether a later round resumed below a version, so that no restore takes it.
    """
    runs = {info.version.run for info in infos}
    removed = [
        info
        for run in runs
        for info in _of_run([one for one in infos if one.version.run == run], keep, abandoned)
    ]
    return sorted(removed, key=_removal_order)


def _of_run(
    infos: Sequence[CheckpointInfo], keep: Keep, abandoned: Callable[[Version], bool]
) -> list[CheckpointInfo]:
    usable = sorted((info for info in infos if not abandoned(info.version)), key=in_line)
    if keep.last <= 0 or len(usable) < keep.last:
        return []
    oldest_kept = in_line(usable[-keep.last])
    offered = max(usable, key=catalog.age).folder
    return [
        info
        for info in infos
        if in_line(info) < oldest_kept
        and info.folder != offered
        and not info.pinned
        and not (keep.every_steps > 0 and info.step % keep.every_steps == 0)
    ]


def in_line(info: CheckpointInfo) -> tuple[int, int, int, float, str]:
    """Sort key: the order in which training came by the checkpoints of a run."""
    version = info.version
    return (version.term, version.round, version.step, info.created, info.folder)


def _removal_order(info: CheckpointInfo) -> tuple[tuple[int, int, int, float, str], str]:
    return (in_line(info), info.version.run)


def apply(
    root: Path,
    keep: Keep,
    after: Version,
    *,
    exclude: Collection[str] = (),
    terms: Path | None = None,
) -> list[str]:
    """Remove what the commit of ``after`` has made superfluous; returns the folder names.

    Only checkpoints of the same run go, and nothing at all unless ``after`` is found whole among
    the committed ones.

    Args:
        root: Folder of all checkpoints.
        keep: What to keep.
        after: The version whose manifest was just made durable.
        exclude: Folder names not to remove.
        terms: Where the run's rounds are written down; None: ``terms`` beside ``root``, if it is
            there.

    Raises:
        OSError: storage failed; what was removed in part is no checkpoint any more.
        CheckpointError: a checkpoint of a newer keepstep is there; nothing was removed.
    """
    infos = [info for info in catalog.committed(root) if info.version.run == after.run]
    if all(info.version != after for info in infos):
        return []
    resumes = lineage.read_resumes(root.parent / "terms" if terms is None else terms, after.run)
    removed: list[str] = []
    for info in to_remove(infos, keep, lambda version: lineage.is_abandoned(version, resumes)):
        # Somebody may have pinned it since the list was made.
        if info.folder not in exclude and not catalog.is_pinned(root, info.folder):
            catalog.remove(root, info.folder)
            removed.append(info.folder)
    return removed


def sweep(root: Path, exclude: Collection[str] = ()) -> None:
    """Remove what killed saves left: folders that are overtaken, and temporary files.

    Args:
        root: Folder of all checkpoints.
        exclude: Folder names of saves in flight.

    Raises:
        OSError: storage failed.
        CheckpointError: a checkpoint of a newer keepstep is there; nothing was removed.
    """
    catalog.remove_unfinished(root, exclude)
    catalog.remove_temporary(root, exclude)
