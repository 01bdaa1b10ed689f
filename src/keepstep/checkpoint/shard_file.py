"""The form of a shard file: one rank's part of a checkpoint as a valid safetensors file.

Used by ranks (which stage this image in shared memory), by the writer and by readers. Layout::

    8 bytes     length of the header, little-endian
    header      JSON, padded with spaces so that the data starts at a multiple of 4096
    data        tensors without gaps, larger elements first, so that each one is aligned

The header is safetensors' own, with one entry ``keepstep`` in ``__metadata__``: a JSON text with
the version, the rank, where each tensor lies in its global tensor, and the rank's non-tensor state.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from keepstep.checkpoint import typed_json
from keepstep.errors import CheckpointCorrupt, CheckpointError
from keepstep.wire.types import Version

FORMAT = 2
"""The newest format that is read. It is written only where a tensor has several parts in the file,
which a reader of format 1 would take for tensors of their own."""
ALIGNMENT = 4096
MAX_HEADER = 100_000_000
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes of one element, by safetensors' name of the dtype."""

Kind = Literal["shard", "rank"]
Length = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Shape = Annotated[tuple[Length, ...], msgspec.Meta(max_length=64)]
"""Sizes or places by dimension; torch has no tensors of more than 64."""
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_OURS = "keepstep"


def _shard() -> Kind:
    return "shard"


