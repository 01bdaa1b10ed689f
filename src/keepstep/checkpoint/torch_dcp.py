"""A folder of torch's distributed checkpoints (DCP) as a source to restore or import from.

Runs in the ranks and in the command line. ``.metadata`` and the descriptions of single tensors are
pickles that are read as plain data (``pickle_data``); the bytes of tensors are found without them
(``torch_files``) and checked against what they say. Plain values are decoded by ``torch.load`` with
``weights_only=True``, which makes plain values and tensors only.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keepstep.checkpoint import (
    dcp_metadata,
    dcp_names,
    layout,
    pickle_data,
    torch_files,
    typed_json,
)
from keepstep.checkpoint.dcp_metadata import DcpChunk, DcpTensor, Piece
from keepstep.checkpoint.dcp_names import Names, OptimizerNames
from keepstep.checkpoint.manifest import Span
from keepstep.checkpoint.pickle_data import Inert
from keepstep.checkpoint.shard_file import ITEM_BYTES
from keepstep.checkpoint.source import About, StoredChunk, StoredFile, StoredTensor
from keepstep.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch

MAX_VALUE = 256 << 20
"""Bytes of one plain value that are decoded."""
_MAX_DESCRIPTION = 1 << 20
_STEP_NAMES = ("step", "train_state.step", "global_step", "iteration")
_STEP_FOLDER = re.compile(r"(?:.*[^0-9])?([0-9]{1,18})")

_STORAGES = {
    "torch.BoolStorage": "BOOL",
    "torch.ByteStorage": "U8",
    "torch.CharStorage": "I8",
    "torch.ShortStorage": "I16",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.IntStorage": "I32",
    "torch.FloatStorage": "F32",
    "torch.LongStorage": "I64",
    "torch.DoubleStorage": "F64",
    "torch.ComplexFloatStorage": "C64",
}
_UNTYPED = "torch.storage.UntypedStorage"
_V2, _V3 = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"
_DESCRIPTION = frozenset(
    {
        *_STORAGES,
        _UNTYPED,
        _V2,
        _V3,
        _PARAMETER,
        "collections.OrderedDict",
        *(name for name in dcp_metadata.ALLOWED if re.fullmatch(r"torch\.[a-z0-9_]+", name)),
    }
)
"""Global names that the description of a single tensor may have."""


@dataclass(frozen=True, slots=True)
class _Described:
    """What an archive says of its tensor: ``offset`` and ``stride`` in elements of ``dtype``."""

    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class DcpSource:
    """Implements ``Source`` for a DCP folder.

    Args:
        folder: The folder, with ``.metadata`` in it.
        renames: Prefixes of names to replace, as (old, new).
        tracked: Names of the objects that are to be restored, where they are known.

    Attributes:
        unused: Why each name in the folder that is not used is not; complete after ``values``.

    Raises:
        CheckpointCorrupt: ``.metadata`` is not as torch writes it; nothing of it was run.
        CheckpointError: it has something that is not supported.
        CheckpointMismatch: its names cannot be understood.
        OSError: it cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        renames: Sequence[tuple[str, str]] = (),
        tracked: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._found = dcp_metadata.read(folder)
        self._names: Names = dcp_names.resolve(self._found, renames, tracked)
        self._values: dict[str, object] | None = None
        self._decoded: dict[str, Any] = {}
        self.unused: dict[str, str] = dict(self._names.unused)

    @property
    def about(self) -> About:
        return About(where=str(self._folder), step=0, run=None, world=1, complete=False)

    def likely_step(self) -> int:
        """Completed steps, as a usual value for it or the folder's name says; 0 if nothing does.

        Raises:
            CheckpointError: such a value cannot be decoded.
        """
        for name in _STEP_NAMES:
            piece = self._found.values.get(name)
            value = self._number(name) if piece is None else self._decode(name, piece)
            if type(value) is int and value >= 0:
                return value
        match = _STEP_FOLDER.fullmatch(self._folder.resolve().name)
        return int(match[1]) if match else 0

    def _number(self, source: str) -> int | None:
        """The value of a tensor of one whole number; None if it is something else."""
        found = self._found.tensors.get(source)
        if found is None or found.dtype not in ("I32", "I64") or math.prod(found.shape) != 1:
            return None
        chunk = found.chunks[0]
        path = layout.inside(self._folder, chunk.piece.file)
        start, stop = _locate(path, source, found, chunk)
        with path.open("rb") as file:
            file.seek(start)
            return int.from_bytes(file.read(stop - start), "little", signed=True)

    def values(self, rank: int) -> Mapping[str, object]:
        if self._values is None:
            values: dict[str, object] = {}
            for name, extra in self._names.modules.items():
                values[name] = self._module(name, extra)
            for name, known in self._names.optimizers.items():
                values[name] = self._optimizer(name, known)
            for name, parts in self._names.others.items():
                found = self._nested(parts)
                if found is not None:
                    values[name] = {"type": "nested", **found}
            self._values = values
        return self._values

    def tensors(self, rank: int) -> Mapping[str, StoredTensor]:
        self.values(rank)  # objects that cannot be decoded are left out whole
        result: dict[str, StoredTensor] = {}
        for name, source in self._names.tensors.items():
            found = self._found.tensors[source]
            if source in self.unused:
                continue
            if not found.dtype:
                self.unused[source] = "its type has no place in a checkpoint of keepstep"
                continue
            chunks = tuple(
                StoredChunk(chunk.offsets, chunk.shape, chunk.piece.file, _key(source, chunk))
                for chunk in found.chunks
            )
            result[name] = StoredTensor(found.dtype, found.shape, chunks)
        return result

    def file(self, name: str) -> tuple[StoredFile, Mapping[str, Span]]:
        path = layout.inside(self._folder, name)
        size = path.stat().st_size
        spans: dict[str, Span] = {}
        for source in self._names.tensors.values():
            found = self._found.tensors[source]
            if found.dtype and source not in self.unused:
                for chunk in found.chunks:
                    if chunk.piece.file == name:
                        spans[_key(source, chunk)] = _locate(path, source, found, chunk)
        return StoredFile(path=path, size=size), spans

    # --- values -----------------------------------------------------------------------------------

    def _module(
        self, name: str, extra: Mapping[dcp_names.Path, tuple[str, bool]]
    ) -> dict[str, object]:
        found = self._nested(extra) if extra else None
        return {"type": "module"} if found is None else {"type": "module", "extra": found}

    def _optimizer(self, name: str, known: OptimizerNames) -> dict[str, object]:
        groups: list[dict[str, object]] = []
        by_parameter: list[tuple[str, dict[str, object]]] = []
        for which in known.options:
            options = {key: self._plain(one) for key, one in known.options[which].items()}
            if isinstance(which, str):
                by_parameter.append((which, options))
                continue
            members = self._plain(known.members[which]) if which in known.members else None
            if not isinstance(members, list) or not all(isinstance(one, str) for one in members):
                raise CheckpointMismatch(
                    f"group {which} of {name} does not say the names of its parameters",
                    where=str(self._folder),
                    done="nothing was read",
                    advice="save it with torch.distributed.checkpoint.state_dict."
                    "get_optimizer_state_dict",
                )
            full = [known.owners.get(one, f"model.{one}") for one in members]
            groups.append({"params": full, "options": options})
        for parameter, options in by_parameter:
            same = next((one for one in groups if one["options"] == options), None)
            if same is None:
                groups.append({"params": [parameter], "options": options})
            else:
                same_params = same["params"]
                assert isinstance(same_params, list)
                same_params.append(parameter)
        rest = {
            f"{name}.state.{owner}": {
                "state": {key: self._plain(source) for key, source in keys.items()},
                "tensors": [],
            }
            for owner, keys in known.rest.items()
        }
        return {"type": "optimizer", "by_name": groups, "state": rest}

    def _nested(self, parts: Mapping[dcp_names.Path, tuple[str, bool]]) -> dict[str, object] | None:
        """A container as ``torch_nested`` keeps it; None if a value in it cannot be decoded."""
        leaves: dict[dcp_names.Path, object] = {}
        try:
            for path, (source, tensor) in parts.items():
                leaves[path] = None if tensor else self._plain(source)
        except CheckpointError as error:
            for source, _ in parts.values():
                self.unused[source] = error.what
            return None
        paths = [list(path) for path, (_, tensor) in parts.items() if tensor]
        return {"state": dcp_names.nested(leaves), "tensors": paths}

    def _plain(self, source: str) -> Any:
        """The plain value of this name.

        Raises:
            CheckpointError: it is none, or cannot be decoded without running code.
        """
        value = self._decode(source, self._found.values[source])
        typed_json.encode(value, source)
        return value

    def _decode(self, source: str, piece: Piece) -> Any:
        if source not in self._decoded:
            self._decoded[source] = _load(layout.inside(self._folder, piece.file), source, piece)
        return self._decoded[source]


