from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import blocks, manifest, shard_file
from keepstep.checkpoint.manifest import Chunk, FileInfo, Manifest, Receipt, TensorInfo
from keepstep.checkpoint.shard_file import ShardPlan, TensorSpec
from keepstep.errors import CheckpointCorrupt, CheckpointError
from keepstep.wire.types import Version
from tests.checkpoint.shards import image, make_version

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


def test_the_bytes_of_format_1_never_change() -> None:
    """Checkpoints of any release stay readable, and equal saves have equal manifests."""
    receipt, found = _receipt(make_version(), 0), _manifest()
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


# Blocks and several chunks of one rank -----------------------------------------------------------

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
    receipt = _receipt(make_version(world=1), 0) if number == 1 else _foreign(0, world=1)
    found = manifest.assemble([receipt], 1.0)
    (name, info), *_ = found.files.items()
    files = {name: msgspec.structs.replace(info, **_described(info.size))}
    with pytest.raises(CheckpointCorrupt, match=f"format {number} has no blocks"):
        manifest.decode(manifest.encode(msgspec.structs.replace(found, files=files)))
    bad = msgspec.structs.replace(receipt, **_described(info.size))
    with pytest.raises(CheckpointCorrupt, match=f"format {number} has no blocks"):
        manifest.decode_receipt(manifest.encode_receipt(bad))
    weight = found.tensors["weight"]
    chunk = msgspec.structs.replace(weight.chunks[0], key="count")
    tensors = {**found.tensors, "weight": msgspec.structs.replace(weight, chunks=(chunk,))}
    with pytest.raises(CheckpointCorrupt, match="cannot have the part 'count' of 'weight'"):
        manifest.check(msgspec.structs.replace(found, tensors=tensors))
    spec = msgspec.structs.replace(receipt.tensors["count"], of="weight")
    bad = msgspec.structs.replace(receipt, tensors={**receipt.tensors, "count": spec})
    with pytest.raises(CheckpointCorrupt, match=f"format {number} has no chunks of other"):
        manifest.decode_receipt(manifest.encode_receipt(bad))


def test_receipts_of_different_formats_never_combine() -> None:
    version = make_version()
    with pytest.raises(CheckpointCorrupt, match="rank 1 has format 1, a lower rank 3"):
        manifest.assemble([_with_blocks(version, 0), _receipt(version, 1)], 0.0)


@given(_grids(), st.integers(1, 3), st.data())
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
    for receipt in receipts:
        assert manifest.decode_receipt(manifest.encode_receipt(receipt)) == receipt


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


# Files of other libraries ------------------------------------------------------------------------


def _foreign(rank: int, world: int = 2, **changed: Any) -> Receipt:
    native = _receipt(make_version(world=world), rank)
    spans, at = {}, 100
    for name, spec in native.tensors.items():
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
    return msgspec.structs.replace(native, **(fields | changed))


def test_a_manifest_of_other_files_says_where_the_bytes_are_and_comes_back() -> None:
    receipts = [_foreign(rank) for rank in range(2)]
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
        manifest.assemble([_foreign(0), _foreign(1, **changed)], 0.0)


def test_a_rank_with_two_parts_of_a_tensor_has_no_bytes_for_one() -> None:
    found = manifest.assemble([_foreign(0), _foreign(1)], 0.0)
    weight = found.tensors["weight"]
    both = tuple(msgspec.structs.replace(chunk, rank=1) for chunk in weight.chunks)
    tensors = {**found.tensors, "weight": msgspec.structs.replace(weight, chunks=both)}
    with pytest.raises(CheckpointCorrupt, match="rank 1 has two parts of 'weight'"):
        manifest.check(msgspec.structs.replace(found, tensors=tensors))


def test_format_and_layout_belong_together() -> None:
    other, own = manifest.assemble([_foreign(0), _foreign(1)], 0.0), _manifest()
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
        manifest.decode_receipt(manifest.encode_receipt(_foreign(0, format=1)))