class TensorSpec(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One entry of a shard: ``shape`` is the local one, in elements.

    ``kind`` shard: the chunk at ``offsets`` of a tensor of ``global_shape``. ``kind`` rank: a value
    of this rank only. ``of`` is the tensor that the entry is a chunk of; empty: it has the entry's
    own name. A tensor with several chunks in one file has an entry for each.
    """

    name: str
    dtype: str
    shape: Shape
    global_shape: Shape
    offsets: Shape
    # A factory, so that it is written also where it is the default: format 1 has it always.
    kind: Kind = msgspec.field(default_factory=_shard)
    of: str = ""

    @property
    def tensor(self) -> str:
        """Name of the tensor that this is a chunk of."""
        return self.of or self.name

    @property
    def nbytes(self) -> int:
        """Bytes of the local tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def problem(self) -> str:
        """Why this cannot be a tensor of a shard; empty if it can."""
        if self.dtype not in ITEM_BYTES:
            return f"its dtype {self.dtype!r} is not known"
        if not len(self.shape) == len(self.global_shape) == len(self.offsets):
            return (
                f"local shape {self.shape}, global shape {self.global_shape} and offsets "
                f"{self.offsets} have different numbers of dimensions"
            )
        for size, whole, offset in zip(self.shape, self.global_shape, self.offsets, strict=True):
            if min(size, whole, offset) < 0 or offset + size > whole:
                return (
                    f"local shape {self.shape} at offsets {self.offsets} is not inside global "
                    f"shape {self.global_shape}"
                )
        if self.of and (self.of == self.name or self.kind != "shard"):
            return f"it cannot be a chunk of {self.of!r}"
        return ""


class _Place(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    global_shape: Shape
    offsets: Shape
    kind: Kind
    of: str = ""


class _Ours(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int
    version: Version
    rank: Length
    tensors: dict[str, _Place]
    values: dict[str, Any]


class _OursAsText(msgspec.Struct, frozen=True, kw_only=True):
    """``_Ours`` with what is the same in each save as text."""

    format: int
    version: Version
    rank: int
    tensors: msgspec.Raw
    values: Mapping[str, Any]


class _Format(msgspec.Struct, frozen=True):
    format: int


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dtype: str
    shape: Shape
    data_offsets: tuple[Length, Length]


class ShardHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a shard file's header says, checked.

    ``spans`` are the first byte and the byte after the last of each tensor, counted from the start
    of the file. ``values`` is typed JSON, by top-level key.
    """

    version: Version
    rank: int
    tensors: dict[str, TensorSpec]
    spans: dict[str, tuple[int, int]]
    values: dict[str, Any]
    data_start: int
    size: int

    def decode_values(self) -> dict[str, Any]:
        """The rank's non-tensor state. Raises as ``typed_json.decode``."""
        return {key: typed_json.decode(node, key) for key, node in self.values.items()}


class ShardTensors:
    """The tensors of a shard in file order, and what the header says of them.

    A rank saves the same tensors again and again: this much of the plan can be used again.

    Args:
        specs: The tensors, in any order.

    Attributes:
        specs: The tensors in file order.
        starts: First byte of each tensor, counted from the start of the data.
        nbytes: Bytes of the data.

    Raises:
        CheckpointError: a tensor cannot be kept; the message names it.
    """

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs = _in_file_order(specs)
        self.starts: dict[str, int] = {}
        stored: dict[str, _Stored] = {}
        places: dict[str, _Place] = {}
        at = 0
        for spec in self.specs:
            end = at + spec.nbytes
            self.starts[spec.name] = at
            stored[spec.name] = _Stored(dtype=spec.dtype, shape=spec.shape, data_offsets=(at, end))
            places[spec.name] = _Place(
                global_shape=spec.global_shape, offsets=spec.offsets, kind=spec.kind, of=spec.of
            )
            at = end
        self.nbytes = at
        self._format = FORMAT if any(spec.of for spec in self.specs) else 1
        self._stored = msgspec.json.encode(stored)
        self._places = msgspec.Raw(msgspec.json.encode(places))

    def header(self, version: Version, rank: int, values: Mapping[str, Any]) -> bytes:
        """The first bytes of the file, up to the data, with ``values`` (encoded).

        Raises:
            CheckpointError: it would be too long.
        """
        ours = _OursAsText(
            format=self._format, version=version, rank=rank, tensors=self._places, values=values
        )
        text = msgspec.json.encode({_METADATA: {_OURS: msgspec.json.encode(ours).decode()}})
        if self.specs:
            text = text[:-1] + b"," + self._stored[1:]
        padded = -(-(_LENGTH.size + len(text)) // ALIGNMENT) * ALIGNMENT - _LENGTH.size
        if padded > MAX_HEADER:
            raise CheckpointError(
                f"the header of a shard would be {padded} bytes, over the limit of {MAX_HEADER}",
                where=f"rank {rank}, step {version.step}",
                done="the state was not saved",
                advice="keep large non-tensor state as tensors",
            )
        return _LENGTH.pack(padded) + text.ljust(padded, b" ")


class ShardPlan:
    """Where everything of one shard goes in its file image.

    Args:
        tensors: The tensors, in any order, or as they were planned for an earlier save.
        version: The state that the shard belongs to.
        rank: Whose shard it is.
        values: Non-tensor state by name; see ``typed_json.encode`` for what it may hold.
        encoded: Whether ``values`` were encoded before.

    Attributes:
        header: The image's first bytes, up to the data.
        tensors: The tensors in file order, for the plan of a later save.
        size: Bytes of the whole image.

    Raises:
        CheckpointError: a tensor or a value cannot be kept; the message names it.
    """

    def __init__(
        self,
        tensors: Iterable[TensorSpec] | ShardTensors,
        version: Version,
        rank: int,
        values: Mapping[str, object],
        *,
        encoded: bool = False,
    ) -> None:
        self.tensors = tensors if isinstance(tensors, ShardTensors) else ShardTensors(tensors)
        self.version = version
        self.rank = rank
        if not encoded:
            values = {key: typed_json.encode(value, key) for key, value in values.items()}
        self.header = self.tensors.header(version, rank, values)
        self.size = len(self.header) + self.tensors.nbytes

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors in file order."""
        return self.tensors.specs

    @property
    def data_start(self) -> int:
        """Bytes before the data; a multiple of ``ALIGNMENT``."""
        return len(self.header)

    def offset_of(self, name: str) -> int:
        """Where the bytes of tensor ``name`` start, counted from the start of the image."""
        return len(self.header) + self.tensors.starts[name]


def build_header(
    specs: Iterable[TensorSpec], version: Version, rank: int, values: Mapping[str, object]
) -> bytes:
    """The first bytes of a shard file, up to the data. Arguments and errors as ``ShardPlan``."""
    return ShardPlan(specs, version, rank, values).header


def _in_file_order(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    seen: set[str] = set()
    for spec in (specs := tuple(specs)):
        problem = spec.problem()
        if spec.name in seen or spec.name == _METADATA:
            problem = "its name is used twice or reserved"
        if problem:
            raise CheckpointError(
                f"tensor {spec.name!r} cannot be saved: {problem}",
                done="the state was not saved",
                advice="name each tensor once and use a dtype that safetensors has",
            )
        seen.add(spec.name)
    return tuple(sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype]))


def read_header(path: Path) -> ShardHeader:
    """Read and check the header of the shard file ``path``.

    Raises:
        CheckpointCorrupt: the file is not a whole shard file.
        CheckpointError: it was written by a newer keepstep.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        # Whoever reads the data decides what is read when: nothing is to be read ahead.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        size = os.fstat(file.fileno()).st_size
        length = file.read(_LENGTH.size)
        wanted = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else 0
        data = length + file.read(min(wanted, MAX_HEADER, size))
    return parse_header(data, size, where=str(path))


def parse_header(data: bytes | memoryview, size: int, *, where: str = "") -> ShardHeader:
    """Check the header at the start of ``data``.

    Args:
        data: The start of a shard file, at least its header.
        size: Bytes of the whole file.
        where: Names the file in errors.

    Raises:
        CheckpointCorrupt: sizes, offsets or shapes contradict each other, or it is no shard file.
        CheckpointError: it was written by a newer keepstep.
    """
    try:
        text = _header_text(data, size)
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(raw.pop(_METADATA), type=dict[str, str])
        ours_text = metadata[_OURS]
        number = msgspec.json.decode(ours_text, type=_Format).format
        if number > FORMAT:
            raise newer_format(number, where)
        ours = msgspec.json.decode(ours_text, type=_Ours)
        stored = {name: msgspec.json.decode(entry, type=_Stored) for name, entry in raw.items()}
        return _checked(ours, stored, _LENGTH.size + len(text), size)
    except KeyError as error:
        raise _corrupt(f"the entry {error} is missing", where) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise _corrupt(str(error), where) from error


def newer_format(number: int, where: str, newest: int = FORMAT) -> CheckpointError:
    """The error for a file of a format that only a newer keepstep knows; we know ``newest``."""
    return CheckpointError(
        f"the checkpoint has format {number}, and this keepstep reads formats up to {newest}",
        where=where,
        done="it was not read",
        advice="install the keepstep release that wrote it, or a newer one",
    )


def _header_text(data: bytes | memoryview, size: int) -> bytes:
    if min(len(data), size) < _LENGTH.size:
        raise ValueError(f"the file has {size} bytes, too few for a header")
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    if length > MAX_HEADER or end > size or end > len(data):
        raise ValueError(f"the header says {length} bytes in a file of {size}")
    if end % ALIGNMENT:
        raise ValueError(f"the data starts at {end}, not at a multiple of {ALIGNMENT}")
    text = bytes(data[_LENGTH.size : end])
    if not text.startswith(b"{"):
        raise ValueError("the header is not JSON")
    return text


def _checked(ours: _Ours, stored: dict[str, _Stored], data_start: int, size: int) -> ShardHeader:
    if ours.format < 1 or ours.rank >= ours.version.world or ours.version.step < 0:
        raise ValueError(f"format {ours.format}, rank {ours.rank} of {ours.version}")
    if stored.keys() != ours.tensors.keys():
        names = sorted(stored.keys() ^ ours.tensors.keys())[:3]
        raise ValueError(f"only one half of the header knows the tensors {names}")
    tensors: dict[str, TensorSpec] = {}
    spans: dict[str, tuple[int, int]] = {}
    at = 0
    for name, entry in sorted(stored.items(), key=lambda item: item[1].data_offsets):
        place = ours.tensors[name]
        spec = TensorSpec(
            name=name,
            dtype=entry.dtype,
            shape=entry.shape,
            global_shape=place.global_shape,
            offsets=place.offsets,
            kind=place.kind,
            of=place.of,
        )
        start, stop = entry.data_offsets
        problem = spec.problem()
        if place.of and ours.format < 2:
            problem = f"format {ours.format} has no chunks of other tensors"
        if not problem and (start != at or stop - start != spec.nbytes):
            problem = f"its data is {start} to {stop}, expected {at} to {at + spec.nbytes}"
        if problem:
            raise ValueError(f"tensor {name!r}: {problem}")
        tensors[name] = spec
        spans[name] = (data_start + start, data_start + stop)
        at = stop
    if data_start + at != size:
        raise ValueError(f"the file has {size} bytes, its header says {data_start + at}")
    return ShardHeader(
        version=ours.version,
        rank=ours.rank,
        tensors=tensors,
        spans=spans,
        values=ours.values,
        data_start=data_start,
        size=size,
    )


def _corrupt(why: str, where: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"this is not a whole shard file: {why}",
        where=where,
        done="nothing was read from it",
        advice="verify the checkpoint; use an older one",
    )
