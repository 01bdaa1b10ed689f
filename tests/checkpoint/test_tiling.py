"""Whether blocks make up a tensor."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.tiling import Block, overlap, problem


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Block]]:
    """A tensor and a grid of blocks that make it up, in any order."""
    shape = draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
    edges = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    spans = [list(itertools.pairwise(one)) for one in edges]
    blocks = [
        (tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell))
        for cell in itertools.product(*spans)
    ]
    return shape, draw(st.permutations(blocks))


@given(cuts())
def test_a_grid_of_blocks_makes_up_the_tensor(cut: tuple[tuple[int, ...], list[Block]]) -> None:
    assert problem(*cut) == ""


@given(cuts(), st.data())
def test_a_block_too_few_or_twice_is_found(
    cut: tuple[tuple[int, ...], list[Block]], data: st.DataObject
) -> None:
    shape, blocks = cut
    at = data.draw(st.integers(0, len(blocks) - 1))
    assert "elements" in problem(shape, [*blocks[:at], *blocks[at + 1 :]])
    assert "overlap" in problem(shape, [*blocks, blocks[at]])


@st.composite
def any_blocks(draw: st.DrawFn) -> tuple[int, list[Block]]:
    dimensions = draw(st.integers(0, 3))
    numbers = st.lists(st.integers(0, 4), min_size=dimensions, max_size=dimensions).map(tuple)
    return dimensions, draw(st.lists(st.tuples(numbers, numbers), max_size=6))


@given(any_blocks())
def test_two_blocks_with_a_common_element_are_found_and_no_others(
    given_blocks: tuple[int, list[Block]],
) -> None:
    dimensions, blocks = given_blocks

    def elements(block: Block) -> set[tuple[int, ...]]:
        spans = (range(at, at + size) for at, size in zip(*block, strict=True))
        return set(itertools.product(*spans))

    shared = {
        (one, other)
        for one, other in itertools.combinations(range(len(blocks)), 2)
        if elements(blocks[one]) & elements(blocks[other])
    }
    found = overlap(blocks, dimensions)
    assert (found is None) == (not shared)
    assert found is None or tuple(sorted(found)) in shared


@pytest.mark.parametrize(
    ("blocks", "told"),
    [
        ([((0,), (2, 2))], "other dimensions"),
        ([((0, 0), (3, 2))], "not inside"),
        ([((-1, 0), (2, 2))], "not inside"),
    ],
)
def test_blocks_that_are_none_of_the_tensor_are_told(blocks: list[Block], told: str) -> None:
    assert told in problem((2, 2), blocks)
