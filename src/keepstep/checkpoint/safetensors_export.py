"""The modules of a checkpoint as plain safetensors files. Used by the command line; needs no torch.

One file, or several with an index, as Hugging Face's libraries read them: ``model.safetensors``, or
``model-00001-of-00003.safetensors`` and ``model.safetensors.index.json``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from keepstep.checkpoint import new_path, tensor_bytes
from keepstep.checkpoint.shard_file import ITEM_BYTES
from keepstep.checkpoint.source import Source, StoredTensor
from keepstep.checkpoint.tensor_bytes import TensorBytes, nbytes
from keepstep.errors import CheckpointMismatch

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
INDEX = "model.safetensors.index.json"
_EXTRA = "_extra_state"


def modules(values: Mapping[str, object]) -> list[str]:
    """Names of the objects that are modules."""
    return [
        name
        for name, value in values.items()
        if isinstance(value, Mapping) and value.get("type") == "module"
    ]


def names_of(
    source: Source, only: Sequence[str] = (), *, strip_prefix: bool = False
) -> dict[str, str]:
    """The tensors to export: the stored name by the name in the export.

    Args:
        source: What is exported.
        only: Names of the modules; empty: all.
        strip_prefix: Leave the module's name out.

    Raises:
        CheckpointMismatch: there is no such module, or two tensors would get one name.
    """
    values, stored = source.values(0), source.tensors(0)
    there = modules(values)
    unknown = sorted(set(only) - set(there))
    if unknown or not there:
        raise CheckpointMismatch(
            f"the checkpoint has no module {', '.join(unknown)}"
            if unknown
            else "the checkpoint has no modules",
            where=source.about.where,
            done="nothing was exported",
            advice=f"its modules are: {', '.join(there) or 'none'}",
        )
    names: dict[str, str] = {}
    for module in only or there:
        start = f"{module}."
        found = {
            name.removeprefix(start): name
            for name in stored
            if name.startswith(start) and not name.startswith(f"{start}{_EXTRA}.")
        }
        for other, name in tied(values[module]).items():
            if name in found:
                found[other] = found[name]
        for inner, name in found.items():
            outer = inner if strip_prefix else f"{start}{inner}"
            if outer in names:
                raise CheckpointMismatch(
                    f"two modules have a tensor {outer}",
                    where=source.about.where,
                    done="nothing was exported",
                    advice="export one module with --only, or keep the prefixes",
                )
            names[outer] = name
    return names


def tied(value: object) -> dict[str, str]:
    """Further names of tensors that a module has under several, by that name."""
    found = value.get("tied") if isinstance(value, Mapping) else None
    return {str(one): str(other) for one, other in found.items()} if found else {}


def export(
    source: Source,
    names: Mapping[str, str],
    path: Path,
    *,
    max_shard_bytes: int = 0,
    progress: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """Write the tensors into the new file ``path``, or files in the new folder ``path``.

    Args:
        source: What is exported; verified by the caller.
        names: The stored name of each tensor by its name in the export.
        path: What is made.
        max_shard_bytes: Bytes of tensors in a file of a folder; 0: one file.
        progress: Told how many more bytes were written.

    Returns:
        Names of the files in the folder; empty for one file.

    Raises:
        UsageError: ``path`` is there already.
        CheckpointError: the checkpoint cannot be read.
        OSError: storage failed.
    """
    stored = source.tensors(0)
    tensors = {name: stored[names[name]] for name in names}
    with tensor_bytes.opened(source) as reader, new_path.made(path) as temporary:
        if not max_shard_bytes:
            _write(temporary, tensors, reader, progress)
            return []
        temporary.mkdir()
        files = _split(tensors, max_shard_bytes)
        index: dict[str, str] = {}
        for number, part in enumerate(files, 1):
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            name = name if len(files) > 1 else "model.safetensors"
            _write(temporary / name, part, reader, progress)
            index |= dict.fromkeys(part, name)
        if len(files) > 1:
            total = sum(nbytes(tensor) for tensor in tensors.values())
            text = msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": index})
            (temporary / INDEX).write_bytes(msgspec.json.format(text, indent=2) + b"\n")
        return sorted({*index.values(), *([INDEX] if len(files) > 1 else [])})


def _split(tensors: Mapping[str, StoredTensor], limit: int) -> list[dict[str, StoredTensor]]:
    """The tensors in order, a new file where the next would not fit."""
    files: list[dict[str, StoredTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + nbytes(tensor) > limit:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += nbytes(tensor)
    return files


def _write(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    reader: TensorBytes,
    progress: Callable[[int], None],
) -> None:
    # Larger elements first: then each tensor is aligned without gaps.
    order = sorted(tensors, key=lambda name: (-_item(tensors[name]), name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        size = nbytes(tensors[name])
        entries[name] = {
            "dtype": tensors[name].dtype,
            "shape": tensors[name].shape,
            "data_offsets": (at, at + size),
        }
        at += size
    text = msgspec.json.encode(entries)
    text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
    with path.open("xb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for name in order:
            for part in reader.parts(tensors[name]):
                file.write(part)
                progress(len(part))


def _item(tensor: StoredTensor) -> int:
    return ITEM_BYTES[tensor.dtype]
