"""Finds out what a folder to restore from is. Runs in the ranks and in the command line."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path

from keepstep.checkpoint import dcp_metadata, layout
from keepstep.checkpoint.source import ManifestSource, Source
from keepstep.checkpoint.torch_dcp import DcpSource
from keepstep.errors import CheckpointNotFound

_SHOWN = 10


def open_source(path: Path, tracked: Collection[str] = ()) -> Source:
    """The checkpoint that ``path`` is the folder of.

    Args:
        path: A checkpoint of keepstep, or a folder of torch's distributed checkpoints.
        tracked: Names of the objects that are to be restored, where they are known.

    Raises:
        CheckpointNotFound: it is no checkpoint of a kind that can be restored.
        CheckpointError: it is one and cannot be used.
        OSError: storage failed.
    """
    if (path / layout.MANIFEST).exists():
        return ManifestSource(path.parent, path.name)
    if dcp_metadata.is_dcp(path):
        return DcpSource(path, tracked=tuple(tracked))
    raise CheckpointNotFound(
        f"{path} is no checkpoint: it has neither {layout.MANIFEST} nor {dcp_metadata.METADATA}",
        done="nothing was restored",
        advice="give the folder of one checkpoint",
    )


def announce(source: Source, rank: int) -> None:
    """Tell, on rank 0, that another library's files are read, and what in them is not used."""
    if rank or not isinstance(source, DcpSource):
        return
    source.tensors(rank)
    unused = list(source.unused.items())
    listed = "; ".join(f"{name} ({why})" for name, why in unused[:_SHOWN])
    more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
    warnings.warn(
        f"{source.about.where} is a folder of torch's distributed checkpoints: its pickles are "
        "read as data, nothing in them is run, and its tensors have no checksums"
        + (f"; not used: {listed}{more}" if unused else ""),
        RuntimeWarning,
        stacklevel=2,
    )
