"""Loads a checkpoint into tracked objects, at any world size and mesh.

Runs in the ranks, without collectives: torch's own planner works out which parts of which stored
chunks each local tensor needs. Everything is checked first (run, names, shapes, the checksum of
each file that will be read); only then is the first byte copied.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from keepstep.checkpoint import catalog, layout, torch_state, verify
from keepstep.checkpoint.manifest import FileInfo, Manifest
from keepstep.checkpoint.shard_file import TensorSpec, read_header
from keepstep.checkpoint.torch_nested import Spec
from keepstep.checkpoint.torch_state import DTYPES, TORCH_DTYPES, Destination
from keepstep.errors import CheckpointCorrupt, CheckpointMismatch


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded: ``bytes`` copied into this rank's tensors, and the checkpoint's ``step``."""

    bytes: int
    step: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Where a chunk lies: in the file of ``rank``, ``shape`` elements."""

    rank: int
    shape: tuple[int, ...]


class PreparedLoad:
    """A checkpoint that fits and whose files are verified; ``apply`` loads it."""

    def __init__(self, destination: Destination, reader: ManifestReader, step: int) -> None:
        self._destination = destination
        self._reader = reader
        self._step = step

    def apply(self) -> LoadReport:
        """Copy everything into place.

        Raises:
            CheckpointMismatch: an object does not take its stored state.
        """
        tensors: dict[str, Any] = {
            name: tensor
            for name, tensor in self._destination.tensors.items()
            if name in self._reader.specs
        }
        with warnings.catch_warnings(), torch.no_grad():
            # Loading without collectives is meant, and nothing writes to the read-only maps.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            torch_load(
                tensors,
                storage_reader=self._reader,
                planner=_planner(),
                no_dist=True,
            )
            self._destination.apply()
        return LoadReport(self._reader.bytes, self._step)


class ManifestReader(StorageReader):
    """torch's view of a checkpoint: its metadata from the manifest, its data from our files.

    Args:
        folder: The checkpoint's folder.
        content: Its manifest.
        source: The rank whose own tensors are read.
    """

    def __init__(self, folder: Path, content: Manifest, source: int) -> None:
        self._folder, self._manifest = folder, content
        self._files = content.files_by_rank()
        self._spans: dict[int, Mapping[str, tuple[int, int]]] = {}  # of verified files only
        self._chunks: dict[tuple[str, tuple[int, ...]], _Chunk] = {}
        self._metadata: dict[str, TensorStorageMetadata] = {}
        self.specs: dict[str, Spec] = {}
        self.bytes = 0
        for name, info in content.tensors.items():
            chunks = {chunk.offsets: _Chunk(chunk.rank, chunk.shape) for chunk in info.chunks}
            self._add(name, Spec(_dtype(name, info.dtype), info.global_shape), chunks)
        for name, owners in content.rank_tensors.items():
            for one in owners:
                if one.rank == source:
                    chunk = {(0,) * len(one.shape): _Chunk(one.rank, one.shape)}
                    self._add(name, Spec(_dtype(name, one.dtype), one.shape), chunk)

    def _add(self, name: str, spec: Spec, chunks: Mapping[tuple[int, ...], _Chunk]) -> None:
        self.specs[name] = spec
        self._metadata[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=spec.dtype),
            size=torch.Size(spec.shape),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(chunk.shape))
                for offsets, chunk in chunks.items()
            ],
        )
        for offsets, chunk in chunks.items():
            self._chunks[name, offsets] = chunk

    def verify(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check every file that is needed to fill ``tensors`` against its checksum.

        Raises:
            CheckpointCorrupt: one is not what was committed, or not what the manifest says.
        """
        planner = _planner()
        planner.set_up_planner(dict(tensors), self.read_metadata(), False)
        items = planner.create_local_plan().items
        wanted: dict[int, dict[str, _Chunk]] = {}
        for item in items:
            chunk = self._chunk(item.storage_index)
            wanted.setdefault(chunk.rank, {})[item.storage_index.fqn] = chunk
        for rank in sorted(wanted):
            info = self._manifest.files[self._files[rank]]
            path = layout.inside(self._folder, self._files[rank])
            _verify_file(path, info)
            if self._manifest.layout == "safetensors":
                header = read_header(path)
                for name, chunk in wanted[rank].items():
                    self._compare(name, chunk, header.tensors.get(name))
                self._spans[rank] = header.spans
            else:
                # Nothing in the file is decoded: the manifest, checked as a whole, says it all.
                self._spans[rank] = self._manifest.spans[rank]

    def _compare(self, name: str, chunk: _Chunk, found: TensorSpec | None) -> None:
        expected = (DTYPES[self.specs[name].dtype], chunk.shape)
        if found is None or (found.dtype, found.shape) != expected:
            raise CheckpointCorrupt(
                f"the manifest has {name} as {expected}, its file as "
                f"{(found.dtype, found.shape) if found else 'missing'}",
                where=str(self._folder / self._files[chunk.rank]),
                done="nothing was restored from it",
                advice="use an older checkpoint",
            )

    def _chunk(self, index: MetadataIndex) -> _Chunk:
        return self._chunks[index.fqn, tuple(index.offset or ())]

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """The stored tensors in torch's terms."""
        return Metadata(state_dict_metadata=dict(self._metadata))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what ``plan`` wants from the files that ``verify`` has passed."""
        maps: dict[int, mmap.mmap] = {}
        try:
            for item in plan.items:
                chunk = self._chunk(item.storage_index)
                if chunk.rank not in maps:
                    maps[chunk.rank] = self._map(chunk.rank)
                stored = self._view(maps[chunk.rank], item.storage_index.fqn, chunk)
                target = planner.resolve_tensor(item).detach()
                for dim, (start, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    stored = stored.narrow(dim, start, length)
                target.copy_(stored)
                planner.commit_tensor(item, target)
                self.bytes += target.numel() * target.element_size()
                del stored
        finally:
            for opened in maps.values():
                opened.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _map(self, rank: int) -> mmap.mmap:
        with layout.inside(self._folder, self._files[rank]).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _view(self, file: mmap.mmap, name: str, chunk: _Chunk) -> torch.Tensor:
        start, stop = self._spans[chunk.rank][name]
        dtype = self.specs[name].dtype
        raw = torch.frombuffer(file, dtype=torch.uint8, count=stop - start, offset=start)
        if start % dtype.itemsize:
            raw = raw.clone()  # another library's file need not align its tensors
        return raw.view(dtype).view(chunk.shape)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads but the count of bytes."""
        self.bytes = 0

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The planner's own."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The planner's own."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """A reader is made from a manifest, never found by a path."""
        return False


def load(
    tracked: Mapping[str, object],
    root: Path,
    folder: str,
    *,
    rank: int,
    world: int,
    run: str | None = None,
) -> LoadReport:
    """Fill ``tracked`` from the committed checkpoint ``folder`` under ``root``.

    Tensors are filled in place. Values of single ranks come from this rank's own if the checkpoint
    has such a rank, else from rank 0's.

    Args:
        tracked: The objects, under the names under which they were saved.
        root: Folder of the checkpoints. folder: Name of the checkpoint in it.
        rank: This rank. world: Number of ranks now.
        run: Run that the checkpoint must be of; None: any.

    Raises:
        CheckpointCorrupt: it is not committed, or bytes differ from what was; nothing was changed.
        CheckpointMismatch: another run's or another model's; nothing was changed.
    """
    return prepare(tracked, root, folder, rank=rank, world=world, run=run).apply()


def prepare(
    tracked: Mapping[str, object],
    root: Path,
    folder: str,
    *,
    rank: int,
    world: int,
    run: str | None = None,
) -> PreparedLoad:
    """Check all that ``load`` checks and change nothing. Arguments and errors as ``load``."""
    place = layout.inside(root, folder)
    content = catalog.load(root, folder)
    version = content.version
    if run is not None and version.run != run:
        raise CheckpointMismatch(
            f"the checkpoint is of run {version.run!r}, this is run {run!r}",
            where=str(place),
            done="nothing was restored",
            advice="give the run its own folder, or restore with the id of the run that saved it",
        )
    source = rank if rank < version.world else 0
    reader = ManifestReader(place, content, source)
    values = content.values_of(source)
    destination = torch_state.prepare_for_load(tracked, values, reader.specs, world=world)
    _check_fit(destination, reader.specs, values.get(torch_state.NAMES_KEY), str(place))
    stored = {name: tensor for name, tensor in destination.tensors.items() if name in reader.specs}
    reader.verify(stored)
    return PreparedLoad(destination, reader, version.step)


def _planner() -> DefaultLoadPlanner:
    return DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _check_fit(
    destination: Destination, specs: Mapping[str, Spec], stored_names: object, where: str
) -> None:
    live = destination.tensors
    missing = sorted(name for name in live if name not in specs)
    unexpected = sorted(name for name in specs if name not in live)
    if torch_state.digest(live) == stored_names:
        # The rank that saved had exactly these tensors: the others belong to ranks with other parts
        # of the model (pipeline stages).
        unexpected = []
    other = [
        f"{name}: {_described(specs[name].dtype, specs[name].shape)} in the checkpoint, "
        f"{_described(tensor.dtype, tuple(tensor.shape))} here"
        for name, tensor in sorted(live.items())
        if name in specs and not specs[name].fits(tensor)
    ]
    problems = [torch_state.listed("missing", missing, unexpected)]
    if other:
        more = "; ..." if len(other) > 10 else ""
        problems.append(f"{len(other)} of another shape or type ({'; '.join(other[:10])}{more})")
    problems = [problem for problem in problems if problem]
    if problems:
        raise CheckpointMismatch(
            f"the checkpoint is of another model: {', '.join(problems)}",
            where=where,
            done="nothing was restored",
            advice="restore into the model and optimizer that were saved",
        )


def _described(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _dtype(name: str, stored: str) -> torch.dtype:
    if stored not in TORCH_DTYPES:
        raise CheckpointMismatch(
            f"{name} has the type {stored}, which this keepstep cannot load",
            done="nothing was restored",
            advice="install the keepstep release that wrote it",
        )
    return TORCH_DTYPES[stored]


def _verify_file(path: Path, info: FileInfo) -> None:
    try:
        checksum = verify.file_checksum(path, info.block_bytes)
        found = f"{path.stat().st_size} bytes with {checksum}"
    except FileNotFoundError:
        found = "no file"
    expected = f"{info.size} bytes with {info.checksum}"
    if found != expected:
        raise CheckpointCorrupt(
            f"a file differs from what was committed: expected {expected}, found {found}",
            where=str(path),
            done="nothing was restored from it",
            advice="use an older checkpoint; check the storage",
        )
