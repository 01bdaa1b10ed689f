"""Which checkpoints to remove after a newer one is durable. Runs in writer or coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keepstep.checkpoint import catalog
from keepstep.checkpoint.catalog import CheckpointInfo


def to_remove(infos: Sequence[CheckpointInfo], keep_last: int) -> list[CheckpointInfo]:
    """The checkpoints that ``keep_last`` no longer covers, oldest first.

    Kept are the ``keep_last`` latest by (term, round, step), and always the one with the highest
    step: it is the one that a restore takes. After a rollback these are not the same ones; the
    checkpoint just committed must not lose its place to a higher step of an abandoned round. The
    time of the commit does not count: two saves may commit in the other order.

    Args:
        infos: Committed checkpoints in any order.
        keep_last: How many to keep; 0 or less keeps all.
    """
    if keep_last <= 0 or not infos:
        return []
    in_line = sorted(infos, key=lineage)
    offered = max(infos, key=catalog.age)
    return [info for info in in_line[:-keep_last] if info.folder != offered.folder]


def lineage(info: CheckpointInfo) -> tuple[int, int, int, float]:
    """Sort key: the order in which training came by the checkpoints."""
    version = info.version
    return (version.term, version.round, version.step, info.created)


def apply(root: Path, keep_last: int) -> list[str]:
    """Remove what ``to_remove`` names under ``root``; returns the folder names.

    Raises:
        OSError: storage failed; what was removed in part is no checkpoint any more.
    """
    removed = to_remove(catalog.committed(root), keep_last)
    for info in removed:
        catalog.remove(root, info.folder)
    return [info.folder for info in removed]
