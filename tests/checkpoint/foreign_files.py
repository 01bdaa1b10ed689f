"""Checkpoints whose files ``torch.save`` wrote, sealed and committed by us."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from keepstep.checkpoint import foreign, layout, torch_files
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.manifest import Layout, Manifest, Receipt
from keepstep.checkpoint.torch_image import spec_of
from keepstep.checkpoint.torch_state import flatten
from keepstep.checkpoint.writer import claim_folder
from keepstep.wire.types import Version
from tests.checkpoint.shards import FixedClock

Span = tuple[int, int]
ROWS = torch.contiguous_format
FOLDER = "step-00000001"
KINDS: list[Layout] = ["torch", "dcp"]


def state(fill: float = 1.0) -> dict[str, Any]:
    """Tensors of several kinds, and values."""
    return {
        "w": torch.arange(12.0).reshape(3, 4) * fill,
        "d": {
            "zero": torch.tensor(5.5) * fill,
            "none": torch.empty(0, 3),
            "half": (torch.arange(7.0) * fill).to(torch.bfloat16),
            "turned": torch.arange(6.0).reshape(2, 3).T * fill,
            "bool": torch.tensor([True, False]),
            "lr": 0.5 * fill,
            "order": (1, b"x", None),
        },
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Values and every element of every tensor."""
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_equal(found[key], value)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


def file_of(kind: Layout, rank: int = 0) -> str:
    """Name of a rank's file."""
    return layout.torch_name(rank) if kind == "torch" else f"__{rank}_0.distcp"


def content(tensor: torch.Tensor) -> bytes:
    """The tensor's elements as they lie in memory."""
    whole = tensor.detach().contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes) if whole.nbytes else b""


def write_archives(path: Path, tensors: Sequence[torch.Tensor]) -> list[Span]:
    """Save each tensor as an archive of its own, one after the other; returns where they lie."""
    found: list[Span] = []
    with path.open("wb") as file:
        for tensor in tensors:
            start = file.tell()
            torch.save(tensor, file)
            found.append((start, file.tell()))
    return found


def write_file(path: Path, tensors: Mapping[str, torch.Tensor], kind: Layout) -> dict[str, Span]:
    """Save ``tensors`` as torch.save or a distributed checkpoint does; returns their bytes."""
    if kind == "torch":
        torch.save(dict(tensors), path)
        found = torch_files.records(path)
    else:
        parts = write_archives(path, list(tensors.values()))
        found = [torch_files.records(path, *part)[0] for part in parts]
    return dict(zip(tensors, found, strict=True))


def seal(
    root: Path,
    tracked: Mapping[str, object],
    of: Version,
    rank: int = 0,
    *,
    kind: Layout = "torch",
    **changed: Any,
) -> tuple[Receipt, str]:
    """Write and seal ``rank``'s file of ``tracked``; ``changed`` goes to ``foreign.seal``."""
    snapshot = flatten(tracked, rank=rank, world=of.world)
    folder = claim_folder(root, of)
    file = layout.torch_name(rank) if kind == "torch" else f"__{rank}_0.distcp"
    tensors = {
        entry.name: entry.tensor.detach().clone(memory_format=ROWS) for entry in snapshot.entries
    }
    spans = write_file(root / folder / file, tensors, kind)
    others: tuple[str, ...] = ()
    if kind == "dcp" and rank == 0:
        (root / folder / ".metadata").write_bytes(b"\x80\x04not for us to read.")
        others = (".metadata",)
    arguments: dict[str, Any] = {
        "layout": kind,
        "file": file,
        "tensors": [spec_of(entry) for entry in snapshot.entries],
        "spans": spans,
        "values": snapshot.values,
        "others": others,
        "expected": {name: xxhash.xxh3_128_hexdigest(content(t)) for name, t in tensors.items()},
    }
    return foreign.seal(root, folder, of, rank, **(arguments | changed)), folder


def save(
    root: Path, states: Sequence[Mapping[str, object]], of: Version, kind: Layout = "torch"
) -> tuple[Manifest, str]:
    """Write, seal and commit a checkpoint of one state a rank."""
    folder = ""
    for rank, tracked in enumerate(states):
        _, folder = seal(root, tracked, of, rank, kind=kind)
    return commit(root, folder, of, FixedClock()), folder


class Trap:
    """Unpickling this makes a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self._folder,))
