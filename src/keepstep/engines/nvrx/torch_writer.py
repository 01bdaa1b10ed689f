"""A rank's tensors as one ``torch.save`` file, by NVRx's ``TorchAsyncCheckpoint``.

Runs in the ranks; ``_tensors_of`` and ``Sink`` also in NVRx's worker process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint import layout, torch_files
from keepstep.checkpoint.manifest import Layout
from keepstep.checkpoint.shard_file import TensorSpec
from keepstep.engines.nvrx.calls import Calls
from keepstep.engines.nvrx.library import Checkpointing
from keepstep.engines.nvrx.staging import Parcel, Staged
from keepstep.errors import CheckpointCorrupt
from keepstep.wire.types import Version


class Contents:
    """Staged tensors on their way to ``torch.save``: it arrives in the worker as a plain dict."""

    def __init__(self, parcel: Parcel) -> None:
        self._parcel = parcel

    def __reduce__(self) -> tuple[Callable[[Parcel], dict[str, torch.Tensor]], tuple[Parcel]]:
        return _tensors_of, (self._parcel,)


def _tensors_of(parcel: Parcel) -> dict[str, torch.Tensor]:
    return parcel.open().tensors


class Sink:
    """A file for ``torch.save`` that tells the rank why a write failed.

    NVRx's worker ends with the error of ``torch.save``, and nobody else hears of it.
    """

    def __init__(self, path: Path, parcel: Parcel) -> None:
        self._path, self._parcel = path, parcel
        self._fd = -1
        self._told = False

    def write(self, data: bytes | memoryview) -> int:
        """Write all of ``data``."""
        try:
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o644)
            with memoryview(data) as view:
                done = 0
                while done < len(view):
                    done += os.write(self._fd, view[done:])
                return done
        except OSError as error:
            if not self._told:  # torch writes once more, and fails with words that say nothing
                self._told = True
                self._parcel.open().put_error(error)
            raise

    def flush(self) -> None:
        """``torch.save`` calls it once, at its end."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def host_checkpoint(nvrx: Checkpointing, queue: Any) -> Any:
    """A ``TorchAsyncCheckpoint`` over ``queue`` for contents that are in host memory already."""

    class HostCheckpoint(nvrx.TorchAsyncCheckpoint):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(persistent_queue=True)
            self._async_calls_queue = queue

        def async_save(self, state_dict: object, *args: object, **kwargs: object) -> None:
            """As NVRx's, without ``torch.cuda.synchronize()``: it fails without a GPU, and in a
            thread it makes a CUDA context on device 0."""
            request = nvrx.AsyncRequest(
                nvrx.TorchAsyncCheckpoint.async_fn, (state_dict, *args), [], kwargs
            )
            self._async_calls_queue.schedule_async_request(request)

    return HostCheckpoint()


class TorchWriting:
    """Implements ``sealing.Writing``: one ``torch.save`` archive a rank."""

    layout: Layout = "torch"
    needs_others = False

    def __init__(self, nvrx: Checkpointing, rank: int) -> None:
        self.calls = Calls(nvrx, rank, self._new_queue)
        self.file = layout.torch_name(rank)
        self._nvrx = nvrx
        self._checkpoint: Any = None

    def _new_queue(self, queue: Any) -> None:
        self._checkpoint = host_checkpoint(self._nvrx, queue)

    def start(self, staged: Staged, folder: Path) -> None:
        """Have NVRx's worker write ``staged``."""
        with self.calls.sending():
            path = folder / self.file
            self._checkpoint.async_save(Contents(staged.parcel), Sink(path, staged.parcel))

    def finished(self) -> bool:
        """Whether it is written; NVRx has finalized the save then.

        Raises:
            SaveFailed: the worker died.
        """
        return self.calls.poll(
            lambda: self._checkpoint.finalize_async_save(blocking=False, no_dist=True)
        )

    def spans(self, folder: Path, specs: Sequence[TensorSpec]) -> dict[str, tuple[int, int]]:
        """Where each tensor lies in the file.

        Raises:
            CheckpointCorrupt: it is not what was to be written.
        """
        found = torch_files.records(folder / self.file)
        if len(found) != len(specs):
            raise CheckpointCorrupt(
                f"{self.file} has {len(found)} storages for {len(specs)} tensors",
                where=str(folder),
            )
        # They are numbered in the order in which the dict mentions them; another order would show
        # in the checksums that are compared next.
        return {spec.name: span for spec, span in zip(specs, found, strict=True)}

    def complete(
        self,
        folder: Path,
        version: Version,
        specs: Sequence[TensorSpec],
        spans: Mapping[str, tuple[int, int]],
    ) -> list[str]:
        """Nothing belongs to the checkpoint but the ranks' files."""
        return []
