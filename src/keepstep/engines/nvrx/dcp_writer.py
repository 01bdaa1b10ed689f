"""A rank's tensors as a file of a distributed checkpoint (DCP), by NVRx's ``FileSystemWriterAsync``
and ``AsyncCallsQueue``.

Runs in the ranks; ``_write_items`` in NVRx's worker process. Plain
``torch.distributed.checkpoint.load`` reads the result.

NVRx plans and finalizes such a save with collectives of the main threads, sends results through a
``multiprocessing.Manager`` that outlives its rank, and, before 0.6, forks writers that nobody
watches. Here the worker writes by NVRx's function, in its own process, and rank 0 has NVRx's writer
make the metadata from what the receipts of all ranks say: a rank that dies leaves nobody waiting in
a collective, and there is one process a rank.
"""

from __future__ import annotations

import bisect
import inspect
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from keepstep.checkpoint import layout, manifest, torch_files
from keepstep.checkpoint.manifest import Layout
from keepstep.checkpoint.shard_file import TensorSpec
from keepstep.checkpoint.torch_state import TORCH_DTYPES
from keepstep.engines.nvrx.calls import Calls
from keepstep.engines.nvrx.library import Checkpointing
from keepstep.engines.nvrx.staging import Parcel, Staged
from keepstep.errors import CheckpointCorrupt
from keepstep.wire.types import Version

METADATA = ".metadata"


def file_name(rank: int) -> str:
    """The file of ``rank``, as NVRx and torch name it."""
    return f"__{rank}_0.distcp"


class DcpWriting:
    """Implements ``sealing.Writing``: the files of a DCP folder."""

    layout: Layout = "dcp"
    needs_others = True

    def __init__(self, nvrx: Checkpointing, rank: int) -> None:
        self.calls = Calls(nvrx, rank)
        self.file = file_name(rank)
        self._nvrx = nvrx
        self._rank = rank

    def start(self, staged: Staged, folder: Path) -> None:
        """Have NVRx's worker write ``staged``."""
        writer = self._nvrx.FileSystemWriterAsync(folder)
        transforms = [writer.transforms] if hasattr(writer, "transforms") else []
        write = self._nvrx.FileSystemWriterAsync.write_preloaded_data
        arguments = (write, transforms, staged.parcel, str(folder / self.file), self.file)
        request = self._nvrx.AsyncRequest(_write_items, arguments, [], {})
        with self.calls.sending() as calls:
            calls.schedule_async_request(request)

    def finished(self) -> bool:
        """Whether it is written; NVRx has finalized the call then.

        Raises:
            SaveFailed: the worker died.
        """
        return self.calls.poll()

    def spans(self, folder: Path, specs: Sequence[TensorSpec]) -> dict[str, tuple[int, int]]:
        """Where each tensor's bytes lie in the file.

        Raises:
            CheckpointCorrupt: it is not what was to be written.
        """
        path = folder / self.file
        # Archives follow each other in the order in which the items were handed over.
        found = [torch_files.records(path, *archive) for archive in torch_files.archives(path)]
        if [len(storages) for storages in found] != [1] * len(specs):
            raise CheckpointCorrupt(
                f"{self.file} has {len(found)} archives with {sum(map(len, found))} storages for "
                f"{len(specs)} tensors",
                where=str(folder),
            )
        return {spec.name: storages[0] for spec, storages in zip(specs, found, strict=True)}

    def complete(
        self,
        folder: Path,
        version: Version,
        specs: Sequence[TensorSpec],
        spans: Mapping[str, tuple[int, int]],
    ) -> list[str]:
        """On rank 0, with the receipts of all others there: have NVRx's writer make ``.metadata``.

        Raises:
            CheckpointError: a receipt or a file is damaged.
        """
        parts = [_Part(0, self.file, tuple(specs), spans)]
        for rank in range(1, version.world):
            path = folder / layout.receipt_name(rank)
            receipt = manifest.decode_receipt(path.read_bytes(), str(path))
            parts.append(
                _Part(rank, file_name(rank), tuple(receipt.tensors.values()), receipt.spans)
            )
        metadata, results = describe(folder, parts)
        self._nvrx.FileSystemWriterAsync(folder).finish(metadata, results)
        return [METADATA]


def _write_items(
    write: Callable[..., object], transforms: list[Any], parcel: Parcel, path: str, key: str
) -> None:
    """In NVRx's worker: write the file by ``write``, NVRx's function for one file."""
    opened = parcel.open()
    # 0.4.1 opens files itself, later releases are told how.
    opener = (open,) if "open_file" in inspect.signature(write).parameters else ()
    items = [(_item(name, tensor), tensor) for name, tensor in opened.tensors.items()]
    results: queue.Queue[tuple[int, Any]] = queue.Queue()
    under_way: queue.Queue[int] = queue.Queue()
    under_way.put(0)
    write(transforms, *opener, 0, (path, key, ([], items)), results, under_way, True)
    _, outcome = results.get_nowait()
    if isinstance(outcome, BaseException):
        opened.put_error(outcome)


def _item(name: str, tensor: torch.Tensor) -> WriteItem:
    """Names a tensor in the worker; where it belongs is said by the metadata only."""
    spec = TensorSpec(
        name=name,
        dtype="",
        shape=tuple(tensor.shape),
        global_shape=tuple(tensor.shape),
        offsets=(0,) * tensor.dim(),
    )
    return _write_item(name, spec, tensor.dtype)


def _write_item(name: str, spec: TensorSpec, dtype: torch.dtype) -> WriteItem:
    offsets = torch.Size(spec.offsets)
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(spec.shape)),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(spec.global_shape),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank's file holds."""

    rank: int
    file: str
    specs: tuple[TensorSpec, ...]
    spans: Mapping[str, tuple[int, int]]


def describe(folder: Path, parts: Sequence[_Part]) -> tuple[Metadata, list[list[WriteResult]]]:
    """DCP's metadata of all ranks' files, and where each item lies.

    Raises:
        CheckpointCorrupt: a file is not what its receipt says.
    """
    shared = {spec.name for part in parts for spec in part.specs if spec.kind == "shard"}
    plans: list[SavePlan] = []
    results: list[list[WriteResult]] = []
    for part in parts:
        archives = torch_files.archives(folder / part.file)
        starts = [start for start, _ in archives]
        items, written = [], []
        for spec in part.specs:
            item = _write_item(_dcp_name(spec, part.rank, shared), spec, TORCH_DTYPES[spec.dtype])
            at = bisect.bisect_right(starts, part.spans[spec.name][0]) - 1
            if at < 0:
                raise CheckpointCorrupt(
                    f"{spec.name!r} lies in no archive", where=str(folder / part.file)
                )
            start, stop = archives[at]
            place = _StorageInfo(part.file, start, stop - start)
            items.append(item)
            written.append(WriteResult(item.index, stop - start, place))
        plans.append(SavePlan(items))
        results.append(written)
    return create_default_global_save_plan(plans)[1], results


def _dcp_name(spec: TensorSpec, rank: int, shared: set[str]) -> str:
    """DCP has one tensor of a name. What each rank has for itself has rank 0's plain name, which a
    restore at another world size takes, and a name of its own for the other ranks."""
    if spec.kind == "shard" or (rank == 0 and spec.name not in shared):
        return spec.name
    return f"$rank{rank}.{spec.name}"
