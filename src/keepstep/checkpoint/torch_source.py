"""Finds out what a folder to restore from is. Runs in the ranks and in the command line."""

from __future__ import annotations

from pathlib import Path

from keepstep.checkpoint import layout
from keepstep.checkpoint.source import ManifestSource, Source
from keepstep.errors import CheckpointNotFound


def open_source(path: Path) -> Source:
    """The checkpoint that ``path`` is the folder of.

    Raises:
        CheckpointNotFound: it is no checkpoint of a kind that can be restored.
        CheckpointError: it is one and cannot be used.
        OSError: storage failed.
    """
    if (path / layout.MANIFEST).exists():
        return ManifestSource(path.parent, path.name)
    raise CheckpointNotFound(
        f"{path} is no checkpoint: it has no {layout.MANIFEST}",
        done="nothing was restored",
        advice="give the folder of one checkpoint",
    )
