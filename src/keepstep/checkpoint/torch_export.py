"""A checkpoint as ``torch.save`` and torch's distributed checkpoints (DCP) would have it.

Runs in the command line. The state dicts are built from memory maps, so that memory stays small:
tensors that lie in one part are mapped where they are; the others are first put together in an
unnamed file beside the result.
"""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from keepstep.checkpoint import dcp_metadata, new_path, torch_nested
from keepstep.checkpoint.safetensors_export import tied
from keepstep.checkpoint.source import Source, StoredTensor
from keepstep.checkpoint.tensor_bytes import TensorBytes, nbytes
from keepstep.checkpoint.torch_state import TORCH_DTYPES
from keepstep.errors import CheckpointError, CheckpointMismatch

Progress = Callable[[int], None]
_EXTRA = "_extra_state"


def to_torch(
    source: Source,
    path: Path,
    only: Sequence[str] = (),
    progress: Progress = lambda count: None,
) -> list[str]:
    """Write a file that ``torch.load(path, weights_only=True)`` reads.

    It holds a dict with what each tracked object's ``state_dict()`` was: an optimizer's has its
    parameters by number, as ``optimizer.load_state_dict`` takes it.

    Args:
        source: What is exported; verified by the caller.
        path: The file to make.
        only: Names of the objects; empty: all.
        progress: Told how many more bytes were written.

    Returns:
        What was left out and why, one sentence each.

    Raises:
        UsageError: ``path`` is there already.
        CheckpointError: the checkpoint cannot be read or has no such object.
        OSError: storage failed.
    """
    with new_path.made(path) as temporary, _Tensors(source, path.absolute().parent) as tensors:
        state, left_out = _state(source, tensors, only, numbered=True)
        with temporary.open("xb") as file:
            torch.save(state, cast("IO[bytes]", _Counted(file, progress)))
        del state
        torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
    return left_out


