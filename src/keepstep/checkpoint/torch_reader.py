"""Loads a checkpoint into tracked objects, at any world size and mesh.

Runs in the ranks, without collectives: torch's own planner works out which parts of which stored
chunks each local tensor needs. Names, shapes and what files say of themselves are checked before
anything changes. Files with checksums of their blocks are then verified while they are read; files
without are verified as a whole before that.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from keepstep.checkpoint import torch_state, verify
from keepstep.checkpoint.block_reader import THREADS, BlockReader, plain_buffer
from keepstep.checkpoint.source import ManifestSource, Source, Span, StoredChunk, StoredFile
from keepstep.checkpoint.torch_flat import FlatPart
from keepstep.checkpoint.torch_nested import Spec
from keepstep.checkpoint.torch_parts import ModulePart
from keepstep.checkpoint.torch_pieces import BlockPiece, BytePiece, Region, piece
from keepstep.checkpoint.torch_source import announce, open_source
from keepstep.checkpoint.torch_state import TORCH_DTYPES, Destination
from keepstep.errors import CheckpointCorrupt, CheckpointMismatch


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What was loaded: ``bytes`` copied into this rank's tensors, and the checkpoint's ``step``."""

    bytes: int
    step: int


class PreparedLoad:
    """A checkpoint that fits: ``read`` fills the tensors, ``apply`` hands over the rest.

    Attributes:
        step: Its step.
        left_out: What is on one side only, by names, where that was allowed; empty if nothing is.
    """

    def __init__(
        self, destination: Destination, reader: SourceReader, step: int, left_out: str
    ) -> None:
        self._destination = destination
        self._reader = reader
        self.step = step
        self.left_out = left_out

    def read(self) -> int:
        """Fill the tensors in place; returns the bytes copied into them.

        Raises:
            CheckpointCorrupt: bytes differ from what was committed; tensors may be filled in part.
            OSError: a file cannot be read; the same.
        """
        return self._reader.read()

    def apply(self) -> LoadReport:
        """Hand over what is no tensor, after ``read`` on every rank.

        Raises:
            CheckpointMismatch: an object does not take its stored state.
        """
        with torch.no_grad():
            self._destination.apply()
        return LoadReport(self._reader.bytes, self.step)


