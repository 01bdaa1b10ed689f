"""Receipts for tests of manifests, made without files."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
from hypothesis import strategies as st

from keepstep.checkpoint import manifest, shard_file
from keepstep.checkpoint.manifest import FileInfo, Receipt
from keepstep.wire.types import Version
from tests.checkpoint.shards import image, make_version


def native(version: Version, rank: int, **values: Any) -> Receipt:
    """A receipt of format 1."""
    data = image(version, rank, values=values or None)
    return manifest.receipt_of(shard_file.parse_header(data, len(data)), "0" * 32)


def foreign(rank: int, world: int = 2, **changed: Any) -> Receipt:
    """A receipt of a file of another library; ``changed`` are other fields."""
    own = native(make_version(world=world), rank)
    spans, at = {}, 100
    for name, spec in own.tensors.items():
        spans[name] = (at, at + spec.nbytes)
        at += spec.nbytes
    other = FileInfo(size=9, checksum="1" * 32, rank=rank)
    fields: dict[str, Any] = {
        "format": 2,
        "layout": "dcp",
        "file": f"__{rank}_0.distcp",
        "spans": spans,
        "others": {f".metadata{rank}": other},
    }
    return msgspec.structs.replace(own, **(fields | changed))


@st.composite
def grids(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A global shape and boxes that tile it, in any order."""
    cuts = draw(
        st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=0, max_size=3)
    )
    axes = []
    for sizes in cuts:
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        axes.append(list(zip(starts, sizes, strict=True)))
    boxes = [
        (tuple(start for start, _ in cell), tuple(size for _, size in cell))
        for cell in itertools.product(*axes)
    ]
    return tuple(sum(sizes) for sizes in cuts), draw(st.permutations(boxes))
