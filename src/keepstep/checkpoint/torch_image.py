"""A rank's shard as a file image: header and tensors written into shared memory.

Runs in the ranks. The image is the shard file byte for byte, so that the writer process needs to
know nothing of tensors. It is filled in two parts: what must be copied before the state changes,
and what only an optimizer's next step will change, which may be copied until then.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

from keepstep.checkpoint.shard_file import ShardPlan, ShardTensors, TensorSpec
from keepstep.checkpoint.torch_copy import ImageBytes, Piece, is_plain
from keepstep.checkpoint.torch_state import DTYPES, Entry, Snapshot
from keepstep.wire.types import Version

SMALL_BYTES = 16 << 10
"""A CPU tensor up to this size is copied at once: that costs less than to keep an eye on it."""


class Planned(NamedTuple):
    """What was worked out for the tensors of a save; it serves for the next one of the same forms.

    ``forms`` is all that the plan depends on; there are no tensors in it.
    """

    forms: list[tuple[object, ...]]
    tensors: ShardTensors


class ShardImage:
    """The image of one rank's shard of ``version``.

    Args:
        snapshot: What the rank writes. version: What it belongs to. rank: The rank.
        planned: Of an earlier save of the rank.

    Attributes:
        planned: For a later one.
        plan: Where everything goes.
        boundary: What has to be copied before the state changes.
        stable: The entries that may be copied until an optimizer steps, and their places.

    Raises:
        CheckpointError: a tensor or a value cannot be kept; the message names it.
    """

    def __init__(
        self, snapshot: Snapshot, version: Version, rank: int, planned: Planned | None = None
    ) -> None:
        forms: list[tuple[object, ...]] = [
            (one.name, one.tensor.dtype, one.tensor.shape, *one[2:5], one.of)
            for one in snapshot.entries
        ]
        if planned is None or planned.forms != forms:
            planned = Planned(forms, ShardTensors(map(spec_of, snapshot.entries)))
        self.planned = planned
        self.plan = ShardPlan(planned.tensors, version, rank, snapshot.encoded, encoded=True)
        self.boundary: list[Piece] = []
        self.stable: list[tuple[Entry, Piece]] = []
        start, starts = self.plan.data_start, planned.tensors.starts
        for entry in snapshot.entries:
            piece = Piece(entry.name, entry.tensor, start + starts[entry.name])
            if entry.stable and (piece.nbytes > SMALL_BYTES or not is_plain(entry.tensor)):
                self.stable.append((entry, piece))
            else:
                self.boundary.append(piece)

    @property
    def size(self) -> int:
        """Bytes of the image."""
        return self.plan.size

    def open(self, buffer: mmap.mmap | bytearray | memoryview) -> ImageBytes:
        """``buffer`` as the memory of this image, with the header written.

        Raises:
            ValueError: ``buffer`` has less than ``size`` bytes.
        """
        memory = ImageBytes(buffer, self.size)
        header = self.plan.header
        buffer[: len(header)] = header
        return memory

    def write_into(self, buffer: mmap.mmap | bytearray | memoryview) -> None:
        """Copy header and tensors into ``buffer``, which must hold at least ``size`` bytes.

        Returns when the copy is complete, for CUDA tensors too; the state may change then.

        Raises:
            ValueError: ``buffer`` has less than ``size`` bytes.
        """
        memory = self.open(buffer)
        memory.copy(self.boundary)
        memory.copy(piece for _, piece in self.stable)


def spec_of(entry: Entry) -> TensorSpec:
    """What a shard file or a receipt says of ``entry``."""
    return TensorSpec(
        name=entry.name,
        dtype=DTYPES[entry.tensor.dtype],
        shape=tuple(entry.tensor.shape),
        global_shape=entry.global_shape,
        offsets=entry.offsets,
        kind=entry.kind,
        of=entry.of,
    )
