"""Manifests of format 3: blocks of files, and several chunks of a tensor in one file."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import blocks, manifest, shard_file
from keepstep.checkpoint.manifest import Chunk, Manifest, Receipt, TensorInfo
from keepstep.checkpoint.shard_file import ShardPlan, TensorSpec
from keepstep.errors import CheckpointCorrupt
from keepstep.wire.types import Version
from tests.checkpoint.receipts import foreign, grids, native
from tests.checkpoint.shards import image, make_version

BLOCK = 4096


def _described(size: int) -> dict[str, Any]:
    """Blocks of a file of zeros."""
    each = [
        blocks.digest(bytes(stop - start))
        for start, stop in (blocks.span(at, size, BLOCK) for at in range(blocks.count(size, BLOCK)))
    ]
    text = blocks.encode(each)
    return {"checksum": blocks.combine(each), "block_bytes": BLOCK, "blocks": text}


def _with_blocks(version: Version, rank: int, specs: list[TensorSpec] | None = None) -> Receipt:
    data = image(version, rank)
    if specs is None:
        header = shard_file.parse_header(data, len(data))
    else:
        plan = ShardPlan(specs, version, rank, {"a": 1})
        header = shard_file.parse_header(plan.header, plan.size)
    return manifest.receipt_of(header, **_described(header.size))


def test_what_is_written_has_blocks_and_comes_back() -> None:
    version = make_version()
    receipts = [_with_blocks(version, rank) for rank in range(2)]
    found = manifest.assemble(receipts, 1.0)
    assert (found.format, receipts[0].format) == (3, 3) == (manifest.FORMAT,) * 2
    assert manifest.format_of("safetensors") == 3
    assert manifest.decode(manifest.encode(found)) == found
    assert manifest.decode_receipt(manifest.encode_receipt(receipts[1])) == receipts[1]
    info = found.files["rank-00000.safetensors"]
    assert info == receipts[0].info
    assert len(info.block_digests()) == 2
    assert [info.block_span(at) for at in range(2)] == [(0, 4096), (4096, info.size)]


_ODD: list[dict[str, Any]] = [
    {"blocks": ""},
    {"blocks": "0" * 64},
    {"blocks": "zz" * 32},
    {"block_bytes": 0},
    {"block_bytes": 0, "blocks": ""},
    {"block_bytes": 8192},
    {"block_bytes": 3000},
    {"block_bytes": 1 << 62},
    {"size": 1 << 62},
    {"size": 0},
    {"checksum": "0" * 32},
    {"checksum": ""},
]


@pytest.mark.parametrize("changed", _ODD)
def test_blocks_that_are_not_those_of_the_file_are_refused(changed: dict[str, Any]) -> None:
    version = make_version()
    receipts = [_with_blocks(version, rank) for rank in range(2)]
    found = manifest.assemble(receipts, 1.0)
    files = {
        name: msgspec.structs.replace(info, **changed) if info.rank else info
        for name, info in found.files.items()
    }
    with pytest.raises(CheckpointCorrupt, match=r"rank-00001.safetensors"):
        manifest.decode(manifest.encode(msgspec.structs.replace(found, files=files)))
    bad = msgspec.structs.replace(receipts[1], **changed)
    with pytest.raises(CheckpointCorrupt):
        manifest.decode_receipt(manifest.encode_receipt(bad))
    with pytest.raises(CheckpointCorrupt):
        manifest.assemble([receipts[0], bad], 1.0)


@pytest.mark.parametrize("number", [1, 2])
def test_older_formats_have_neither_blocks_nor_parts(number: int) -> None:
    one = native(make_version(world=1), 0) if number == 1 else foreign(0, world=1)
    found = manifest.assemble([one], 1.0)
    (name, info), *_ = found.files.items()
    files = {name: msgspec.structs.replace(info, **_described(info.size))}
    with pytest.raises(CheckpointCorrupt, match=f"format {number} has no blocks"):
        manifest.decode(manifest.encode(msgspec.structs.replace(found, files=files)))
    bad = msgspec.structs.replace(one, **_described(info.size))
    with pytest.raises(CheckpointCorrupt, match=f"format {number} has no blocks"):
        manifest.decode_receipt(manifest.encode_receipt(bad))
    weight = found.tensors["weight"]
    chunk = msgspec.structs.replace(weight.chunks[0], key="count")
    tensors = {**found.tensors, "weight": msgspec.structs.replace(weight, chunks=(chunk,))}
    with pytest.raises(CheckpointCorrupt, match="cannot have the part 'count' of 'weight'"):
        manifest.check(msgspec.structs.replace(found, tensors=tensors))
    spec = msgspec.structs.replace(one.tensors["count"], of="weight")
    bad = msgspec.structs.replace(one, tensors={**one.tensors, "count": spec})
    with pytest.raises(CheckpointCorrupt, match=f"format {number} has no chunks of other"):
        manifest.decode_receipt(manifest.encode_receipt(bad))


def test_receipts_of_different_formats_never_combine() -> None:
    version = make_version()
    with pytest.raises(CheckpointCorrupt, match="rank 1 has format 1, a lower rank 3"):
        manifest.assemble([_with_blocks(version, 0), native(version, 1)], 0.0)


@given(grids(), st.integers(1, 3), st.data())
def test_chunks_of_one_tensor_may_lie_in_any_files_under_any_names(
    grid: Any, world: int, data: st.DataObject
) -> None:
    whole, boxes = grid
    version = make_version(world=world)
    specs: list[list[TensorSpec]] = [[] for _ in range(world)]
    expected: list[Chunk] = []
    for number, (offsets, shape) in enumerate(boxes):
        rank = data.draw(st.integers(0, world - 1))
        key = "w" if not specs[rank] and data.draw(st.booleans()) else f"w#{number}"
        of = "" if key == "w" else "w"
        specs[rank].append(
            TensorSpec(
                name=key, of=of, dtype="F32", shape=shape, global_shape=whole, offsets=offsets
            )
        )
        expected.append(
            Chunk(rank=rank, offsets=offsets, shape=shape, key="" if key == "w" else key)
        )
    receipts = [_with_blocks(version, rank, one) for rank, one in enumerate(specs)]
    found = manifest.assemble(receipts, 1.0)
    assert list(found.tensors) == ["w"]
    assert sorted(found.tensors["w"].chunks, key=lambda c: (c.rank, c.offsets)) == sorted(
        expected, key=lambda c: (c.rank, c.offsets)
    )
    assert manifest.decode(manifest.encode(found)) == found
    for one in receipts:
        assert manifest.decode_receipt(manifest.encode_receipt(one)) == one


def _split() -> Manifest:
    """A tensor whose first half is rank 0's entry ``w``, and whose second is its ``w#1``."""
    halves = [
        TensorSpec(name="w", dtype="U8", shape=(2,), global_shape=(4,), offsets=(0,)),
        TensorSpec(name="w#1", of="w", dtype="U8", shape=(2,), global_shape=(4,), offsets=(2,)),
    ]
    own = TensorSpec(
        name="rng", dtype="U8", shape=(1,), global_shape=(1,), offsets=(0,), kind="rank"
    )
    return manifest.assemble([_with_blocks(make_version(world=1), 0, [*halves, own])], 1.0)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("", "two parts of 'w'"),
        ("w", "cannot have the part 'w' of 'w'"),
        ("rng", "two parts of 'rng'"),
    ],
)
def test_an_entry_of_a_file_is_one_part_only(key: str, why: str) -> None:
    found = _split()
    manifest.check(found)
    first, second = found.tensors["w"].chunks
    chunks = (first, msgspec.structs.replace(second, key=key))
    tensors = {"w": msgspec.structs.replace(found.tensors["w"], chunks=chunks)}
    with pytest.raises(CheckpointCorrupt, match=why):
        manifest.decode(manifest.encode(msgspec.structs.replace(found, tensors=tensors)))


def test_a_world_that_nobody_can_count_is_refused_at_once() -> None:
    found = _split()
    version = msgspec.structs.replace(found.version, world=1 << 60)
    with pytest.raises(CheckpointCorrupt, match="its files are of the ranks"):
        manifest.check(msgspec.structs.replace(found, version=version))


def test_a_tensor_of_an_unknown_type_is_refused_although_it_is_empty() -> None:
    found = _split()
    empty = TensorInfo(dtype="OBJECT", global_shape=(0,), chunks=())
    with pytest.raises(CheckpointCorrupt, match="'OBJECT' is not known"):
        manifest.check(msgspec.structs.replace(found, tensors={**found.tensors, "x": empty}))
