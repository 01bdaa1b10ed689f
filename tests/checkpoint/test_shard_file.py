from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint import shard_file
from keepstep.checkpoint.shard_file import ALIGNMENT, ITEM_BYTES, ShardPlan, TensorSpec
from keepstep.errors import CheckpointCorrupt, CheckpointError
from tests.checkpoint.shards import image, make_version


@st.composite
def _specs(draw: st.DrawFn) -> TensorSpec:
    whole = draw(st.lists(st.integers(1, 5), max_size=3))
    offsets = [draw(st.integers(0, size - 1)) for size in whole]
    shape = [draw(st.integers(0, size - at)) for size, at in zip(whole, offsets, strict=True)]
    return TensorSpec(
        name=draw(st.text(min_size=1, max_size=8)),
        dtype=draw(st.sampled_from(sorted(ITEM_BYTES))),
        shape=tuple(shape),
        global_shape=tuple(whole),
        offsets=tuple(offsets),
        kind=draw(st.sampled_from(["shard", "rank"])),
    )


_MANY = st.lists(_specs(), max_size=8, unique_by=lambda spec: spec.name)


@given(_MANY, st.dictionaries(st.text(max_size=4), st.integers() | st.binary(), max_size=3))
def test_a_header_says_what_was_planned_and_every_tensor_is_aligned(
    wanted: list[TensorSpec], values: dict[str, Any]
) -> None:
    version = make_version(9, world=3)
    plan = ShardPlan(wanted, version, 2, values)
    assert plan.header == shard_file.build_header(wanted, version, 2, values)
    assert len(plan.header) == plan.data_start
    assert plan.data_start % ALIGNMENT == 0
    header = shard_file.parse_header(plan.header, plan.size)
    assert (header.version, header.rank, header.size) == (version, 2, plan.size)
    assert header.tensors == {spec.name: spec for spec in wanted}
    assert header.decode_values() == values
    covered = plan.data_start
    for spec in plan.specs:
        start, stop = header.spans[spec.name]
        assert start == plan.offset_of(spec.name) == covered
        assert stop - start == spec.nbytes
        assert start % ITEM_BYTES[spec.dtype] == 0
        covered = stop
    assert covered == plan.size


def test_the_safetensors_package_reads_an_image_byte_for_byte() -> None:
    data = image(make_version(), 0, fill=9, values={"note": 'quotes " and \\ and ü'})
    found = dict(safetensors.deserialize(data))
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in found.items()} == {
        "count": ("I64", []),
        "weight": ("F32", [2, 3]),
        "rng": ("U8", [5]),
    }
    assert bytes(found["weight"]["data"]) == b"\x09" * 24


def test_a_shard_without_tensors_is_a_whole_file(tmp_path: Path) -> None:
    plan = ShardPlan([], make_version(), 1, {})
    assert plan.size == plan.data_start == ALIGNMENT
    assert safetensors.deserialize(plan.header) == []
    path = tmp_path / "file"
    path.write_bytes(plan.header)
    assert shard_file.read_header(path).tensors == {}


def _spec(**changes: Any) -> TensorSpec:
    fields: dict[str, Any] = {
        "name": "w",
        "dtype": "F32",
        "shape": (2,),
        "global_shape": (4,),
        "offsets": (2,),
    }
    return TensorSpec(**{**fields, **changes})


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ([_spec(dtype="C128")], "dtype 'C128' is not known"),
        ([_spec(offsets=(3,))], "not inside global shape"),
        ([_spec(offsets=(-1,))], "not inside global shape"),
        ([_spec(offsets=())], "different numbers of dimensions"),
        ([_spec(), _spec()], "used twice"),
        ([_spec(name="__metadata__")], "reserved"),
    ],
)
def test_a_tensor_that_cannot_be_kept_is_refused_by_name(
    wanted: list[TensorSpec], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason) as caught:
        ShardPlan(wanted, make_version(), 0, {})
    assert repr(wanted[-1].name) in str(caught.value)


def test_a_value_that_cannot_be_kept_is_refused_by_key() -> None:
    with pytest.raises(CheckpointError, match="scheduler"):
        ShardPlan([], make_version(), 0, {"scheduler": object()})


def _rebuilt(change: Any, size: int = 4096) -> bytes:
    """An image whose header, now of ``size`` bytes, went through ``change(entries, ours)``."""
    data = image(make_version(), 0)
    (length,) = struct.unpack_from("<Q", data)
    entries = json.loads(data[8 : 8 + length])
    ours = json.loads(entries["__metadata__"]["keepstep"])
    change(entries, ours)
    entries["__metadata__"]["keepstep"] = json.dumps(ours)
    text = json.dumps(entries).encode()
    return struct.pack("<Q", size - 8) + text.ljust(size - 8) + data[8 + length :]


def _set(*path: Any) -> Any:
    """A change that puts the last item at the path of the others; the first picks the half."""

    def change(entries: Any, ours: Any) -> None:
        *keys, last, value = path[1:]
        at = entries if path[0] == "entries" else ours
        for key in keys:
            at = at[key]
        at[last] = value

    return change


def test_an_unchanged_header_survives_the_rebuilding_that_the_next_test_uses() -> None:
    data = _rebuilt(lambda entries, ours: None)
    assert shard_file.parse_header(data, len(data)).rank == 0