def to_dcp(
    source: Source,
    path: Path,
    only: Sequence[str] = (),
    progress: Progress = lambda count: None,
) -> list[str]:
    """Write a folder that ``torch.distributed.checkpoint.load`` reads at any world size.

    It holds a dict with the state of each tracked object: a module's as ``get_model_state_dict``
    gives it, an optimizer's as ``get_optimizer_state_dict`` does. Arguments and errors as
    ``to_torch``.
    """
    with new_path.made(path) as temporary, _Tensors(source, path.absolute().parent) as tensors:
        state, left_out = _state(source, tensors, only, numbered=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")
            torch_save(
                state,
                storage_writer=FileSystemWriter(temporary, sync_files=False),
                planner=_Planner(progress),
                no_dist=True,
            )
        dcp_metadata.read(temporary)
    return left_out


class _Planner(DefaultSavePlanner):
    """Tells how many bytes were taken."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
        if write_item.type != WriteItemType.BYTE_IO and isinstance(data, torch.Tensor):
            self._progress(data.numel() * data.element_size())
        return data


class _Counted(io.RawIOBase):
    """A file that tells how much was written into it."""

    def __init__(self, file: IO[bytes], progress: Progress) -> None:
        self._file = file
        self._progress = progress

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        count = self._file.write(data)
        self._progress(count)
        return count


class _Tensors:
    """Whole tensors of a source as memory maps.

    Args:
        source: Where they come from.
        beside: Folder in which an unnamed file may grow.
    """

    def __init__(self, source: Source, beside: Path) -> None:
        self.stored = source.tensors(0)
        self._reader = TensorBytes(source)
        self._beside = beside
        self._maps: dict[Path, mmap.mmap] = {}
        self._open = contextlib.ExitStack()
        self._spool: IO[bytes] | None = None
        self._made: dict[str, torch.Tensor] = {}

    def __enter__(self) -> _Tensors:
        self._open.callback(self._reader.close)
        return self

    def __exit__(self, *error: object) -> None:
        self._made.clear()
        self._maps.clear()  # a map ends with the last tensor on it
        self._open.close()

    def get(self, name: str) -> torch.Tensor:
        """The tensor; the same one each time."""
        if name not in self._made:
            self._made[name] = self._make(self.stored[name])
        return self._made[name]

    def _make(self, tensor: StoredTensor) -> torch.Tensor:
        dtype, size = TORCH_DTYPES[tensor.dtype], nbytes(tensor)
        if not size:
            return torch.empty(tensor.shape, dtype=dtype)
        span = self._reader.span(tensor)
        if span is not None and span[1] % dtype.itemsize == 0:
            return _view(self._map(span[0]), span[1], tensor.shape, dtype)
        if self._spool is None:
            unnamed = tempfile.TemporaryFile(dir=self._beside)  # noqa: SIM115 - closed by the stack
            self._spool = self._open.enter_context(unnamed)
        at = -(-self._spool.seek(0, os.SEEK_END) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._spool.seek(at)
        for part in self._reader.parts(tensor):
            self._spool.write(part)
        self._spool.flush()
        mapped = mmap.mmap(self._spool.fileno(), size, access=mmap.ACCESS_COPY, offset=at)
        return _view(mapped, 0, tensor.shape, dtype)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                # Private and writable: torch warns about memory that cannot be written.
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[path]


def _view(mapped: mmap.mmap, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = math.prod(shape)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=at).view(shape)


def _state(
    source: Source, tensors: _Tensors, only: Sequence[str], *, numbered: bool
) -> tuple[dict[str, Any], list[str]]:
    """The state of each object as a script has it, and what was left out."""
    values = {name: value for name, value in source.values(0).items() if not name.startswith("$")}
    unknown = sorted(set(only) - values.keys())
    if unknown:
        raise CheckpointMismatch(
            f"the checkpoint has no {', '.join(unknown)}",
            where=source.about.where,
            done="nothing was exported",
            advice=f"it has: {', '.join(values)}",
        )
    modules = [name for name, value in values.items() if _type(value) == "module"]
    state: dict[str, Any] = {}
    left_out: list[str] = []
    for name, value in values.items():
        if only and name not in only:
            continue
        kind = _type(value)
        if kind == "module":
            state[name] = _module(name, value, tensors)
        elif kind == "optimizer":
            state[name] = _optimizer(name, value, tensors, modules, numbered=numbered)
        elif kind == "tensor":
            state[name] = tensors.get(name)
        else:
            state[name] = _nested(name, value, tensors)
        if not _is_plain(state[name]):
            del state[name]
            left_out.append(f"{name}: it has values that need code to be read")
    if source.about.world > 1:
        own = [name for name in state if source.values(1).get(name) != values[name]]
        left_out += [f"{name}: the values of ranks other than 0 have no place" for name in own]
    return state, left_out


def _type(value: object) -> object:
    return value.get("type") if isinstance(value, Mapping) else None


def _module(name: str, value: object, tensors: _Tensors) -> dict[str, Any]:
    start = f"{name}."
    inner = {
        stored.removeprefix(start): stored
        for stored in tensors.stored
        if stored.startswith(start) and not stored.startswith(f"{start}{_EXTRA}.")
    }
    state: dict[str, Any] = {key: tensors.get(stored) for key, stored in inner.items()}
    for other, stored in tied(value).items():
        state[other] = tensors.get(f"{start}{stored}")
    if isinstance(value, Mapping) and "extra" in value:
        extra = _nested(f"{name}.{_EXTRA}", value["extra"], tensors)
        state |= extra if isinstance(extra, dict) else {}
    return state


def _nested(name: str, value: object, tensors: _Tensors) -> Any:
    skeleton, paths = torch_nested.unpack(name, value)
    found = {path: tensors.get(torch_nested.name_of(name, path)) for path in paths}
    return torch_nested.join(skeleton, found) if found else skeleton


def _optimizer(
    name: str, value: object, tensors: _Tensors, modules: Sequence[str], *, numbered: bool
) -> dict[str, Any]:
    assert isinstance(value, Mapping)
    start = f"{name}.state."
    state: dict[str, dict[str, Any]] = {}
    for stored in tensors.stored:
        owner, _, key = stored.removeprefix(start).rpartition(".")
        if stored.startswith(start) and not owner.endswith(".rest"):
            state.setdefault(owner, {})[key] = tensors.get(stored)
    for prefix, rest in (value.get("state") or {}).items():
        found = _nested(f"{prefix}.rest", rest, tensors)
        state.setdefault(prefix.removeprefix(start), {}).update(found)
    groups = _groups(name, value, tensors)
    order = [parameter for members, _ in groups for parameter in members]
    called: dict[str, Any] = {
        parameter: number if numbered else _plain_name(parameter, modules)
        for number, parameter in enumerate(order)
    }
    if len(set(called.values())) != len(order) or not state.keys() <= called.keys():
        raise CheckpointError(
            f"the parameters of {name} cannot be told apart by their names",
            done="nothing was exported",
            advice="export the modules alone, with --only",
        )
    return {
        "state": {called[owner]: state[owner] for owner in order if owner in state},
        "param_groups": [
            {"params": [called[parameter] for parameter in members], **options}
            for members, options in groups
        ],
    }


def _groups(
    name: str, value: Mapping[str, Any], tensors: _Tensors
) -> list[tuple[list[str], dict[str, Any]]]:
    """The optimizer's groups: full names of the parameters in their order, and the options."""
    if "by_name" in value:
        return [(list(group["params"]), dict(group["options"])) for group in value["by_name"]]
    names = value.get("names")
    if names is None:
        raise CheckpointError(
            f"the checkpoint does not say in which order {name} has its parameters: an older "
            "keepstep wrote it",
            done="nothing was exported",
            advice="export the modules alone, with --only; or restore it and save it again",
        )
    options = _nested(f"{name}.group", value["groups"], tensors)
    return [(list(called), dict(one)) for called, one in zip(names, options, strict=True)]


def _plain_name(parameter: str, modules: Sequence[str]) -> str:
    """A parameter's name without that of its module."""
    for module in modules:
        if parameter.startswith(f"{module}."):
            return parameter.removeprefix(f"{module}.")
    return parameter


def _is_plain(state: object) -> bool:
    """Whether ``torch.load`` reads the state with ``weights_only=True``."""
    without = _without_tensors(state)
    buffer = io.BytesIO()
    try:
        torch.save(without, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # noqa: BLE001 - whatever it is, the object cannot be in the file
        return False
    return True


def _without_tensors(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return None
    if type(state) is dict:
        return {key: _without_tensors(item) for key, item in state.items()}
    if type(state) in (list, tuple):
        return [_without_tensors(item) for item in state]
    return state


def total_bytes(source: Source) -> int:
    """Bytes of all tensors that an export has."""
    return sum(nbytes(tensor) for tensor in source.tensors(0).values())
