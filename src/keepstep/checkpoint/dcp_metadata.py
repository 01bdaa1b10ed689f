"""What a folder of torch's distributed checkpoints (DCP) holds, read without running any of it.

Used by restore and command line; needs no torch. ``.metadata`` is a pickle: it is read by
``pickle_data``, which knows data only. The files it points to must lie in the folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.checkpoint import layout, pickle_data, tiling
from keepstep.checkpoint.pickle_data import Inert
from keepstep.errors import CheckpointCorrupt, CheckpointError

METADATA = ".metadata"
MAX_METADATA = 1 << 30
"""Bytes of a ``.metadata`` file that are read."""

_META = "torch.distributed.checkpoint.metadata"
_ELDER = "torch.distributed._shard.sharded_tensor.metadata"
_DTYPES = {
    "torch.bool": "BOOL",
    "torch.uint8": "U8",
    "torch.int8": "I8",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e4m3fnuz": "F8_E4M3FNUZ",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e5m2fnuz": "F8_E5M2FNUZ",
    "torch.uint16": "U16",
    "torch.int16": "I16",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.uint32": "U32",
    "torch.int32": "I32",
    "torch.float32": "F32",
    "torch.uint64": "U64",
    "torch.int64": "I64",
    "torch.float64": "F64",
    "torch.complex64": "C64",
}
_OTHER_DTYPES = frozenset({"torch.complex128", "torch.complex32", "torch.float8_e8m0fnu"})
ALLOWED = frozenset(
    {
        f"{_META}.Metadata",
        f"{_META}.TensorStorageMetadata",
        f"{_META}.BytesStorageMetadata",
        f"{_META}.ChunkStorageMetadata",
        f"{_META}.TensorProperties",
        f"{_META}.MetadataIndex",
        f"{_META}.StorageMeta",
        f"{_META}._MEM_FORMAT_ENCODING",
        f"{_ELDER}.TensorProperties",
        f"{_ELDER}.MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.Size",
        "torch.serialization._get_layout",
        "collections.OrderedDict",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib._local.PosixPath",
        *_DTYPES,
        *_OTHER_DTYPES,
    }
)
"""Every global name that ``.metadata`` may have."""

Path_ = tuple[str | int, ...]
"""Keys of nested containers, from the outermost one on."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``length`` bytes from ``start`` on of ``file``: an archive of ``torch.save``."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """``shape`` elements at ``offsets`` of a tensor, and the archive that holds them."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    piece: Piece


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor of ``shape``; ``dtype`` as in ``shard_file.ITEM_BYTES``, empty if it is none of
    them."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """Everything in a folder, by flattened name; ``paths`` says where a name lies in the nested
    state that was saved."""

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, Piece]
    paths: Mapping[str, Path_]


class _Odd(Exception):
    """The metadata is not as torch writes it."""


def dtype_of(name: str) -> str:
    """safetensors' name of a torch type, such as ``torch.float32``; empty if it has none."""
    return _DTYPES.get(name, "")


def is_dcp(folder: Path) -> bool:
    """Whether ``folder`` looks like one of DCP that keepstep has not sealed."""
    return (folder / METADATA).is_file() and not layout.is_published(folder / layout.MANIFEST)


def read(folder: Path) -> DcpMetadata:
    """What the DCP folder holds.

    Raises:
        CheckpointCorrupt: ``.metadata`` is not as torch writes it, names what it must not, or
            points to a file outside the folder; nothing of it was run.
        CheckpointError: it has something that is not supported.
        OSError: it cannot be read.
    """
    path = folder / METADATA
    size = path.stat().st_size
    if size > MAX_METADATA:
        raise CheckpointError(
            f"{METADATA} has {size} bytes, more than the {MAX_METADATA} that are read",
            where=str(folder),
            done="nothing was read from it",
        )
    found = pickle_data.loads(path.read_bytes(), ALLOWED, str(path))
    try:
        return _checked(found, folder)
    except _Odd as odd:
        raise _corrupt(str(odd), path) from odd
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _corrupt(f"a part of it has another form ({error})", path) from error


def _checked(found: object, folder: Path) -> DcpMetadata:
    fields = _fields(found, f"{_META}.Metadata")
    pieces: dict[tuple[str, tuple[int, ...]], Piece] = {}
    for index, info in _dict(fields["storage_data"]).items():
        known = _fields(index, f"{_META}.MetadataIndex")
        offset = known.get("offset")
        place = () if offset is None else _size(offset)
        pieces[_text(known["fqn"]), place] = _piece(info, folder)
    tensors: dict[str, DcpTensor] = {}
    values: dict[str, Piece] = {}
    for name, entry in _dict(fields["state_dict_metadata"]).items():
        if _is(entry, f"{_META}.BytesStorageMetadata"):
            values[_text(name)] = pieces[name, ()]
        else:
            tensors[_text(name)] = _tensor(name, entry, pieces)
    return DcpMetadata(tensors, values, _paths(fields.get("planner_data"), {*tensors, *values}))