class SourceReader(StorageReader):
    """torch's view of a source: its metadata, and its data by our own reads.

    Args:
        source: What is read. rank: For whom. alone: Whether no other process reads it.
    """

    def __init__(self, source: Source, rank: int, *, alone: bool) -> None:
        self._source, self._rank, self._alone = source, rank, alone
        self._chunks: dict[tuple[str, tuple[int, ...]], StoredChunk] = {}
        self._metadata: dict[str, TensorStorageMetadata] = {}
        self._files: dict[str, tuple[StoredFile, Mapping[str, Span]]] = {}
        self._planned: tuple[LoadPlan, LoadPlanner]
        self._own: set[str] = set()
        """Tensors of which no other rank holds these elements."""
        self._devices: set[torch.device] = set()
        self.specs: dict[str, Spec] = {}
        self.bytes = 0
        for name, tensor in source.tensors(rank).items():
            dtype = _dtype(name, tensor.dtype)
            self.specs[name] = Spec(dtype, tensor.shape)
            self._metadata[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype),
                size=torch.Size(tensor.shape),
                chunks=[
                    ChunkStorageMetadata(
                        offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.shape)
                    )
                    for chunk in tensor.chunks
                ],
            )
            for chunk in tensor.chunks:
                self._chunks[name, chunk.offsets] = chunk

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check whatever can be checked before ``tensors`` are filled.

        Raises:
            CheckpointCorrupt: a file is not what was committed, or not what its manifest says.
        """
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), self.read_metadata(), True)
        plan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
        self._planned = (plan, planner)
        wanted: dict[str, dict[str, int]] = {}
        for item in plan.items:
            index = item.storage_index
            chunk = self._chunk(index)
            dtype = self.specs[index.fqn].dtype
            nbytes = math.prod(chunk.shape) * dtype.itemsize
            wanted.setdefault(chunk.file, {})[chunk.key] = nbytes
        whole: list[StoredFile] = []
        for name in sorted(wanted):
            info, spans = self._files[name] = self._source.file(name)
            _check_spans(info, spans, wanted[name])
            if not info.block_bytes:
                whole.append(info)
        _verify_whole(whole)
        self._own = {name for name, tensor in tensors.items() if _is_own(tensor)}
        self._devices = {
            tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"
        }

    def read(self) -> int:
        """Fill the tensors that were checked; returns the bytes copied into them.

        torch's ``load`` would do the same, but turns every exception, that of a restart too, into
        one of its own.

        Raises:
            CheckpointCorrupt: bytes differ from what was committed; tensors may be filled in part.
            OSError: a file cannot be read; the same.
        """
        self.reset()
        with warnings.catch_warnings(), torch.no_grad():
            # Nothing writes to the read-only maps.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self.read_data(*self._planned)
        return self.bytes

    def _chunk(self, index: MetadataIndex) -> StoredChunk:
        return self._chunks[index.fqn, tuple(index.offset or ())]

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """The stored tensors in torch's terms."""
        return Metadata(state_dict_metadata=dict(self._metadata))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what ``plan`` wants from the files that ``check`` has passed."""
        targets = [planner.resolve_tensor(item).detach() for item in plan.items]
        by_file: dict[str, list[tuple[ReadItem, torch.Tensor]]] = {}
        for item, target in zip(plan.items, targets, strict=True):
            if target.numel():
                file = self._chunk(item.storage_index).file
                by_file.setdefault(file, []).append((item, target))
        buffers, emptied = _bounce(self._devices) if self._devices else (plain_buffer, _nothing)
        reader = BlockReader(alone=self._alone, place=self._rank, buffers=buffers, emptied=emptied)
        pieces: list[BytePiece | BlockPiece] = []
        for name, wanted in by_file.items():
            info = self._files[name][0]
            if info.block_bytes:
                found = [self._piece(item, target) for item, target in wanted]
                reader.add(info, found)
                pieces += found
            else:
                self._copy_mapped(info, wanted)
        reader.run()
        for one in pieces:
            one.finish()
        for item, target in zip(plan.items, targets, strict=True):
            planner.commit_tensor(item, target)
            self.bytes += target.numel() * target.element_size()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _piece(self, item: ReadItem, target: torch.Tensor) -> BytePiece | BlockPiece:
        chunk = self._chunk(item.storage_index)
        name = item.storage_index.fqn
        region = Region(
            begin=self._files[chunk.file][1][chunk.key][0],
            dtype=self.specs[name].dtype,
            shape=chunk.shape,
            offsets=tuple(item.storage_offsets),
            lengths=tuple(item.lengths),
        )
        return piece(region, target, shared=not (self._alone or name in self._own))

    def _copy_mapped(
        self, info: StoredFile, wanted: Sequence[tuple[ReadItem, torch.Tensor]]
    ) -> None:
        """Copy from a file that was verified as a whole, or that has no checksums."""
        with (
            info.path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        ):
            for item, target in wanted:
                stored = self._view(mapped, item.storage_index)
                for dim, (start, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    stored = stored.narrow(dim, start, length)
                target.copy_(stored)
                del stored  # else the map cannot be closed

    def _view(self, file: mmap.mmap, index: MetadataIndex) -> torch.Tensor:
        chunk = self._chunk(index)
        start, stop = self._files[chunk.file][1][chunk.key]
        dtype = self.specs[index.fqn].dtype
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
        """A reader is made from a source, never found by a path."""
        return False


def load(
    tracked: Mapping[str, object],
    root: Path,
    folder: str,
    *,
    rank: int,
    world: int,
    run: str | None = None,
    strict: bool = True,
) -> LoadReport:
    """Fill ``tracked`` from the committed checkpoint ``folder`` under ``root``.

    Tensors are filled in place. Values of single ranks come from this rank's own if the checkpoint
    has such a rank, else from rank 0's.

    Args:
        tracked: The objects, under the names under which they were saved.
        root: Folder of the checkpoints. folder: Name of the checkpoint in it, or the absolute path
            of one that lies elsewhere.
        rank: This rank. world: Number of ranks now.
        run: Run that the checkpoint must be of; None: any.
        strict: Whether objects and tensors of modules that only one side has are an error; else
            they keep what they have, or are not read.

    Raises:
        CheckpointCorrupt: it is not committed, or bytes differ from what was; in files that have
            checksums of their blocks that may be found when tensors are filled in part.
        CheckpointMismatch: another run's or another model's; nothing was changed.
    """
    prepared = prepare(tracked, root, folder, rank=rank, world=world, run=run, strict=strict)
    prepared.read()
    return prepared.apply()


def prepare(
    tracked: Mapping[str, object],
    root: Path,
    folder: str,
    *,
    rank: int,
    world: int,
    run: str | None = None,
    strict: bool = True,
) -> PreparedLoad:
    """Check all that can be checked without reading tensors, and change nothing.

    Arguments and errors as ``load``.
    """
    # A folder of another run is named by its path, whatever it is of.
    outside = Path(folder).is_absolute()
    source = open_source(Path(folder), tracked) if outside else ManifestSource(root, folder)
    announce(source, rank)
    return prepare_source(tracked, source, rank=rank, world=world, run=run, strict=strict)


def prepare_source(
    tracked: Mapping[str, object],
    source: Source,
    *,
    rank: int,
    world: int,
    run: str | None = None,
    strict: bool = True,
) -> PreparedLoad:
    """As ``prepare``, from any source."""
    about = source.about
    if run is not None and about.run is not None and about.run != run:
        raise CheckpointMismatch(
            f"the checkpoint is of run {about.run!r}, this is run {run!r}",
            where=about.where,
            done="nothing was restored",
            advice="give the run its own folder, or restore with the id of the run that saved it",
        )
    reader = SourceReader(source, rank, alone=world == 1)
    values = dict(source.values(rank))
    if not about.complete:
        values |= _kept_values(tracked, values, reader.specs, world)
    objects: tuple[list[str], list[str]] = ([], [])
    if not (strict and about.complete):
        objects = _on_one_side(tracked, values)
        tracked = {name: one for name, one in tracked.items() if name in values}
        values = {
            name: one
            for name, one in values.items()
            if name in tracked or name == torch_state.NAMES_KEY
        }
    destination = torch_state.prepare_for_load(tracked, values, reader.specs, world=world)
    left = tuple(f"{name}." for name in objects[1])
    specs = {name: spec for name, spec in reader.specs.items() if not f"{name}.".startswith(left)}
    tensors = _check_fit(destination, specs, values, about.where, strict=strict)
    stored = {name: tensor for name, tensor in destination.tensors.items() if name in reader.specs}
    reader.check(stored)
    left_out = torch_state.listed(
        "missing", *(a + b for a, b in zip(objects, tensors, strict=True))
    )
    return PreparedLoad(destination, reader, about.step, left_out)


def _kept_values(
    tracked: Mapping[str, object],
    values: Mapping[str, object],
    specs: Mapping[str, Spec],
    world: int,
) -> dict[str, object]:
    """The present plain state of objects of which a source has tensors and nothing else."""
    return {
        name: part.value()
        for name, part in torch_state.parts_of(tracked, world).items()
        if name not in values
        and any(stored == name or stored.startswith(f"{name}.") for stored in specs)
    }


def _on_one_side(
    tracked: Mapping[str, object], values: Mapping[str, object]
) -> tuple[list[str], list[str]]:
    """Names of the objects that are only tracked, and of those that are only stored."""
    either = {name for name in tracked.keys() ^ values.keys() if not name.startswith("$")}
    return sorted(either - values.keys()), sorted(either - tracked.keys())


def _check_fit(
    destination: Destination,
    specs: Mapping[str, Spec],
    values: Mapping[str, object],
    where: str,
    *,
    strict: bool,
) -> tuple[list[str], list[str]]:
    """Tensors that are only here, and those that are only stored, where that is allowed.

    Raises:
        CheckpointMismatch: a shape or type differs, or something is on one side only.
    """
    live = destination.tensors
    missing = sorted(name for name in live if name not in specs)
    unexpected = sorted(name for name in specs if name not in live)
    if torch_state.digest(live) == values.get(torch_state.NAMES_KEY):
        # The rank that saved had exactly these tensors: the others belong to ranks with other parts
        # of the model (pipeline stages).
        unexpected = []
    allowed: tuple[list[str], list[str]] = ([], [])
    if not strict:
        # What a module lacks keeps its value. Half the state of anything else would be no state.
        modules = tuple(
            f"{name}." for name, part in destination.parts.items() if isinstance(part, ModulePart)
        )
        allowed = [name for name in missing if name.startswith(modules)], unexpected
        missing, unexpected = sorted(set(missing) - set(allowed[0])), []
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
    return allowed


def _is_own(tensor: torch.Tensor) -> bool:
    """Whether no other rank holds the elements of ``tensor`` that this one holds."""
    if isinstance(tensor, DTensor):
        return all(
            placement.is_shard() or tensor.device_mesh.size(dim) == 1
            for dim, placement in enumerate(tensor.placements)
        )
    return isinstance(tensor, FlatPart) and tensor.local.numel() < tensor.shape.numel()


def _bounce(
    devices: Collection[torch.device],
) -> tuple[Callable[[int], memoryview], Callable[[], None]]:
    """Buffers from which a GPU copies by itself, and what waits until it has."""
    kept: list[torch.Tensor] = []

    def buffer(size: int) -> memoryview:
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        kept.append(pinned)
        array = (ctypes.c_char * size).from_address(pinned.data_ptr())
        return memoryview(array).cast("B")

    def emptied() -> None:
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    return buffer, emptied


def _nothing() -> None:
    return None


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


def _check_spans(info: StoredFile, spans: Mapping[str, Span], wanted: Mapping[str, int]) -> None:
    """The bytes of each wanted key must be there, as many as its elements need."""
    for key, nbytes in wanted.items():
        start, stop = spans.get(key, (0, 0))
        if key not in spans or not 0 <= start <= stop <= info.size or stop - start != nbytes:
            raise CheckpointCorrupt(
                f"{key} has {nbytes} bytes and should lie at {start} to {stop} of {info.size}",
                where=str(info.path),
                done="nothing was restored from it",
                advice="use an older checkpoint",
            )


def _verify_whole(files: Sequence[StoredFile]) -> None:
    """Compare files that have no checksums of blocks with their own, several at once."""
    with ThreadPoolExecutor(max(1, min(THREADS, len(files)))) as pool:
        for _ in pool.map(_verify_file, files):
            pass


def _verify_file(info: StoredFile) -> None:
    expected = f"{info.size} bytes"
    try:
        found = f"{info.path.stat().st_size} bytes"
        if info.checksum:
            expected += f" with {info.checksum}"
            found += f" with {verify.file_checksum(info.path)}"
    except FileNotFoundError:
        found = "no file"
    if found != expected:
        raise CheckpointCorrupt(
            f"a file differs from what was committed: expected {expected}, found {found}",
            where=str(info.path),
            done="nothing was restored from it",
            advice="use an older checkpoint; check the storage",
        )
