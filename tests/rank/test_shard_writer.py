"""The native shard writer: what is staged is the state at the call."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from keepstep.checkpoint.shard_file import parse_header
from keepstep.errors import CheckpointError, SaveFailed
from keepstep.ports import PendingWrite, ShardWriter
from keepstep.rank.shard_writer import NativeShardWriter, Slot, Staging
from keepstep.wire.types import Version
from tests.checkpoint.torch_worlds import save, version
from tests.rank.copies import Committed


class OneSlot:
    """Implements ``Staging`` with memory of this process."""

    def __init__(self) -> None:
        self.slot = Slot(0, mmap.mmap(-1, 1 << 20), 1 << 20)
        self.asked: list[tuple[int, float]] = []
        self.submitted: list[tuple[int, Version]] = []
        self.closed: list[bool] = []
        self.full = False
        self.busy = False
        self.prepared: list[tuple[int, int]] = []
        self.released = 0

    def acquire(self, size: int, timeout_s: float) -> Slot:
        self.asked.append((size, timeout_s))
        if self.full:
            raise SaveFailed("no slot")
        return self.slot

    def prepare(self, size: int, slots: int) -> None:
        self.prepared.append((size, slots))

    def release(self, slot: Slot) -> None:
        self.released += 1

    def submit(self, slot: Slot, size: int, version: Version) -> PendingWrite:
        self.submitted.append((size, version))
        return Committed()

    def close(self, abort: bool = False) -> None:
        self.slot.buffer.close()
        self.closed.append(abort)


class Clock:
    """Goes one second further each time it is read."""

    now = 0.0

    def wall(self) -> float:
        return 0.0

    def mono(self) -> float:
        self.now += 1.0
        return self.now

    def sleep(self, seconds: float) -> None:
        raise AssertionError


def test_it_is_a_shard_writer_and_its_staging_may_be_any() -> None:
    staging = OneSlot()
    checked: Staging = staging
    writer: ShardWriter = NativeShardWriter(checked, rank=0, world=1)
    writer.close(abort=True)
    assert staging.closed == [True]


def test_what_is_staged_is_the_state_at_the_call() -> None:
    staging = OneSlot()
    writer = NativeShardWriter(staging, rank=0, world=1, clock=Clock(), slot_limit_s=5.0)
    tensor, data = torch.ones(1000), {"epoch": 1}
    pending = writer.begin({"t": tensor, "d": data}, version(3), Path("unused"))
    tensor.zero_()
    data["epoch"] = 2
    size, of = staging.submitted[0]
    image = staging.slot.buffer[:size]
    header = parse_header(image, size)
    start, stop = header.spans["t"]
    assert torch.frombuffer(bytearray(image[start:stop]), dtype=torch.float32).eq(1).all()
    assert header.decode_values()["d"]["state"] == {"epoch": 1}
    assert (of, header.version) == (version(3), version(3))
    assert staging.asked == [(size, 5.0)]
    assert (writer.last, writer.last_bytes) == (pending, size)
    assert writer.last_copy_s > 0
    writer.close()


def test_a_state_that_cannot_be_kept_takes_no_slot() -> None:
    staging = OneSlot()
    writer = NativeShardWriter(staging, rank=0, world=1)
    with pytest.raises(CheckpointError, match="t cannot be kept"):
        writer.begin({"t": torch.ones(1).to_sparse()}, version(), Path("unused"))
    assert staging.asked == []
    staging.full = True
    with pytest.raises(SaveFailed, match="no slot"):
        writer.begin({"t": torch.ones(1)}, version(), Path("unused"))
    assert writer.last is None
    writer.close()


def test_load_reads_a_committed_folder(tmp_path: Path) -> None:
    folder = save(tmp_path, {"t": torch.ones(3)})
    writer = NativeShardWriter(OneSlot(), rank=0, world=1)
    tensor = torch.zeros(3)
    assert writer.load({"t": tensor}, tmp_path / folder) == 12
    assert tensor.tolist() == [1, 1, 1]
    writer.close()


def test_the_size_of_a_save_is_known_before_it_and_memory_is_made_for_it() -> None:
    staging = OneSlot()
    writer = NativeShardWriter(staging, rank=0, world=1)
    state = {"t": torch.ones(1000), "d": {"epoch": 1}}
    size = writer.size_of(state)
    writer.prepare(size, 2)
    writer.begin(state, version(3), Path("unused"))
    assert abs(size - staging.submitted[0][0]) < 4096
    assert staging.prepared == [(size, 2)]
    with pytest.raises(CheckpointError, match="t cannot be kept"):
        writer.size_of({"t": torch.ones(1).to_sparse()})
    writer.close()


def test_a_save_of_many_tensors_starts_no_collection_of_cycles() -> None:
    staging = OneSlot()
    writer = NativeShardWriter(staging, rank=0, world=1)
    state: dict[str, object] = {"many": [torch.ones(1) for _ in range(1500)]}
    collections: list[object] = []

    def note(phase: str, about: object) -> None:
        if phase == "start" and staging.busy:
            collections.append(about)

    gc.callbacks.append(note)
    try:
        for enabled in (False, True):
            (gc.enable if enabled else gc.disable)()
            staging.busy = True
            writer.begin(state, version(), Path("unused"))
            staging.busy = False
            writer.settle()
            assert gc.isenabled() == enabled
            # Short ones, as soon as they are allowed again: after flattening, and after copying.
            assert len(collections) <= 2 * enabled
        gc.enable()
        with pytest.raises(CheckpointError):
            writer.begin({"t": torch.ones(1).to_sparse()}, version(), Path("unused"))
        assert gc.isenabled()
    finally:
        gc.enable()
        gc.callbacks.remove(note)
        staging.close()
