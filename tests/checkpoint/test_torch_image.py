"""The image is a valid safetensors file with the values at the call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from keepstep.checkpoint.shard_file import parse_header
from keepstep.checkpoint.torch_image import ShardImage
from keepstep.checkpoint.torch_state import DTYPES, flatten
from tests.checkpoint.torch_worlds import version


def image_of(tracked: dict[str, object]) -> bytearray:
    image = ShardImage(flatten(tracked, rank=0, world=1), version(7), 0)
    buffer = bytearray(image.size)
    image.write_into(buffer)
    return buffer


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def test_every_type_comes_back_bit_by_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 2, (48,), generator=generator, dtype=torch.uint8)
    state = {name: raw.clone().view(dtype) for dtype, name in DTYPES.items()}
    buffer = image_of({"t": state})
    header = parse_header(bytes(buffer), len(buffer))
    for name, tensor in state.items():
        start, stop = header.spans[f"t.{name}"]
        assert bytes(buffer[start:stop]) == bits(tensor), name


def test_others_can_read_it_too(tmp_path: Path) -> None:
    state = {
        "scalar": torch.tensor(3.5),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "part": torch.arange(10)[::3],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.ones(0, 2),
    }
    path = tmp_path / "shard.safetensors"
    path.write_bytes(image_of({"t": state}))
    found = safetensors.torch.load_file(path)
    assert found.keys() == {f"t.{name}" for name in state}
    assert all(torch.equal(found[f"t.{name}"], tensor) for name, tensor in state.items())


def test_the_header_names_version_and_place() -> None:
    buffer = image_of({"t": torch.ones(2)})
    length = int.from_bytes(buffer[:8], "little")
    ours = json.loads(json.loads(buffer[8 : 8 + length])["__metadata__"]["keepstep"])
    assert (8 + length) % 4096 == 0
    assert ours["version"]["step"] == 7
    assert ours["tensors"] == {"t": {"global_shape": [2], "offsets": [0], "kind": "rank"}}


def test_later_changes_are_not_in_the_image() -> None:
    tensor = torch.ones(1000)
    buffer = image_of({"t": tensor})
    tensor.zero_()
    assert bytes(buffer[-4000:]) == bits(torch.ones(1000))


def test_a_buffer_that_is_too_small_is_refused() -> None:
    image = ShardImage(flatten({"t": torch.ones(2000)}, rank=0, world=1), version(), 0)
    with pytest.raises(ValueError, match="requested buffer length"):
        image.write_into(bytearray(image.size - 1))


def test_a_plan_of_an_earlier_save_gives_the_same_bytes_and_is_dropped_where_a_form_changed() -> (
    None
):
    state = {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.int64), "c": torch.ones(0)}
    first = ShardImage(flatten({"t": state, "n": {"at": 1}}, rank=0, world=1), version(1), 0)
    changed = [
        {**state, "a": torch.zeros(3)},
        {**state, "a": torch.ones(3, dtype=torch.float64)},
        {**state, "a": torch.ones(4)},
        {**state, "d": torch.ones(1)},
        {"b": state["b"], "a": state["a"], "c": state["c"]},
    ]
    for number, other in enumerate(changed):
        snapshot = flatten({"t": other, "n": {"at": 10**number}}, rank=0, world=1)
        fresh = ShardImage(snapshot, version(2), 0)
        again = ShardImage(snapshot, version(2), 0, first.planned)
        assert (again.planned is first.planned) == (number == 0)
        assert again.plan.header == fresh.plan.header
        buffers = [bytearray(fresh.size), bytearray(fresh.size)]
        fresh.write_into(buffers[0])
        again.write_into(buffers[1])
        assert buffers[0] == buffers[1]
