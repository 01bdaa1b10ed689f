from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import manifest, shard_file
from keepstep.checkpoint.manifest import Chunk, FileInfo, Manifest, Receipt, TensorInfo
from keepstep.errors import CheckpointCorrupt, CheckpointError
from keepstep.wire.types import Version
from tests.checkpoint.shards import image, make_version


def _receipt(version: Version, rank: int, **values: Any) -> Receipt:
    data = image(version, rank, values=values or None)
    return manifest.receipt_of(shard_file.parse_header(data, len(data)), "0" * 32)


def _manifest(world: int = 2) -> Manifest:
    version = make_version(world=world)
    return manifest.assemble([_receipt(version, rank) for rank in range(world)], 12.5)


def test_a_manifest_is_assembled_from_the_receipts_of_all_ranks_in_any_order() -> None:
    version = make_version(world=3)
    receipts = [_receipt(version, rank) for rank in (2, 0, 1)]
    found = manifest.assemble(receipts, 12.5)
    assert found.version == version
    assert list(found.files) == [f"rank-0000{rank}.safetensors" for rank in range(3)]
    assert found.files_by_rank()[2] == "rank-00002.safetensors"
    assert found.nbytes == sum(receipt.size for receipt in receipts)
    assert list(found.tensors) == ["count", "weight"]
    assert found.tensors["weight"].global_shape == (6, 3)
    assert [chunk.offsets for chunk in found.tensors["weight"].chunks] == [(0, 0), (2, 0), (4, 0)]
    assert [one.rank for one in found.rank_tensors["rng"]] == [0, 1, 2]


def test_values_that_all_ranks_share_are_stored_once_and_come_back_for_each() -> None:
    version = make_version()
    shared = {"lr": (0.1, b"x"), "table": {1: 2}}
    receipts = [_receipt(version, 0, **shared, seen=1), _receipt(version, 1, **shared, seen=2)]
    found = manifest.decode(manifest.encode(manifest.assemble(receipts, 0.0)))
    assert sorted(found.values) == ["lr", "table"]
    assert sorted(found.rank_values) == [0, 1]
    assert found.values_of(0) == {**shared, "seen": 1}
    assert found.values_of(1) == {**shared, "seen": 2}


def test_a_value_that_one_rank_lacks_is_not_given_to_it() -> None:
    version = make_version()
    found = manifest.assemble([_receipt(version, 0, a=1, b=2), _receipt(version, 1, a=1)], 0.0)
    assert found.values_of(0) == {"a": 1, "b": 2}
    assert found.values_of(1) == {"a": 1}


def test_equal_manifests_give_equal_bytes_and_decode_to_the_same() -> None:
    version = make_version()
    receipts = [_receipt(version, rank) for rank in range(2)]
    text = manifest.encode(manifest.assemble(receipts, 1.0))
    assert text == manifest.encode(manifest.assemble(receipts[::-1], 1.0))
    assert manifest.encode(manifest.decode(text)) == text
    receipt = manifest.encode_receipt(receipts[0])
    assert manifest.decode_receipt(receipt) == receipts[0]


@pytest.mark.parametrize(
    "other",
    [
        make_version(6),
        make_version(run="other"),
        make_version(term=2),
        make_version(round=2),
        make_version(world=3),
    ],
)
def test_shards_of_different_versions_never_combine(other: Version) -> None:
    with pytest.raises(CheckpointCorrupt, match="a lower rank of"):
        manifest.assemble([_receipt(make_version(), 0), _receipt(other, 1)], 0.0)


def test_a_rank_missing_or_there_twice_is_refused() -> None:
    version = make_version()
    first, second = _receipt(version, 0), _receipt(version, 1)
    for receipts in ([first], [second], [first, first], []):
        with pytest.raises(CheckpointCorrupt):
            manifest.assemble(receipts, 0.0)


def test_ranks_that_disagree_about_a_tensor_are_refused() -> None:
    version = make_version()
    second = _receipt(version, 1)
    spec = msgspec.structs.replace(second.tensors["weight"], dtype="F64")
    second = msgspec.structs.replace(second, tensors={**second.tensors, "weight": spec})
    with pytest.raises(CheckpointCorrupt, match="says that 'weight' is F64"):
        manifest.assemble([_receipt(version, 0), second], 0.0)


