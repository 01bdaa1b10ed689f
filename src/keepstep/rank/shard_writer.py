"""The native way to save a rank's shard: an image in shared memory, written by another process.

Runs in the ranks; implements ``ports.ShardWriter``. Where the memory comes from and who writes it
is the staging's business: the agent's slots under the launcher, own slots in a plain script. A slot
is filled at the call in part only: the rest is copied while training goes on, and the slot is
submitted by the copying thread.
"""

from __future__ import annotations

import functools
import gc
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from keepstep.checkpoint import torch_reader
from keepstep.checkpoint.torch_image import Planned, ShardImage
from keepstep.checkpoint.torch_state import flatten
from keepstep.clock import SYSTEM, Clock
from keepstep.policy.copying import CopyPolicy
from keepstep.ports import PendingWrite
from keepstep.rank.copied import CopyWatch
from keepstep.rank.copy_task import Job
from keepstep.rank.copying import Copier
from keepstep.wire.types import Version

SLOT_LIMIT_S = 600.0
"""How long a save waits for storage to take the ones before it."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Shared memory for one file image: ``capacity`` bytes in ``buffer``.

    ``closing`` is called before it is unmapped: a GPU's driver may know of it.
    """

    id: int
    buffer: mmap.mmap
    capacity: int
    closing: list[Callable[[], object]] = field(default_factory=list)

    def close(self) -> None:
        """Unmap; nobody may be copying into it.

        Raises:
            BufferError: somebody still has a view of it; it is unmapped when that goes.
        """
        while self.closing:
            self.closing.pop()()
        self.buffer.close()


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
        """Have the first ``size`` bytes of ``slot`` written; the slot is the staging's again.

        Called once they are complete: by the copying thread, at any time after ``begin`` returned.
        """

    def close(self, abort: bool = False) -> None:
        """Give everything back; with ``abort`` without waiting for unfinished writes."""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's collection of cycles, while thousands of small objects are made.

    They would start it, for each save or every few saves through all that torch has ever made: tens
    to hundreds of milliseconds for nothing, as reference counts free all of them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class NativeShardWriter:
    """Implements ``ports.ShardWriter``.

    Args:
        staging: Owned by the writer and closed with it.
        rank: This rank. world: Number of ranks.
        clock: Where time comes from.
        slot_limit_s: How long ``begin`` may wait for a free slot.
        copy: How what only optimizers change is copied; see the setting ``checkpoint.copy``.
        check_copy: Whether to hash that before and after it is copied in the background.
        watch: Who is told how the copies went; by any thread.

    Attributes:
        last: The save begun last, if any.
        last_bytes: Size of its image in bytes.
        last_copy_s: How long ``begin`` copied, in seconds; the wait for a slot is not in it, and
            neither is what is copied later.
    """

    def __init__(
        self,
        staging: Staging,
        *,
        rank: int,
        world: int,
        clock: Clock = SYSTEM,
        slot_limit_s: float = SLOT_LIMIT_S,
        copy: Literal["auto", "overlap", "blocking"] = "auto",
        check_copy: bool = False,
        watch: CopyWatch | None = None,
    ) -> None:
        self._staging = staging
        self._rank = rank
        self._world = world
        self._clock = clock
        self._slot_limit_s = slot_limit_s
        self._copier = Copier(
            CopyPolicy(copy), rank=rank, check=check_copy, clock=clock, watch=watch
        )
        self._planned: Planned | None = None
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
        self._copier.settle()
        with _uncollected():
            snapshot = flatten(state, rank=self._rank, world=self._world)
            image = ShardImage(snapshot, version, self._rank, self._planned)
            self._planned = image.planned
        asked = self._clock.mono()
        slot = self._staging.acquire(image.size, self._slot_limit_s)
        began = self._clock.mono()
        job = Job(
            image=image,
            buffer=slot.buffer,
            version=version,
            submit=functools.partial(self._staging.submit, slot, image.size, version),
            release=functools.partial(self._staging.release, slot),
            closing=slot.closing,
            excluded_s=began - asked,
        )
        with _uncollected():
            self.last = self._copier.copy(job)
        self.last_copy_s = self._clock.mono() - began
        self.last_bytes = image.size
        return self.last

    def mutates(self) -> None:
        """Return when no copy is in progress: then the state may change in any way."""
        self._copier.mutates()

    def settle(self) -> None:
        """Return when a copy in progress is handed over or has failed."""
        self._copier.settle()

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
        self.settle()
        report = torch_reader.load(
            state, folder.parent, folder.name, rank=self._rank, world=self._world
        )
        return report.bytes

    def close(self, *, abort: bool = False) -> None:
        """End the staging; with ``abort`` a copy in progress is dropped and nothing waited for."""
        self._copier.close(abort=abort)
        self._staging.close(abort)
