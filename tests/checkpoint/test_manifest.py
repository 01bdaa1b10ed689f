from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import manifest
from keepstep.checkpoint.manifest import Chunk, FileInfo, Manifest, RankTensor, TensorInfo
from keepstep.errors import CheckpointCorrupt, CheckpointError
from keepstep.wire.types import Version
from tests.checkpoint.receipts import foreign, grids, native
from tests.checkpoint.shards import make_version

FORMAT_1_RECEIPT = (
    b'{"digest":"ff8b79610ec42dec550114db43b232ef","format":1,"version":{"run":"demo","term":1,'
    b'"round":1,"step":5,"world":2},"rank":0,"file":"rank-00000.safetensors","size":4133,'
    b'"checksum":"00000000000000000000000000000000","tensors":{"count":{"name":"count",'
    b'"dtype":"I64","shape":[],"global_shape":[],"offsets":[],"kind":"shard"},"weight":{'
    b'"name":"weight","dtype":"F32","shape":[2,3],"global_shape":[4,3],"offsets":[0,0],'
    b'"kind":"shard"},"rng":{"name":"rng","dtype":"U8","shape":[5],"global_shape":[5],'
    b'"offsets":[0],"kind":"rank"}},"values":{"lr":0.1,"seen":0}}\n'
)
FORMAT_1_MANIFEST = (
    b'{"digest":"305e826cb5b02cbd7f69833c1443a5ae","format":1,"version":{"run":"demo","term":1,'
    b'"round":1,"step":5,"world":2},"created":12.5,"files":{"rank-00000.safetensors":{"size":4133,'
    b'"checksum":"00000000000000000000000000000000","rank":0},"rank-00001.safetensors":{'
    b'"size":4125,"checksum":"00000000000000000000000000000000","rank":1}},"tensors":{"count":{'
    b'"dtype":"I64","global_shape":[],"chunks":[{"rank":0,"offsets":[],"shape":[]}]},"weight":{'
    b'"dtype":"F32","global_shape":[4,3],"chunks":[{"rank":0,"offsets":[0,0],"shape":[2,3]},{'
    b'"rank":1,"offsets":[2,0],"shape":[2,3]}]}},"rank_tensors":{"rng":[{"rank":0,"dtype":"U8",'
    b'"shape":[5]},{"rank":1,"dtype":"U8","shape":[5]}]},"values":{"lr":0.1},"rank_values":{"0":{'
    b'"seen":0},"1":{"seen":10}}}\n'
)


def _manifest(world: int = 2) -> Manifest:
    version = make_version(world=world)
    return manifest.assemble([native(version, rank) for rank in range(world)], 12.5)


def test_a_manifest_is_assembled_from_the_receipts_of_all_ranks_in_any_order() -> None:
    version = make_version(world=3)
    receipts = [native(version, rank) for rank in (2, 0, 1)]
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
    receipts = [native(version, 0, **shared, seen=1), native(version, 1, **shared, seen=2)]
    found = manifest.decode(manifest.encode(manifest.assemble(receipts, 0.0)))
    assert sorted(found.values) == ["lr", "table"]
    assert sorted(found.rank_values) == [0, 1]
    assert found.values_of(0) == {**shared, "seen": 1}
    assert found.values_of(1) == {**shared, "seen": 2}


def test_a_value_that_one_rank_lacks_is_not_given_to_it() -> None:
    version = make_version()
    found = manifest.assemble([native(version, 0, a=1, b=2), native(version, 1, a=1)], 0.0)
    assert found.values_of(0) == {"a": 1, "b": 2}
    assert found.values_of(1) == {"a": 1}


def test_equal_manifests_give_equal_bytes_and_decode_to_the_same() -> None:
    version = make_version()
    receipts = [native(version, rank) for rank in range(2)]
    text = manifest.encode(manifest.assemble(receipts, 1.0))
    assert text == manifest.encode(manifest.assemble(receipts[::-1], 1.0))
    assert manifest.encode(manifest.decode(text)) == text
    receipt = manifest.encode_receipt(receipts[0])
    assert manifest.decode_receipt(receipt) == receipts[0]


def test_the_bytes_of_format_1_never_change() -> None:
    """Checkpoints of any release stay readable, and equal saves have equal manifests."""
    receipt, found = native(make_version(), 0), _manifest()
    assert manifest.encode_receipt(receipt) == FORMAT_1_RECEIPT
    assert manifest.encode(found) == FORMAT_1_MANIFEST
    assert manifest.decode_receipt(FORMAT_1_RECEIPT) == receipt
    assert manifest.decode(FORMAT_1_MANIFEST) == found
    assert found.layout == receipt.layout == "safetensors"


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
        manifest.assemble([native(make_version(), 0), native(other, 1)], 0.0)


def test_a_rank_missing_or_there_twice_is_refused() -> None:
    version = make_version()
    first, second = native(version, 0), native(version, 1)
    for receipts in ([first], [second], [first, first], []):
        with pytest.raises(CheckpointCorrupt):
            manifest.assemble(receipts, 0.0)


def test_ranks_that_disagree_about_a_tensor_are_refused() -> None:
    version = make_version()
    second = native(version, 1)
    spec = msgspec.structs.replace(second.tensors["weight"], dtype="F64")
    second = msgspec.structs.replace(second, tensors={**second.tensors, "weight": spec})
    with pytest.raises(CheckpointCorrupt, match="says that 'weight' is F64"):
        manifest.assemble([native(version, 0), second], 0.0)