def _tensor(
    name: str, entry: object, pieces: Mapping[tuple[str, tuple[int, ...]], Piece]
) -> DcpTensor:
    fields = _fields(entry, f"{_META}.TensorStorageMetadata")
    shape = _size(fields["size"])
    chunks: list[DcpChunk] = []
    for one in fields["chunks"]:
        known = _fields(one, f"{_META}.ChunkStorageMetadata")
        offsets, sizes = _size(known["offsets"]), _size(known["sizes"])
        piece = pieces.get((name, offsets))
        if piece is None:
            raise _Odd(f"nothing says where the part of {name!r} at {offsets} lies")
        chunks.append(DcpChunk(offsets, sizes, piece))
    kept = [chunk for chunk in chunks if math.prod(chunk.shape)]
    problem = tiling.problem(shape, [(chunk.offsets, chunk.shape) for chunk in kept])
    if problem:
        raise _Odd(f"{name!r}: {problem}")
    return DcpTensor(_dtype(fields["properties"]), shape, tuple(kept or chunks[:1]))


def _dtype(properties: object) -> str:
    if not (
        _is(properties, f"{_META}.TensorProperties")
        or _is(properties, f"{_ELDER}.TensorProperties")
    ):
        raise _Odd("a tensor has no properties")
    assert isinstance(properties, Inert)
    state = properties.state
    kind = state[0] if type(state) is tuple else _dict(state)["dtype"]
    if not isinstance(kind, Inert) or not (kind.name in _DTYPES or kind.name in _OTHER_DTYPES):
        raise _Odd("the type of a tensor is not known")
    return _DTYPES.get(kind.name, "")


def _piece(info: object, folder: Path) -> Piece:
    fields = _fields(info, "torch.distributed.checkpoint.filesystem._StorageInfo")
    if fields.get("transform_descriptors"):
        raise CheckpointError(
            f"its data was transformed by {fields['transform_descriptors']!r} (compressed, say)",
            where=str(folder),
            done="nothing was read from it",
            advice="save it again without extensions of the storage writer",
        )
    name, start, length = _text(fields["relative_path"]), fields["offset"], fields["length"]
    if type(start) is not int or type(length) is not int or start < 0 or length < 0:
        raise _Odd(f"a part of {name!r} lies at an impossible place")
    layout.inside(folder, name)
    return Piece(name, start, length)


def _paths(planner_data: object, names: set[str]) -> dict[str, Path_]:
    """Where each name lies in the nested state; a name that nothing is said about is a key."""
    told = planner_data if type(planner_data) is dict else {}
    paths: dict[str, Path_] = {}
    for name in names:
        path = told.get(name, (name,))
        if (
            type(path) is not tuple
            or not path
            or not all(type(part) in (str, int) for part in path)
        ):
            raise _Odd(f"the place of {name!r} is no list of keys")
        paths[name] = path
    return paths


def _is(value: object, name: str) -> bool:
    return isinstance(value, Inert) and value.name == name and value.args is not None


def _fields(value: object, name: str) -> dict[str, Any]:
    """Attributes of an object of this class."""
    if not isinstance(value, Inert) or not _is(value, name):
        raise _Odd(f"something is no {name}")
    return _dict(value.state)


def _dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Inert) and value.name == "collections.OrderedDict":
        value = value.state if value.state is not None else {}
    if type(value) is not dict:
        raise _Odd("a dict is missing")
    return value


def _size(value: object) -> tuple[int, ...]:
    """The numbers of a ``torch.Size``."""
    if not isinstance(value, Inert) or not _is(value, "torch.Size") or value.args is None:
        raise _Odd("a size is missing")
    (numbers,) = value.args
    if type(numbers) not in (tuple, list) or len(numbers) > 64:
        raise _Odd("a size is no list of numbers")
    if not all(type(one) is int and 0 <= one < 1 << 62 for one in numbers):
        raise _Odd("a size has impossible numbers")
    return tuple(numbers)


def _text(value: object) -> str:
    if type(value) is not str:
        raise _Odd("a name is no text")
    return value


def _corrupt(why: str, path: Path) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"this is not the metadata of a distributed checkpoint of torch: {why}",
        where=str(path),
        done="nothing was read from the checkpoint",
        advice="give a folder that torch.distributed.checkpoint.save has written",
    )
