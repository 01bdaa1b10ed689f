"""Copies from CUDA devices into pinned host memory, ordered by streams and events.

Runs in the ranks; the only file of staging that names CUDA. The host never waits here but in
``Flight.wait``. Memory is used by a side stream only while the caller keeps the tensors: until
``Flight.wait`` has returned, so that the caching allocator cannot hand it out again.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from typing import Any

import torch

from keepstep.checkpoint.torch_copy import ImageBytes, Piece

_PORTABLE = 1
"""``cudaHostRegisterPortable``: locked for every device of the process."""


def is_on_device(piece: Piece) -> bool:
    """Whether ``piece`` is copied here."""
    return piece.tensor.is_cuda


class Pinned:
    """Page-locked slots: only from and to such memory a copy goes on beside the host.

    Args:
        cuda: ``torch.cuda``, or a stand-in.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._addresses: dict[int, int] = {}

    def pin(self, buffer: mmap.mmap) -> bool:
        """Lock all of ``buffer``, unless it is locked already.

        Returns:
            Whether it was locked now, and so ``unpin`` is to be called. Where the driver refuses,
            copies are right too, but they block.
        """
        if id(buffer) in self._addresses:
            return False
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        if int(self._cuda.cudart().cudaHostRegister(address, len(buffer), _PORTABLE)) != 0:
            return False
        self._addresses[id(buffer)] = address
        return True

    def unpin(self, buffer: mmap.mmap) -> None:
        """Undo ``pin``; must come before the memory is unmapped. Copies must be over."""
        address = self._addresses.pop(id(buffer), None)
        if address is not None:
            self._cuda.cudart().cudaHostUnregister(address)


class Flight:
    """Copies of one save that are queued on side streams."""

    def __init__(self, events: dict[torch.device, Any], cuda: Any) -> None:
        self._events = events
        self._cuda = cuda

    def hold_back(self) -> None:
        """What is queued from now on, on each device's current stream, comes after the copies."""
        for device, event in self._events.items():
            self._cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Return when the copies are complete."""
        for event in self._events.values():
            event.synchronize()


class Streams:
    """A side stream for each device.

    Args:
        cuda: ``torch.cuda``, or a stand-in.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._side: dict[torch.device, Any] = {}

    def start(
        self, image: ImageBytes, boundary: Iterable[Piece], stable: Iterable[Piece]
    ) -> Flight:
        """Queue copies and return at once.

        Args:
            image: Where to; its memory should be pinned.
            boundary: Copied on the current streams: before whatever is queued there afterwards.
            stable: Copied beside what is queued afterwards, until ``Flight.hold_back``.
        """
        cuda, at_once, beside = self._cuda, _by_device(boundary), _by_device(stable)
        events: dict[torch.device, Any] = {}
        for device in [*at_once, *(one for one in beside if one not in at_once)]:
            current = cuda.current_stream(device)
            if device not in self._side:
                self._side[device] = cuda.Stream(device)
            side = self._side[device]
            with cuda.stream(current):
                _queue(image, at_once.get(device, []))
            # Everything queued so far: the step before, and the copies at the boundary.
            side.wait_stream(current)
            with cuda.stream(side):
                _queue(image, beside.get(device, []))
            events[device] = side.record_event()
        return Flight(events, cuda)


def _by_device(pieces: Iterable[Piece]) -> dict[torch.device, list[Piece]]:
    found: dict[torch.device, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.tensor.device, []).append(piece)
    return found


def _queue(image: ImageBytes, pieces: list[Piece]) -> None:
    if pieces:
        with torch.no_grad():
            targets = [image.target(piece) for piece in pieces]
            torch._foreach_copy_(targets, [piece.tensor for piece in pieces], non_blocking=True)