def test_every_changed_byte_of_a_manifest_and_of_a_receipt_is_found() -> None:
    text = manifest.encode(_manifest())
    receipt = manifest.encode_receipt(native(make_version(), 0))
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
    newer = msgspec.structs.replace(_manifest(), format=4)
    with pytest.raises(CheckpointError, match="format 4, and this keepstep reads formats up to 3"):
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
        files={f"f{rank}": FileInfo(size=1 << 40, checksum="", rank=rank) for rank in range(world)},
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


@given(grids())
def test_chunks_that_tile_the_tensor_are_accepted(grid: Any) -> None:
    whole, boxes = grid
    manifest.check(_tensor(whole, boxes))


@given(grids(), st.data())
def test_a_hole_or_an_overlap_is_always_found(grid: Any, data: st.DataObject) -> None:
    whole, boxes = grid
    at = data.draw(st.integers(0, len(boxes) - 1))
    with pytest.raises(CheckpointCorrupt, match="chunks hold"):
        manifest.check(_tensor(whole, boxes[:at] + boxes[at + 1 :]))
    with pytest.raises(CheckpointCorrupt, match="overlap"):
        manifest.check(_tensor(whole, [*boxes, boxes[at]]))


@given(grids(), st.data())
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


# Files of other libraries ------------------------------------------------------------------------


def test_a_manifest_of_other_files_says_where_the_bytes_are_and_comes_back() -> None:
    receipts = [foreign(rank) for rank in range(2)]
    found = manifest.assemble(receipts, 1.0)
    assert (found.format, found.layout) == (2, "dcp")
    assert found.spans == {0: receipts[0].spans, 1: receipts[1].spans}
    assert found.spans[1]["weight"] == (100, 124)
    assert sorted(found.others) == [".metadata0", ".metadata1"]
    assert found.nbytes == sum(receipt.size + 9 for receipt in receipts)
    assert list(found.all_files()) == [*found.files, *found.others]
    assert manifest.decode(manifest.encode(found)) == found
    assert manifest.decode_receipt(manifest.encode_receipt(receipts[0])) == receipts[0]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"spans": {}}, r"bytes are named for the ranks \[0\], the tensors are of \[0, 1\]"),
        ({"spans": {"weight": (100, 124)}}, r"rank 1: only one of tensors and spans has \['rng'\]"),
        ({"spans": {"weight": (100, 123), "rng": (0, 5)}}, "has 24 bytes and lies at 100 to 123"),
        ({"spans": {"weight": (124, 100), "rng": (0, 5)}}, "has 24 bytes and lies at 124 to 100"),
        ({"spans": {"weight": (9000, 9024), "rng": (0, 5)}}, "lies at 9000 to 9024 of 4"),
        ({"others": {".metadata0": FileInfo(size=1, checksum="", rank=1)}}, "of another rank"),
        ({"others": {".metadata": FileInfo(size=1, checksum="", rank=0)}}, "of another rank"),
        ({"others": {"__0_0.distcp": FileInfo(size=1, checksum="", rank=1)}}, "are shards too"),
        ({"others": {"../x": FileInfo(size=1, checksum="", rank=1)}}, "leads out"),
        ({"file": "../x"}, "leads out"),
        ({"file": "__0_0.distcp"}, "its files are of the ranks"),
        ({"layout": "torch"}, "has torch files, a lower rank dcp"),
        ({"layout": "safetensors", "format": 1}, "has safetensors files, a lower rank dcp"),
    ],
)
def test_bytes_that_cannot_be_where_they_should_are_refused(
    changed: dict[str, Any], why: str
) -> None:
    with pytest.raises(CheckpointCorrupt, match=why):
        manifest.assemble([foreign(0), foreign(1, **changed)], 0.0)


def test_a_rank_with_two_parts_of_a_tensor_has_no_bytes_for_one() -> None:
    found = manifest.assemble([foreign(0), foreign(1)], 0.0)
    weight = found.tensors["weight"]
    both = tuple(msgspec.structs.replace(chunk, rank=1) for chunk in weight.chunks)
    tensors = {**found.tensors, "weight": msgspec.structs.replace(weight, chunks=both)}
    with pytest.raises(CheckpointCorrupt, match="rank 1 has two parts of 'weight'"):
        manifest.check(msgspec.structs.replace(found, tensors=tensors))


def test_format_and_layout_belong_together() -> None:
    other, own = manifest.assemble([foreign(0), foreign(1)], 0.0), _manifest()
    for wrong in (
        msgspec.structs.replace(other, format=1),
        msgspec.structs.replace(own, format=2),
        msgspec.structs.replace(own, layout="torch"),
        msgspec.structs.replace(own, spans=other.spans),
        msgspec.structs.replace(own, others=other.others),
    ):
        with pytest.raises(CheckpointCorrupt):
            manifest.decode(manifest.encode(wrong))
    with pytest.raises(CheckpointCorrupt, match="format 1 has no dcp files"):
        manifest.decode_receipt(manifest.encode_receipt(foreign(0, format=1)))


def test_tensors_with_more_bytes_than_their_file_are_refused_before_anybody_makes_room() -> None:
    found = _manifest()
    huge = RankTensor(rank=1, dtype="F64", shape=(1 << 60,))
    wrong = msgspec.structs.replace(found, rank_tensors={"rng": (huge,)})
    with pytest.raises(CheckpointCorrupt, match="the tensors of rank 1 have"):
        manifest.check(wrong)