def test_every_changed_byte_of_a_manifest_and_of_a_receipt_is_found() -> None:
    text = manifest.encode(_manifest())
    receipt = manifest.encode_receipt(_receipt(make_version(), 0))
    for data, decode in ((text, manifest.decode), (receipt, manifest.decode_receipt)):
        for at in range(len(data)):
            damaged = bytearray(data)
            damaged[at] ^= 1
            with pytest.raises(CheckpointError):
                decode(bytes(damaged))
        with pytest.raises(CheckpointCorrupt):
            decode(data[:-1])


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"format":1}', b"[" * 100_000, b"\xff"])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt):
        manifest.decode(data)


def test_a_newer_format_is_refused_with_a_clear_error() -> None:
    newer = msgspec.structs.replace(_manifest(), format=3)
    with pytest.raises(CheckpointError, match="format 3, and this keepstep reads formats up to 2"):
        manifest.decode(manifest.encode(newer))


def test_a_newer_format_with_unknown_fields_is_still_called_newer() -> None:
    with pytest.raises(CheckpointError, match="format 7"):
        manifest.decode(b'{"format":7,"chunks_v7":[]}')


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", "", "x\0y"])
def test_a_file_name_that_leads_out_of_the_folder_is_refused(name: str) -> None:
    found = _manifest()
    first, second = found.files.values()
    bad = msgspec.structs.replace(found, files={name: first, "rank-00001.safetensors": second})
    with pytest.raises(CheckpointCorrupt, match="leads out of the checkpoint's folder"):
        manifest.decode(manifest.encode(bad))


def _tensor(
    whole: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Manifest:
    """A manifest with one tensor and one rank for each box of (offsets, shape)."""
    world = max(len(boxes), 1)
    return Manifest(
        format=1,
        version=make_version(world=world),
        created=0.0,
        files={f"f{rank}": FileInfo(size=0, checksum="", rank=rank) for rank in range(world)},
        tensors={
            "w": TensorInfo(
                dtype="F32",
                global_shape=whole,
                chunks=tuple(
                    Chunk(rank=rank, offsets=offsets, shape=shape)
                    for rank, (offsets, shape) in enumerate(boxes)
                ),
            )
        },
        rank_tensors={},
        values={},
        rank_values={},
    )


@st.composite
def _grids(
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


@given(_grids())
def test_chunks_that_tile_the_tensor_are_accepted(grid: Any) -> None:
    whole, boxes = grid
    manifest.check(_tensor(whole, boxes))


@given(_grids(), st.data())
def test_a_hole_or_an_overlap_is_always_found(grid: Any, data: st.DataObject) -> None:
    whole, boxes = grid
    at = data.draw(st.integers(0, len(boxes) - 1))
    with pytest.raises(CheckpointCorrupt, match="chunks hold"):
        manifest.check(_tensor(whole, boxes[:at] + boxes[at + 1 :]))
    with pytest.raises(CheckpointCorrupt, match="overlap"):
        manifest.check(_tensor(whole, [*boxes, boxes[at]]))


@given(_grids(), st.data())
def test_a_chunk_moved_onto_another_is_found_although_the_sizes_still_add_up(
    grid: Any, data: st.DataObject
) -> None:
    whole, boxes = grid
    equal = [
        (a, b)
        for a, b in itertools.permutations(range(len(boxes)), 2)
        if boxes[a][1] == boxes[b][1]
    ]
    if not equal:
        return
    source, target = data.draw(st.sampled_from(equal))
    moved = list(boxes)
    moved[source] = boxes[target]
    with pytest.raises(CheckpointCorrupt, match="overlap"):
        manifest.check(_tensor(whole, moved))


def test_a_chunk_outside_its_tensor_is_refused() -> None:
    with pytest.raises(CheckpointCorrupt, match="not inside global shape"):
        manifest.check(_tensor((4,), [((0,), (4,)), ((4,), (1,))]))


def test_an_empty_chunk_counts_for_nothing() -> None:
    manifest.check(_tensor((4,), [((0,), (4,)), ((2,), (0,))]))
    manifest.check(_tensor((0, 3), [((0, 0), (0, 3)), ((0, 0), (0, 3))]))
