"""Where a shard writer works, and what makes one: between ``Checkpointer`` and its writers.

Runs in the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from keepstep.clock import Clock
from keepstep.ports import ShardWriter
from keepstep.rank.local_writer import LocalStaging
from keepstep.rank.shard_writer import NativeShardWriter
from keepstep.wire.types import Version

Copy = Literal["auto", "overlap", "blocking"]
"""How a save copies what only optimizers change; see ``checkpoint.copy``."""


def ignore_commit(version: Version, folder: str, nbytes: int, save_s: float) -> None:
    """Nobody wants to know of commits."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a shard writer works: ``root`` is the folder of the checkpoints.

    ``on_commit`` is to be called on rank 0, from any thread, when a checkpoint is committed: with
    its version, folder, size in bytes over all ranks, and seconds since the save was begun. The
    other fields are as the settings of the same names.
    """

    root: Path
    rank: int
    world: int
    keep_last: int
    clock: Clock
    on_commit: Callable[[Version, str, int, float], None] = ignore_commit
    keep_every_steps: int = 0
    retries: int = 0
    copy: Copy = "auto"
    check_copy: bool = False
    slots: int = 2
    lease: int = 0
    """Number under which this job holds ``root``; 0: somebody else sees to that."""


WriterFactory = Callable[[Place], ShardWriter]
"""Makes the writer that a ``Checkpointer`` owns and closes."""


@runtime_checkable
class Polled(Protocol):
    """A shard writer whose saves go on only when it is asked."""

    def poll(self) -> None:
        """A step was completed; called on every rank at the same step."""


@runtime_checkable
class Overlapping(Protocol):
    """A shard writer that may still copy after ``begin`` has returned."""

    def mutates(self) -> None:
        """Return once everything begun is copied, so that all state may change."""


@runtime_checkable
class Prepared(Protocol):
    """A shard writer whose memory can be made before the first save."""

    def size_of(self, state: Mapping[str, object]) -> int:
        """Bytes of staging that one save of ``state`` takes on this rank.

        Raises:
            CheckpointError: something in ``state`` cannot be kept; the message names it.
        """

    def prepare(self, size: int, slots: int) -> None:
        """Begin to make ``slots`` slots of ``size`` bytes; returns at once."""


def native_writer(place: Place) -> ShardWriter:
    """Own staging slots and a writer process of this rank."""
    staging = LocalStaging(
        place.root,
        rank=place.rank,
        keep_last=place.keep_last,
        keep_every_steps=place.keep_every_steps,
        retries=place.retries,
        slots=place.slots,
        clock=place.clock,
        on_commit=place.on_commit,
        lease=place.lease,
    )
    return NativeShardWriter(
        staging,
        rank=place.rank,
        world=place.world,
        clock=place.clock,
        copy=place.copy,
        check_copy=place.check_copy,
    )
