"""Pieces: any region of a stored chunk into any target, whatever way its bytes arrive."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.torch_pieces import BlockPiece, BytePiece, Region, piece
from keepstep.checkpoint.torch_state import DTYPES

BLOCK = 64


def raw(values: torch.Tensor) -> bytes:
    flat = values.contiguous().view(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def fill(region: Region, target: torch.Tensor, values: torch.Tensor) -> BytePiece | BlockPiece:
    """Give a piece its bytes block by block, the last ones first."""
    one = piece(region, target, shared=False)
    stored = b"\xff" * region.begin + raw(values)
    for start in reversed(range(0, len(stored), BLOCK)):
        at, stop = max(start, one.start), min(start + BLOCK, one.stop, len(stored))
        if at < stop:
            one.take(
                at, memoryview(bytearray(stored[start : start + BLOCK]))[at - start : stop - start]
            )
    one.finish()
    return one


@settings(max_examples=150)
@given(
    shape=st.lists(st.integers(1, 7), min_size=0, max_size=3),
    data=st.data(),
    misplaced=st.integers(0, 9),
    turned=st.booleans(),
)
def test_any_region_arrives_in_any_target(
    shape: list[int], data: st.DataObject, misplaced: int, turned: bool
) -> None:
    values = torch.arange(float(math.prod(shape))).reshape(shape) + 1
    cuts = [data.draw(st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted)) for n in shape]
    offsets, lengths = tuple(a for a, _ in cuts), tuple(b - a for a, b in cuts)
    region = Region(misplaced, torch.float32, tuple(shape), offsets, lengths)
    expected = values[tuple(slice(a, b) for a, b in cuts)]
    target = (
        torch.zeros(lengths[::-1]).permute(tuple(reversed(range(len(shape)))))
        if turned
        else (torch.zeros(lengths))
    )
    fill(region, target, values)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_every_type_arrives_bit_by_bit(dtype: torch.dtype, turned: bool) -> None:
    # 0 and 1 are the only bytes that a bool may have.
    content = torch.arange(12 * dtype.itemsize, dtype=torch.uint8) * (dtype != torch.bool)
    values = content.view(dtype).view(3, 4)
    target = torch.zeros(4, 3, dtype=dtype).T if turned else torch.zeros(3, 4, dtype=dtype)
    region = Region(8, dtype, (3, 4), (0, 0), (3, 4))
    fill(region, target, values)
    assert raw(target) == raw(values)


def test_a_span_is_from_the_first_to_the_last_element() -> None:
    for low, high in itertools.combinations(range(5), 2):
        region = Region(100, torch.int16, (4, 4), (1, low), (2, high - low))
        assert region.span() == (100 + 2 * (4 + low), 100 + 2 * (8 + high))
        assert region.gapless == (high - low == 4)
    assert Region(100, torch.int16, (4, 4), (1, 2), (0, 2)).span() == (100, 100)
    assert Region(100, torch.int16, (), (), ()).span() == (100, 102)


def test_bytes_with_others_between_them_may_be_wanted_by_others_too() -> None:
    columns = Region(0, torch.float32, (4, 4), (0, 0), (4, 2))
    rows = Region(0, torch.float32, (4, 4), (0, 0), (2, 4))
    assert piece(columns, torch.zeros(4, 2), shared=False).shared
    assert not piece(rows, torch.zeros(2, 4), shared=False).shared
    assert not piece(rows, torch.zeros(4, 2).T, shared=False).shared
    assert piece(rows, torch.zeros(2, 4), shared=True).shared
