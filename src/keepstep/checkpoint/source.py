"""What a restore reads from: a checkpoint as tensors, the bytes that hold them, and plain values.

Used by ranks and the command line; needs no torch. ``ManifestSource`` is a checkpoint of keepstep;
folders of other libraries implement ``Source`` too. Nothing here reads the data of a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from keepstep.checkpoint import catalog, layout
from keepstep.checkpoint.manifest import Manifest, Span
from keepstep.checkpoint.shard_file import ShardHeader, TensorSpec, read_header
from keepstep.errors import CheckpointCorrupt, CheckpointError

__all__ = [
    "IMPORTED",
    "About",
    "ManifestSource",
    "Source",
    "Span",
    "StoredChunk",
    "StoredFile",
    "StoredTensor",
]


IMPORTED = "$imported"
"""Key of the values under which a checkpoint made from another library's says where that was. It
is not complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a source is.

    Attributes:
        where: Its folder, for messages.
        step: Completed steps; 0 where it does not say.
        run: Id of the run that saved it; None where it does not say, and any run may load it.
        world: Number of ranks that saved it; ranks below it have values of their own.
        complete: Whether it has the state of every object that was tracked. From one that has not
            (another library's folder) objects that it does not know keep what they have.
    """

    where: str
    step: int
    run: str | None
    world: int
    complete: bool = True


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A part of a tensor: ``shape`` elements at ``offsets`` of the whole, without gaps, row-major,
    little-endian, in ``file`` under the name ``key`` there (see ``Source.spans``)."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of ``shape`` elements; ``dtype`` as in ``shard_file.ITEM_BYTES``.

    The chunks do not overlap and leave no hole.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file with data.

    Attributes:
        path: Where it is.
        size: Bytes that it must have.
        checksum: xxh3-128 of its bytes as 32 hex digits where ``block_bytes`` is 0; empty: it has
            none, and what is read is not verified.
        block_bytes: Size of the blocks that have digests; 0: there are none.
        blocks: xxh3-128 of each block from the start of the file, 32 hex digits each, concatenated;
            the last block may be short.
        head: The first so many bytes say where the tensors lie: they are verified with the data.
    """

    path: Path
    size: int
    checksum: str = ""
    block_bytes: int = 0
    blocks: str = ""
    head: int = 0


class Source(Protocol):
    """A checkpoint to restore from. Methods are called in the order in which they stand here.

    All may raise ``CheckpointCorrupt`` (an older checkpoint may do), other ``CheckpointError`` (it
    cannot be used at all) and ``OSError``. They may keep what they found.
    """

    @property
    def about(self) -> About:
        """What it is."""

    def values(self, rank: int) -> Mapping[str, object]:
        """The plain state for ``rank`` by name of the tracked object, as ``torch_state.flatten``
        gives it. A rank that the checkpoint does not have gets rank 0's."""

    def tensors(self, rank: int) -> Mapping[str, StoredTensor]:
        """The tensors for ``rank`` by name: those of all, and the rank's own as for ``values``."""

    def file(self, name: str) -> tuple[StoredFile, Mapping[str, Span]]:
        """A file that will be read, and where in it each key lies. Called once for each file that
        the rank needs; only here the file itself may be opened."""


class ManifestSource:
    """Implements ``Source`` for a checkpoint of keepstep, of any layout and format.

    Args:
        root: Folder of the checkpoints. folder: Name of the checkpoint in it.

    Raises:
        CheckpointCorrupt: it is not committed, a file is missing or has another size, or the
            manifest is damaged.
        CheckpointError: it was written by a newer keepstep.
        OSError: storage failed.
    """

    def __init__(self, root: Path, folder: str) -> None:
        self._folder = layout.inside(root, folder)
        self._manifest: Manifest = catalog.load(root, folder)
        self._names = self._manifest.files_by_rank()

    @property
    def about(self) -> About:
        version = self._manifest.version
        return About(
            where=str(self._folder),
            step=version.step,
            run=version.run,
            world=version.world,
            complete=IMPORTED not in self._manifest.values,
        )

    def values(self, rank: int) -> Mapping[str, object]:
        return self._manifest.values_of(self._own(rank))

    def tensors(self, rank: int) -> Mapping[str, StoredTensor]:
        own, result = self._own(rank), {}
        for name, info in self._manifest.tensors.items():
            chunks = tuple(
                StoredChunk(chunk.offsets, chunk.shape, self._names[chunk.rank], chunk.key or name)
                for chunk in info.chunks
            )
            result[name] = StoredTensor(info.dtype, info.global_shape, chunks)
        for name, owners in self._manifest.rank_tensors.items():
            for one in owners:
                if one.rank == own:
                    origin = (0,) * len(one.shape)
                    chunk = StoredChunk(origin, one.shape, self._names[own], name)
                    result[name] = StoredTensor(one.dtype, one.shape, (chunk,))
        return result

    def file(self, name: str) -> tuple[StoredFile, Mapping[str, Span]]:
        info = self._manifest.files[name]
        path = layout.inside(self._folder, name)
        if self._manifest.layout != "safetensors":
            # Nothing in the file is decoded: the manifest, checked as a whole, says it all.
            found = StoredFile(path=path, size=info.size, checksum=info.checksum)
            return found, self._manifest.spans.get(info.rank, {})
        try:
            header = read_header(path)
        except CheckpointError as error:
            # Its manifest is one that we can read, so whatever is wrong with it is damage.
            raise CheckpointCorrupt(
                error.what,
                where=error.where,
                done="nothing was restored from it",
                advice="use an older checkpoint; check the storage",
            ) from error
        self._compare(header, info.rank, path)
        found = StoredFile(
            path=path,
            size=info.size,
            checksum=info.checksum,
            block_bytes=info.block_bytes,
            blocks=info.blocks,
            head=header.data_start,
        )
        return found, header.spans

    def _own(self, rank: int) -> int:
        return rank if rank < self._manifest.version.world else 0

    @functools.cached_property
    def _forms(self) -> dict[int, dict[str, tuple[str, tuple[int, ...]]]]:
        """Type and shape of each entry of each rank's file, as the manifest has them."""
        forms: dict[int, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for name, info in self._manifest.tensors.items():
            for chunk in info.chunks:
                forms.setdefault(chunk.rank, {})[chunk.key or name] = (info.dtype, chunk.shape)
        for name, owners in self._manifest.rank_tensors.items():
            for one in owners:
                forms.setdefault(one.rank, {})[name] = (one.dtype, one.shape)
        return forms

    def _compare(self, header: ShardHeader, rank: int, path: Path) -> None:
        """The header must say what the manifest says of this rank's tensors."""
        for name, told in self._forms.get(rank, {}).items():
            found = header.tensors.get(name)
            if found is None or _form(found) != told:
                raise CheckpointCorrupt(
                    f"the manifest has {name} as {told}, its file as "
                    f"{_form(found) if found else 'missing'}",
                    where=str(path),
                    done="nothing was restored from it",
                    advice="use an older checkpoint",
                )


def _form(spec: TensorSpec) -> tuple[str, tuple[int, ...]]:
    return spec.dtype, spec.shape
