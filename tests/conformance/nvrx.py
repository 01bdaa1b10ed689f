"""NVRx under the conformance suites: how each seam is set up, and what it is known not to keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from keepstep.engines.nvrx.shards import writer_factory

from keepstep.config import Parts
from keepstep.policy.differences import differences
from keepstep.ports import ShardWriter
from keepstep.rank.checkpointer import Place
from keepstep.testing.conformance import Clause

S = TypeVar("S")


def torch_writer(place: Place) -> ShardWriter:
    """``TorchAsyncCheckpoint``: one file a rank."""
    return writer_factory(kind="torch")(place)


def dcp_writer(place: Place) -> ShardWriter:
    """``FileSystemWriterAsync`` with ``AsyncCallsQueue``: torch's own form."""
    return writer_factory(kind="dcp")(place)


def documented(parts: Parts, clauses: Sequence[Clause[S]]) -> dict[str, str]:
    """What is printed when the engine is chosen, where ``clauses`` can check it."""
    names = {clause.name for clause in clauses}
    return {one.clause: one.text for one in differences(parts) if one.clause in names}
