"""The native way to save a rank's shard: an image in shared memory, written by another process.

Runs in the ranks; implements ``ports.ShardWriter``. Where the memory comes from and who writes it
is the staging's business: the agent's slots under the launcher, own slots in a plain script.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from keepstep.checkpoint import torch_reader
from keepstep.checkpoint.torch_image import ShardImage
from keepstep.checkpoint.torch_state import flatten
from keepstep.clock import SYSTEM, Clock
from keepstep.ports import PendingWrite
from keepstep.wire.types import Version

SLOT_LIMIT_S = 600.0
"""How long a save waits for storage to take the ones before it."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Shared memory for one file image: ``capacity`` bytes in ``buffer``."""

    id: int
    buffer: mmap.mmap
    capacity: int


class Memory(Protocol):
    """Where images are put. Any thread may call it."""

    def prepare(self, size: int, slots: int) -> None:
        """Begin to make ``slots`` slots for images of ``size`` bytes; returns at once."""

    def acquire(self, size: int, timeout_s: float) -> Slot:
        """A free slot of at least ``size`` bytes; it is busy until it is written or given back.

        Raises:
            SaveFailed: none became free within ``timeout_s`` seconds.
            NotEnoughMemory: the node has no memory for one.
        """

    def release(self, slot: Slot) -> None:
        """Give back a slot that will not be submitted."""


class Staging(Memory, Protocol):
    """Memory for images, and who writes them. Any thread may call it."""

    def submit(self, slot: Slot, size: int, version: Version) -> PendingWrite:
        """Have the first ``size`` bytes of ``slot`` written; the slot is the staging's again."""

    def close(self, abort: bool = False) -> None:
        """Give everything back; with ``abort`` without waiting for unfinished writes."""


class NativeShardWriter:
    """Implements ``ports.ShardWriter``.

    Args:
        staging: Owned by the writer and closed with it.
        rank: This rank. world: Number of ranks.
        clock: Where time comes from.
        slot_limit_s: How long ``begin`` may wait for a free slot.

    Attributes:
        last: The save begun last, if any.
        last_bytes: Size of its image in bytes.
        last_copy_s: How long its copy took, in seconds; the wait for a slot is not in it.
    """

    def __init__(
        self,
        staging: Staging,
        *,
        rank: int,
        world: int,
        clock: Clock = SYSTEM,
        slot_limit_s: float = SLOT_LIMIT_S,
    ) -> None:
        self._staging = staging
        self._rank = rank
        self._world = world
        self._clock = clock
        self._slot_limit_s = slot_limit_s
        self.last: PendingWrite | None = None
        self.last_bytes = 0
        self.last_copy_s = 0.0

    def begin(self, state: Mapping[str, object], version: Version, folder: Path) -> PendingWrite:
        """Copy ``state`` as it is now and have it written; returns once the state may change.

        Args:
            state: What to save, by name; see ``torch_state.flatten``.
            version: What the shard belongs to.
            folder: Root of the checkpoints; not used, the staging was made for it.

        Raises:
            CheckpointError: something in ``state`` cannot be kept; the message names it.
            SaveFailed: no slot became free.
        """
        snapshot = flatten(state, rank=self._rank, world=self._world)
        image = ShardImage(snapshot, version, self._rank)
        slot = self._staging.acquire(image.size, self._slot_limit_s)
        began = self._clock.mono()
        image.write_into(slot.buffer)
        self.last_copy_s = self._clock.mono() - began
        self.last_bytes = image.size
        self.last = self._staging.submit(slot, image.size, version)
        return self.last

    def size_of(self, state: Mapping[str, object]) -> int:
        """Bytes of staging that a save of ``state`` takes on this rank, about.

        Raises:
            CheckpointError: something in ``state`` cannot be kept; the message names it.
        """
        version = Version(run="", term=1, round=1, step=0, world=self._world)
        snapshot = flatten(state, rank=self._rank, world=self._world)
        return ShardImage(snapshot, version, self._rank).size

    def prepare(self, size: int, slots: int) -> None:
        """Begin to make ``slots`` slots for images of ``size`` bytes; returns at once."""
        self._staging.prepare(size, slots)

    def load(self, state: Mapping[str, object], folder: Path) -> int:
        """Fill ``state`` in place from the committed checkpoint ``folder``; returns bytes read.

        Raises:
            CheckpointCorrupt: bytes differ from what was committed; nothing was changed.
            CheckpointMismatch: it is another model's; nothing was changed.
        """
        report = torch_reader.load(
            state, folder.parent, folder.name, rank=self._rank, world=self._world
        )
        return report.bytes

    def close(self, *, abort: bool = False) -> None:
        """End the staging; with ``abort`` unfinished writes are not waited for."""
        self._staging.close(abort)
