"""The order in which a GPU is asked, seen by a stand-in: there is no GPU here."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.checkpoint.torch_copy import ImageBytes, Piece
from keepstep.errors import SaveFailed
from keepstep.policy.copying import CopyPolicy
from keepstep.rank import copy_task, copying
from keepstep.rank.copied import Copied, CopyWatch
from keepstep.rank.copying import Copier
from keepstep.rank.shard_writer import NativeShardWriter
from keepstep.rank.torch_copy_cuda import Pinned, Streams
from tests.checkpoint.torch_worlds import version
from tests.rank.copies import LIMIT_S, KeepingStaging, same, values_of


class Event:
    """Complete once ``gpu`` says so."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def synchronize(self) -> None:
        assert self.gpu.complete.wait(LIMIT_S)
        self.gpu.calls.append(f"host waited for {self.name}")


class Queue:
    """Writes down what it is asked."""

    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def wait_stream(self, other: Queue) -> None:
        self.gpu.calls.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.gpu.calls.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        self.gpu.calls.append(f"event on {self.name}")
        return Event(self.gpu, f"event on {self.name}")


class Gpu:
    """Stands in for ``torch.cuda``; copies are done when they are queued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuses: bool = False) -> None:
        self.calls: list[str] = []
        self.complete = threading.Event()
        self.complete.set()
        self.refuses = refuses
        self.now = "no stream"
        self.current = Queue(self, "current")
        original = torch._foreach_copy_

        def noted(targets: Any, sources: Any, non_blocking: bool = False) -> Any:
            assert non_blocking
            self.calls.append(f"{len(sources)} copies on {self.now}")
            return original(targets, sources)

        monkeypatch.setattr(torch, "_foreach_copy_", noted)

    def current_stream(self, device: torch.device) -> Queue:
        return self.current

    def Stream(self, device: torch.device) -> Queue:
        self.calls.append("new side")
        return Queue(self, "side")

    @contextlib.contextmanager
    def stream(self, stream: Queue) -> Iterator[None]:
        self.now, before = stream.name, self.now
        yield
        self.now = before

    def cudart(self) -> Gpu:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(f"lock {size}")
        return 1 if self.refuses else 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unlock")
        return 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU on which every tensor seems to be."""
    for module in (copying, copy_task):
        monkeypatch.setattr(module, "is_on_device", lambda piece: True)
    return Gpu(monkeypatch)


def writer_of(staging: KeepingStaging, gpu: Gpu, **options: Any) -> NativeShardWriter:
    watch = options.pop("watch", CopyWatch())
    writer = NativeShardWriter(staging, rank=0, world=1)
    writer._copier.close()
    writer._copier = Copier(CopyPolicy("auto"), rank=0, cuda=gpu, watch=watch, **options)
    return writer


def trained() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(96, 96), nn.BatchNorm1d(96))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_the_boundary_goes_on_the_current_stream_and_the_rest_beside_it(gpu: Gpu) -> None:
    image, streams = ImageBytes(bytearray(64), 64), Streams(gpu)
    pieces = [Piece(f"t{at}", torch.full((2,), float(at)), 8 * at) for at in range(5)]
    flight = streams.start(image, pieces[:2], pieces[2:])
    flight.hold_back()
    flight.wait()
    assert gpu.calls == [
        "new side",
        "2 copies on current",
        "side waits for current",
        "3 copies on side",
        "event on side",
        "current waits for event on side",
        "host waited for event on side",
    ]
    assert all(torch.equal(image.target(piece), piece.tensor) for piece in pieces)
    gpu.calls.clear()
    streams.start(image, [], pieces[:1])
    assert gpu.calls == ["side waits for current", "1 copies on side", "event on side"]


def test_an_optimizer_is_held_back_on_the_device_and_not_on_the_host(gpu: Gpu) -> None:
    state, staging = trained(), KeepingStaging()
    told: list[Copied] = []
    writer = writer_of(staging, gpu, watch=CopyWatch(copied=told.append))
    expected = values_of(state)
    gpu.complete.clear()
    pending = writer.begin(state, version(), Path("unused"))
    # Before the call returns all copies are queued, so later work on the device comes after them.
    assert gpu.calls[-1] == "event on side"
    state["optimizer"].step()  # would wait for ever if the host waited
    assert gpu.calls[-1] == "current waits for event on side"
    assert not pending.staged()
    gpu.complete.set()
    pending.wait(LIMIT_S)
    assert gpu.calls[-1] == "host waited for event on side"
    assert same(staging.saved(), expected)
    assert [(one.mode, one.reason) for one in told] == [
        ("overlap", "the GPU copies beside its other work")
    ]
    writer.close()


