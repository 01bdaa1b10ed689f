"""Copies of a rank's tensors in private shared memory, from which NVRx's worker process writes.

Runs in the ranks and, to open what they made, in NVRx's worker. NVRx gets a ``Parcel`` in place of
tensors: a few numbers, so that nothing of what training changes can reach the worker, nothing is
moved by NVRx's threads, and its messages are too small to block anybody when the worker dies.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
from dataclasses import dataclass

import msgspec
import torch
import xxhash

from keepstep.checkpoint.shard_file import TensorSpec
from keepstep.checkpoint.torch_image import spec_of
from keepstep.checkpoint.torch_state import TORCH_DTYPES, Snapshot
from keepstep.errors import InternalError

ALIGNMENT = 64
"""Bytes; each tensor starts at a multiple, so that it can be used in place."""
ERROR_BYTES = 4096
_ROUND_UP = 1 << 16
_LENGTH = struct.Struct("<Q")


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in the memory: tensors in the order in which they are written, and their places."""

    specs: tuple[TensorSpec, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parcel:
    """Names staged tensors for another process of the node. ``table`` is a first byte and a size.

    The memory is opened by its owner's descriptor, so the owner must live and still hold it.
    """

    pid: int
    fd: int
    size: int
    table: tuple[int, int]

    def open(self) -> Opened:
        """Map the memory in this process. In a worker, later signals for the job are ignored.

        Raises:
            OSError: the owner ended or has given the memory up.
        """
        if os.getpid() != self.pid:
            ignore_job_signals()
        return Opened(self)


def ignore_job_signals() -> None:
    """Let no signal that is meant for the job end a save. In NVRx's worker, in its main thread.

    NVRx 0.6 and later set a handler for SIGTERM when the worker starts, so it takes this again with
    each save.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


class Opened:
    """A parcel in the process that writes it.

    Attributes:
        tensors: By name, in the order in which they are to be written; each has a storage of its
            own that is exactly as large as it is. They must not be changed.
    """

    def __init__(self, parcel: Parcel) -> None:
        fd = os.open(f"/proc/{parcel.pid}/fd/{parcel.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, parcel.size)
        finally:
            os.close(fd)
        start, size = parcel.table
        table = msgspec.json.decode(self._map[start : start + size], type=_Table)
        self._error_at = start + size
        self.tensors = {
            spec.name: _tensor(self._map, spec, at)
            for spec, at in zip(table.specs, table.starts, strict=True)
        }

    def put_error(self, error: BaseException) -> None:
        """Tell the rank why nothing was written: the first error of a chain is the cause."""
        while error.__context__ is not None:
            error = error.__context__
        text = f"{type(error).__name__}: {error}".encode()[: ERROR_BYTES - _LENGTH.size]
        at = self._error_at + _LENGTH.size
        self._map[at : at + len(text)] = text
        self._map[self._error_at : at] = _LENGTH.pack(len(text))


def _tensor(buffer: mmap.mmap, spec: TensorSpec, start: int) -> torch.Tensor:
    dtype = TORCH_DTYPES[spec.dtype]
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    raw = torch.frombuffer(buffer, dtype=torch.uint8, count=spec.nbytes, offset=start)
    return raw.view(dtype).view(spec.shape)


class Staging:
    """Shared memory of this process that holds one copy at a time.

    The memory is an anonymous file: it has no name to leak and ends with its last holder.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._capacity = 0

    def copy(self, snapshot: Snapshot) -> Staged:
        """Copy all tensors of ``snapshot``; returns when the copy is complete.

        The copy before it is overwritten: nobody may read from it any more.

        Raises:
            OSError: there is no memory.
        """
        specs = tuple(spec_of(entry) for entry in snapshot.entries)
        starts, at = [], 0
        for spec in specs:
            starts.append(at)
            at += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        table = msgspec.json.encode(_Table(specs=specs, starts=tuple(starts)))
        size = at + len(table) + ERROR_BYTES
        memory = self._reserve(size)
        _copy_tensors(snapshot, memory, specs, starts)
        memory[at : at + len(table)] = table
        memory[at + len(table) : at + len(table) + _LENGTH.size] = _LENGTH.pack(0)
        parcel = Parcel(os.getpid(), self._fd, size, (at, len(table)))
        return Staged(specs=specs, starts=tuple(starts), parcel=parcel, memory=memory)

    def _reserve(self, size: int) -> mmap.mmap:
        if self._map is not None and size <= self._capacity:
            return self._map
        self.close()
        capacity = -(-size // _ROUND_UP) * _ROUND_UP
        self._fd = os.memfd_create("keepstep-nvrx", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, capacity)
        self._map = mmap.mmap(self._fd, capacity)
        self._capacity = capacity
        return self._map

    def close(self) -> None:
        """Give the memory back; later calls do nothing."""
        mapped, self._map = self._map, None
        if mapped is not None:
            with contextlib.suppress(BufferError):  # still being read; it goes with the reader
                mapped.close()
            os.close(self._fd)


def _copy_tensors(
    snapshot: Snapshot, memory: mmap.mmap, specs: tuple[TensorSpec, ...], starts: list[int]
) -> None:
    devices: set[torch.device] = set()
    with torch.no_grad():
        for entry, spec, start in zip(snapshot.entries, specs, starts, strict=True):
            if not spec.nbytes:
                continue
            on_gpu = entry.tensor.device.type == "cuda"
            _tensor(memory, spec, start).copy_(entry.tensor, non_blocking=on_gpu)
            if on_gpu:
                devices.add(entry.tensor.device)
    for device in devices:
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy in ``Staging``, until the next one. ``specs`` in the order in which they lie there."""

    specs: tuple[TensorSpec, ...]
    starts: tuple[int, ...]
    parcel: Parcel
    memory: mmap.mmap

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs)

    def checksums(self) -> dict[str, str]:
        """The xxh3-128 of each tensor's bytes as 32 hex digits."""
        with memoryview(self.memory) as whole:
            found = {}
            for spec, start in zip(self.specs, self.starts, strict=True):
                with whole[start : start + spec.nbytes] as part:
                    found[spec.name] = xxhash.xxh3_128_hexdigest(part)
            return found

    def error(self) -> str:
        """What the worker has told about a failure; empty if nothing."""
        at = sum(self.parcel.table)
        (length,) = _LENGTH.unpack(self.memory[at : at + _LENGTH.size])
        if length > ERROR_BYTES - _LENGTH.size:
            raise InternalError(f"NVRx's worker left an error of {length} bytes")
        start = at + _LENGTH.size
        return self.memory[start : start + length].decode(errors="replace")
