"""Runs of elements as blocks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from keepstep.checkpoint.torch_flat import FlatPart, blocks

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    whole = math.prod(shape)
    start = draw(st.integers(0, whole))
    return shape, start, draw(st.integers(start, whole))


@given(runs())
def test_the_blocks_of_a_run_are_its_elements_in_order(
    run: tuple[tuple[int, ...], int, int],
) -> None:
    shape, start, stop = run
    whole = torch.arange(math.prod(shape)).view(shape)
    taken: list[int] = []
    for offsets, sizes in blocks(shape, start, stop):
        block = whole
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            block = block.narrow(dim, offset, size)
        assert block.numel()
        taken += block.reshape(-1).tolist()
    assert taken == list(range(start, stop))


@given(runs())
def test_a_run_has_few_blocks(run: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = run
    assert len(blocks(shape, start, stop)) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_run_outside_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not inside a tensor"):
        blocks((2, 3), start, stop)


def test_blocks_are_views_of_the_live_values() -> None:
    part = FlatPart(torch.arange(5.0), (3, 3), 2)
    (_, first), (_, second), *_ = part.blocks()
    first.fill_(10.0)
    second.fill_(20.0)
    assert part.local.tolist() == [10.0, 20.0, 20.0, 20.0, 4.0]


def test_torchs_planner_finds_each_block_by_its_offsets() -> None:
    part = FlatPart(torch.arange(5.0), (3, 3), 2)
    for chunk in part.__create_chunk_list__():
        found = part.__get_tensor_shard__(MetadataIndex("weight", chunk.offsets))
        assert found.shape == chunk.sizes
    with pytest.raises(ValueError, match="no block of weight"):
        part.__get_tensor_shard__(MetadataIndex("weight", torch.Size((0, 0))))


def test_computing_with_a_part_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="of a part of a tensor"):
        FlatPart(torch.arange(5.0), (3, 3), 2) + 1


def test_an_empty_part_has_a_shape_and_no_blocks() -> None:
    part = FlatPart(torch.empty(0), (3, 3), 0)
    assert (part.shape, part.__create_chunk_list__()) == (torch.Size((3, 3)), [])
