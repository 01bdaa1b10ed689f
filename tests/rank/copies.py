"""A staging that keeps what it is given, and a gate that holds the copying thread back."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.checkpoint.shard_file import parse_header
from keepstep.checkpoint.torch_state import TORCH_DTYPES, flatten
from keepstep.ports import PendingWrite
from keepstep.rank.copied import CopiedWrite
from keepstep.rank.shard_writer import NativeShardWriter, Slot
from keepstep.wire.types import Version
from tests.checkpoint.torch_worlds import version

State = dict[str, Any]
WIDTH = 96  # weights of 36 KB: above what is copied at once

LIMIT_S = 30.0
"""When a test gives up waiting for a thread."""


class Committed:
    """A save that is over."""

    def staged(self) -> bool:
        return True

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        return None


class KeepingStaging:
    """Implements ``shard_writer.Staging`` with one slot in this process."""

    def __init__(self, size: int = 4 << 20) -> None:
        self.slot = Slot(0, mmap.mmap(-1, size), size)
        self.free = True
        self.submitted: list[tuple[Version, bytes, str]] = []
        """Version, the image, and the thread that submitted it."""
        self.refuse: Exception | None = None
        self.closed = False

    def prepare(self, size: int, slots: int) -> None:
        return None

    def acquire(self, size: int, timeout_s: float) -> Slot:
        assert self.free, "a slot is filled twice"
        assert size <= self.slot.capacity
        self.free = False
        return self.slot

    def release(self, slot: Slot) -> None:
        assert not self.free
        self.free = True

    def submit(self, slot: Slot, size: int, version: Version) -> PendingWrite:
        if self.refuse is not None:
            raise self.refuse
        image = slot.buffer[:size]
        self.submitted.append((version, image, threading.current_thread().name))
        self.free = True
        return Committed()

    def close(self, abort: bool = False) -> None:
        self.slot.close()
        self.closed = True

    def saved(self, at: int = -1) -> dict[str, torch.Tensor]:
        """The tensors of a submitted image, by name."""
        image = self.submitted[at][1]
        header = parse_header(image, len(image))
        found = {}
        for name, (start, stop) in header.spans.items():
            spec = header.tensors[name]
            raw = torch.frombuffer(bytearray(image[start:stop]), dtype=torch.uint8)
            found[name] = raw.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
        return found


def values_of(
    state: Mapping[str, object], *, rank: int = 0, world: int = 1
) -> dict[str, torch.Tensor]:
    """Copies of what ``rank`` saves of ``state``, by name."""
    entries = flatten(state, rank=rank, world=world).entries
    return {entry.name: entry.tensor.clone().contiguous() for entry in entries}


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    """Whether both have the same names and bits."""
    return first.keys() == second.keys() and all(
        bytes(first[name].reshape(-1).view(torch.uint8).tolist())
        == bytes(second[name].reshape(-1).view(torch.uint8).tolist())
        for name in first
    )


class Gate:
    """Holds the copying thread at each of its copies until ``opened``.

    ``open_on`` opens it once somebody waits for the copy: so a test sees that somebody did.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.passed_shut = False
        """Whether the thread went on although nobody had opened the gate."""
        move = ctypes.memmove

        def held(target: int, source: int, count: int) -> object:
            if threading.current_thread().name == "keepstep-copy":
                self.reached.set()
                if not self.opened.wait(LIMIT_S):
                    self.passed_shut = True
            return move(target, source, count)

        patch.setattr(ctypes, "memmove", held)

    def open_on(self, method: str) -> None:
        """Open when ``CopiedWrite``'s ``method`` is called."""
        original = getattr(CopiedWrite, method)

        def opening(write: CopiedWrite) -> None:
            self.opened.set()
            original(write)

        self._patch.setattr(CopiedWrite, method, opening)


@contextmanager
def in_thread(name: str, call: object) -> Iterator[threading.Thread]:
    """Run ``call`` beside the block; both have to end."""
    assert callable(call)
    thread = threading.Thread(target=call, name=name)
    thread.start()
    yield thread
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def writer_of(
    staging: KeepingStaging, made: list[NativeShardWriter], **options: Any
) -> NativeShardWriter:
    settings: dict[str, Any] = {"rank": 0, "world": 1, "copy": "overlap", **options}
    writer = NativeShardWriter(staging, **settings)
    made.append(writer)
    return writer


def begin(writer: NativeShardWriter, state: State, of: Version | None = None) -> Any:
    return writer.begin(state, of or version(), Path("unused"))


def fill_gradients(*modules: Any) -> None:
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)


def trained(model: Any, make: Callable[[Any], torch.optim.Optimizer]) -> State:
    """``model`` and its optimizer, after a step and before one that changes everything."""
    optimizer = make(model.parameters())
    fill_gradients(model)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def adam(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=0.1, **options)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
