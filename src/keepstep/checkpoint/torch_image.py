"""A rank's shard as a file image: header and tensors written into shared memory.

Runs in the ranks. The image is the shard file byte for byte, so that the writer process needs to
know nothing of tensors.
"""

from __future__ import annotations

import mmap

import torch

from keepstep.checkpoint.shard_file import ShardPlan, TensorSpec
from keepstep.checkpoint.torch_state import DTYPES, Entry, Snapshot
from keepstep.wire.types import Version


class ShardImage:
    """The image of one rank's shard of ``version``.

    Attributes:
        plan: Where everything goes.

    Raises:
        CheckpointError: a tensor or a value cannot be kept; the message names it.
    """

    def __init__(self, snapshot: Snapshot, version: Version, rank: int) -> None:
        self._entries = snapshot.entries
        self.plan = ShardPlan(
            [spec_of(entry) for entry in snapshot.entries], version, rank, snapshot.values
        )

    @property
    def size(self) -> int:
        """Bytes of the image."""
        return self.plan.size

    def write_into(self, buffer: mmap.mmap | bytearray | memoryview) -> None:
        """Copy header and tensors into ``buffer``, which must hold at least ``size`` bytes.

        Returns when the copy is complete, for CUDA tensors too; the state may change then.
        """
        header = self.plan.header
        buffer[: len(header)] = header
        whole = torch.frombuffer(buffer, dtype=torch.uint8, count=self.size)
        devices: set[torch.device] = set()
        with torch.no_grad():
            for entry in self._entries:
                source = entry.tensor
                at = self.plan.offset_of(entry.name)
                nbytes = source.numel() * source.element_size()
                target = whole[at : at + nbytes].view(source.dtype).view(source.shape)
                if source.device.type == "cuda":
                    devices.add(source.device)
                target.copy_(source, non_blocking=source.device.type == "cuda")
        for device in devices:
            torch.cuda.synchronize(device)


def spec_of(entry: Entry) -> TensorSpec:
    """What a shard file or a receipt says of ``entry``."""
    return TensorSpec(
        name=entry.name,
        dtype=DTYPES[entry.tensor.dtype],
        shape=tuple(entry.tensor.shape),
        global_shape=entry.global_shape,
        offsets=entry.offsets,
        kind=entry.kind,
    )
