"""NVRx's shard writers under their conformance suite."""

from __future__ import annotations

from keepstep.engines.nvrx.shards import writer_factory
from keepstep.ports import ShardWriter
from keepstep.rank.checkpointer import Place


def torch_writer(place: Place) -> ShardWriter:
    """``TorchAsyncCheckpoint``: one file a rank."""
    return writer_factory(kind="torch")(place)


def dcp_writer(place: Place) -> ShardWriter:
    """``FileSystemWriterAsync`` with ``AsyncCallsQueue``: torch's own form."""
    return writer_factory(kind="dcp")(place)