@pytest.mark.parametrize(
    "change",
    [
        _set("entries", "weight", "data_offsets", [8, 40]),
        _set("entries", "weight", "data_offsets", [0, 24]),
        _set("entries", "weight", "data_offsets", [8, 1 << 60]),
        _set("entries", "weight", "data_offsets", [-8, 16]),
        _set("entries", "weight", "data_offsets", [32, 8]),
        _set("entries", "weight", "shape", [3, 3]),
        _set("entries", "weight", "shape", [1 << 61, 1 << 61]),
        _set("entries", "weight", "shape", [-2, -3]),
        _set("entries", "weight", "dtype", "F64"),
        _set("entries", "weight", "dtype", "OBJECT"),
        _set("entries", "weight", "extra", 1),
        _set("entries", "stranger", {"dtype": "U8", "shape": [0], "data_offsets": [37, 37]}),
        _set("entries", "weight", None),
        _set("ours", "tensors", "weight", "offsets", [3, 0]),
        _set("ours", "tensors", "weight", "offsets", [0]),
        _set("ours", "tensors", "weight", "kind", "other"),
        _set("ours", "rank", 2),
        _set("ours", "rank", -1),
        _set("ours", "format", 0),
        _set("ours", "format", "1"),
        _set("ours", "version", "step", -1),
        _set("ours", "version", "world", None),
        _set("ours", "tensors", {}),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(change: Any) -> None:
    data = _rebuilt(change)
    with pytest.raises(CheckpointCorrupt):
        shard_file.parse_header(data, len(data), where="file")


def test_a_newer_format_is_refused_with_advice() -> None:
    data = _rebuilt(_set("ours", "format", 3))
    with pytest.raises(
        CheckpointError, match="format 3, and this keepstep reads formats up to 2"
    ) as caught:
        shard_file.parse_header(data, len(data))
    assert not isinstance(caught.value, CheckpointCorrupt)
    assert "install" in caught.value.advice


@pytest.mark.parametrize("cut", [0, 7, 8, 100, 4095, 4096, -1])
def test_a_file_cut_short_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(image(make_version(), 0)[:cut])
    with pytest.raises(CheckpointCorrupt):
        shard_file.read_header(path)


def test_a_file_with_bytes_too_many_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(image(make_version(), 0) + b"\0")
    with pytest.raises(CheckpointCorrupt, match="its header says"):
        shard_file.read_header(path)


@pytest.mark.parametrize("length", [0, 1, 1 << 40, (1 << 64) - 1])
def test_a_header_length_that_is_impossible_is_refused_without_reading_so_much(
    tmp_path: Path, length: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(struct.pack("<Q", length) + b"{}".ljust(8192))
    with pytest.raises(CheckpointCorrupt):
        shard_file.read_header(path)


def test_a_header_that_is_nested_without_end_is_refused() -> None:
    text = b'{"a":' + b"[" * 60_000 + b"]" * 60_000 + b"}"
    size = -(-(len(text) + 8) // ALIGNMENT) * ALIGNMENT
    data = struct.pack("<Q", size - 8) + text.ljust(size - 8)
    with pytest.raises(CheckpointCorrupt):
        shard_file.parse_header(data, size)


def test_several_chunks_of_a_tensor_in_one_file_have_an_entry_each() -> None:
    parts = [
        _spec(name="w", shape=(1,), offsets=(0,)),
        _spec(name="w#1", of="w", shape=(2,), offsets=(2,)),
    ]
    plan = ShardPlan(parts, make_version(), 0, {})
    header = shard_file.parse_header(plan.header, plan.size)
    assert header.tensors == {"w": parts[0], "w#1": parts[1]}
    assert [header.tensors[name].tensor for name in ("w", "w#1")] == ["w", "w"]
    assert dict(safetensors.deserialize(plan.header + bytes(12))).keys() == {"w", "w#1"}


def _format(header: bytes) -> int:
    (length,) = struct.unpack_from("<Q", header)
    ours = json.loads(json.loads(header[8 : 8 + length])["__metadata__"]["keepstep"])
    assert isinstance(ours["format"], int)
    return ours["format"]


def test_only_a_header_that_an_older_reader_would_misunderstand_has_a_newer_format() -> None:
    plain = ShardPlan([_spec()], make_version(), 0, {}).header
    assert _format(plain) == 1
    assert b"of" not in plain.replace(b"offsets", b"")
    assert _format(ShardPlan([_spec(of="whole")], make_version(), 0, {}).header) == 2


@pytest.mark.parametrize("wanted", [_spec(of="w"), _spec(of="other", kind="rank")])
def test_an_entry_cannot_be_a_chunk_of_itself_or_of_a_value_of_one_rank(wanted: Any) -> None:
    with pytest.raises(CheckpointError, match="cannot be a chunk of"):
        ShardPlan([wanted], make_version(), 0, {})


def test_a_header_of_the_first_format_with_chunks_of_other_tensors_is_refused() -> None:
    data = _rebuilt(_set("ours", "tensors", "weight", "of", "whole"))
    with pytest.raises(CheckpointCorrupt, match="format 1 has no chunks of other tensors"):
        shard_file.parse_header(data, len(data))


@pytest.mark.parametrize("count", [65, 10_000])
def test_a_tensor_of_more_dimensions_than_any_is_refused(count: int) -> None:
    data = _rebuilt(_set("ours", "tensors", "weight", "global_shape", [1] * count), 32_768)
    with pytest.raises(CheckpointCorrupt):
        shard_file.parse_header(data, len(data))


@settings(max_examples=200)
@given(at=st.integers(0, 4095), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_header_is_refused_or_harmless_but_never_crashes(
    at: int, bit: int
) -> None:
    data = bytearray(image(make_version(), 0))
    data[at] ^= 1 << bit
    try:
        header = shard_file.parse_header(bytes(data), len(data))
    except CheckpointError:
        return
    assert all(0 <= start <= stop <= len(data) for start, stop in header.spans.values())
