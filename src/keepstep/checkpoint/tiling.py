"""Whether blocks make up a tensor: none outside of it, no two with a common element, no hole.

Pure; used by whoever reads or writes a manifest, ours or another library's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a block, in elements; both as long as the tensor's shape."""


def problem(shape: tuple[int, ...], blocks: Sequence[Block]) -> str:
    """Why ``blocks`` do not make up a tensor of ``shape``; empty if they do."""
    for offsets, sizes in blocks:
        if not len(offsets) == len(sizes) == len(shape):
            return f"a chunk at {offsets} of shape {sizes} has other dimensions than {shape}"
        if any(
            min(at, size) < 0 or at + size > whole
            for at, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            return f"a chunk at {offsets} of shape {sizes} is not inside {shape}"
    found = overlap(blocks, len(shape))
    if found is not None:
        first, second = (blocks[number][0] for number in found)
        return f"the chunks at {first} and {second} overlap"
    held = sum(math.prod(sizes) for _, sizes in blocks)
    if held != math.prod(shape):
        return f"its chunks hold {held} of {math.prod(shape)} elements"
    return ""


def overlap(blocks: Sequence[Block], dimensions: int) -> tuple[int, int] | None:
    """Places in ``blocks`` of two that share an element, or None.

    Sweeps along the dimension that is cut most often: at any place only few blocks are open there,
    so that the work stays near linear for the usual one- and two-dimensional cuts.
    """
    filled = [number for number, (_, sizes) in enumerate(blocks) if math.prod(sizes)]
    if not dimensions:
        return (filled[0], filled[1]) if len(filled) > 1 else None
    along = max(range(dimensions), key=lambda axis: len({blocks[n][0][axis] for n in filled}))
    still_open: list[int] = []
    for number in sorted(filled, key=lambda n: blocks[n][0][along]):
        offsets, sizes = blocks[number]
        start = offsets[along]
        still_open = [n for n in still_open if blocks[n][0][along] + blocks[n][1][along] > start]
        for other in still_open:
            if all(
                max(a, b) < min(a + size_a, b + size_b)
                for a, size_a, b, size_b in zip(*blocks[other], offsets, sizes, strict=True)
            ):
                return other, number
        still_open.append(number)
    return None