def test_a_change_before_the_step_is_found_and_the_step_s_own_is_not_taken_for_one(
    gpu: Gpu,
) -> None:
    state, staging = trained(), KeepingStaging()
    writer = writer_of(staging, gpu)
    gpu.complete.clear()
    pending = writer.begin(state, version(), Path("unused"))
    with torch.no_grad():
        state["model"][0].weight.mul_(2)
    state["optimizer"].step()
    gpu.complete.set()
    with pytest.raises(SaveFailed, match=r"model\.0\.weight was changed"):
        pending.wait(LIMIT_S)
    assert not staging.submitted
    writer.close()


def test_with_hashing_the_host_waits(gpu: Gpu) -> None:
    state, staging = trained(), KeepingStaging()
    writer = writer_of(staging, gpu, check=True)
    expected = values_of(state)
    pending = writer.begin(state, version(), Path("unused"))
    state["optimizer"].step()
    assert pending.staged()
    assert "current waits for event on side" not in gpu.calls
    pending.wait(LIMIT_S)
    assert same(staging.saved(), expected)
    writer.close()


@pytest.mark.parametrize("wanted", ["overlap", "blocking"])
def test_a_copy_in_a_round_that_was_aborted_is_not_handed_on(gpu: Gpu, wanted: Any) -> None:
    state, staging = trained(), KeepingStaging()
    writer = writer_of(staging, gpu, watch=CopyWatch(trusted=lambda version: False))
    writer._copier.policy = CopyPolicy(wanted)
    with pytest.raises(SaveFailed, match="round 1 was aborted while step 1 was being copied"):
        writer.begin(state, version(), Path("unused")).wait(LIMIT_S)
    assert staging.free
    assert not staging.submitted
    writer.close()


def test_a_blocking_copy_waits_for_the_device_before_it_is_handed_on(gpu: Gpu) -> None:
    state, staging = trained(), KeepingStaging()
    writer = writer_of(staging, gpu)
    writer._copier.policy = CopyPolicy("blocking")
    expected = values_of(state)
    writer.begin(state, version(), Path("unused")).wait(0.0)
    assert gpu.calls[-1] == "host waited for event on side"
    assert same(staging.saved(), expected)
    writer.close()


def test_a_slot_is_locked_once_and_unlocked_before_it_is_unmapped(gpu: Gpu) -> None:
    state, staging = trained(), KeepingStaging()
    writer = writer_of(staging, gpu)
    for step in (1, 2):
        writer.begin(state, version(step), Path("unused")).wait(LIMIT_S)
    size = staging.slot.capacity
    assert gpu.calls.count(f"lock {size}") == 1
    writer.close()
    assert gpu.calls.count("unlock") == 1
    assert staging.slot.buffer.closed


def test_memory_that_the_driver_refuses_is_used_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, refuses=True)
    buffer = mmap.mmap(-1, 4096)
    pinned = Pinned(gpu)
    assert not pinned.pin(buffer)
    pinned.unpin(buffer)
    assert gpu.calls == ["lock 4096"]
    buffer.close()


def test_a_locked_buffer_is_known_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    addresses: list[int] = []

    def register(address: int, size: int, flags: int) -> int:
        addresses.append(address)
        return 0

    monkeypatch.setattr(gpu, "cudaHostRegister", register)
    buffer = mmap.mmap(-1, 4096)
    pinned = Pinned(gpu)
    assert pinned.pin(buffer)
    assert not pinned.pin(buffer)
    ctypes.memset(addresses[0], 65, 3)
    assert buffer[:4] == b"AAA\0"
    pinned.unpin(buffer)
    pinned.unpin(buffer)
    assert gpu.calls == ["unlock"]
    buffer.close()