def _key(source: str, chunk: DcpChunk) -> str:
    return f"{source}@{','.join(map(str, chunk.offsets))}"


def _load(path: Path, source: str, piece: Piece) -> Any:
    """Decode one plain value. Raises CheckpointError, OSError."""
    if piece.length > MAX_VALUE:
        raise CheckpointError(f"{source} has {piece.length} bytes, at most {MAX_VALUE} are decoded")
    torch_files.records(path, piece.start, piece.start + piece.length)
    with path.open("rb") as file:
        file.seek(piece.start)
        data = file.read(piece.length)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # among them pickle's own, whose module is banned here
        # Not torch's own words: they advise to run it.
        raise CheckpointError(
            f"{source} cannot be decoded without running code ({type(error).__name__})",
            where=str(path),
            done="it was not run and is not used",
        ) from error


def _locate(path: Path, source: str, tensor: DcpTensor, chunk: DcpChunk) -> Span:
    """Where the elements of the chunk lie in its file.

    Raises:
        CheckpointCorrupt: the archive is not whole, or of another tensor.
        CheckpointError: its elements do not lie in row-major order.
        OSError: it cannot be read.
    """
    piece, item = chunk.piece, ITEM_BYTES[tensor.dtype]
    nbytes = math.prod(chunk.shape) * item
    stop = piece.start + piece.length
    found = torch_files.archive(path, piece.start, stop)
    described = _described(path, found.objects)
    if (described.dtype, described.shape) != (tensor.dtype, chunk.shape):
        raise CheckpointCorrupt(
            f"{source} at {chunk.offsets} should be {tensor.dtype} {list(chunk.shape)}, its file "
            f"has {described.dtype} {list(described.shape)}",
            where=str(path),
            done="nothing was restored from it",
        )
    if nbytes and not _is_row_major(described):
        raise CheckpointError(
            f"{source} at {chunk.offsets} was saved with the strides {list(described.stride)} for "
            f"the shape {list(described.shape)}",
            where=str(path),
            done="nothing was restored",
            advice="save it again with its tensors made contiguous",
        )
    begin, end = found.storages[0] if found.storages else (piece.start, piece.start)
    begin += described.offset * item
    if len(found.storages) > 1 or begin + nbytes > end:
        raise CheckpointCorrupt(
            f"{source} at {chunk.offsets} needs {nbytes} bytes, its file has {end - begin}",
            where=str(path),
            done="nothing was restored from it",
        )
    return begin, begin + nbytes


def _is_row_major(found: _Described) -> bool:
    expected = 1
    for size, stride in zip(reversed(found.shape), reversed(found.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _described(path: Path, span: Span) -> _Described:
    """What the archive says of its only tensor."""
    start, stop = span
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(min(stop - start, _MAX_DESCRIPTION))
    made = pickle_data.loads(data, _DESCRIPTION, str(path))
    try:
        while isinstance(made, Inert) and made.name == _PARAMETER:
            (made, *_) = made.args or ()
        if not isinstance(made, Inert) or made.name not in (_V2, _V3):
            raise ValueError("it is no tensor")
        storage, offset, shape, stride, *more = made.args or ()
        kind = storage.args[0][1].name
        dtype = _STORAGES.get(kind, "")
        if kind == _UNTYPED and made.name == _V3:
            dtype = dcp_metadata.dtype_of(more[2].name)
        shape, stride = _numbers(shape), _numbers(stride)
        if not dtype or type(offset) is not int or offset < 0 or len(shape) != len(stride):
            raise ValueError(f"its storage is a {kind}")
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointCorrupt(
            f"the file does not say what tensor it holds: {error}",
            where=str(path),
            done="nothing was restored from it",
        ) from error
    return _Described(dtype, offset, shape, stride)


def _numbers(value: object) -> tuple[int, ...]:
    """The numbers of a tuple or a ``torch.Size``."""
    if isinstance(value, Inert) and value.name == "torch.Size" and value.args:
        (value,) = value.args
    if type(value) is not tuple or not all(type(one) is int and one >= 0 for one in value):
        raise ValueError("its size is no list of numbers")
    return value
