from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import blocks

_SIZES = st.sampled_from([4096, 8192, 1 << 20])


def _described(data: bytes, block_bytes: int) -> tuple[str, str]:
    """Checksum and digests of a file."""
    found = [blocks.digest(data[at : at + block_bytes]) for at in range(0, len(data), block_bytes)]
    return blocks.combine(found), blocks.encode(found)


def test_a_checksum_is_xxh3_of_the_digests_of_the_blocks() -> None:
    data = bytes(range(256)) * 20
    checksum, text = _described(data, 4096)
    first, second = xxhash.xxh3_128_digest(data[:4096]), xxhash.xxh3_128_digest(data[4096:])
    assert text == first.hex() + second.hex()
    assert checksum == xxhash.xxh3_128_hexdigest(first + second)
    assert blocks.decode(text) == (first, second)
    assert [blocks.span(at, len(data), 4096) for at in range(2)] == [(0, 4096), (4096, 5120)]


@given(st.integers(0, 50_000), _SIZES)
def test_the_blocks_of_any_file_are_accepted_and_cover_it(size: int, block_bytes: int) -> None:
    checksum, text = _described(bytes(size), block_bytes)
    assert blocks.problem(size, checksum, block_bytes, text) == ""
    spans = [blocks.span(at, size, block_bytes) for at in range(blocks.count(size, block_bytes))]
    assert b"".join(bytes(stop - start) for start, stop in spans) == bytes(size)
    assert len(blocks.decode(text)) == len(spans)


@given(st.integers(1, 50_000), _SIZES, st.data())
def test_any_other_size_checksum_or_digest_is_refused(
    size: int, block_bytes: int, data: st.DataObject
) -> None:
    checksum, text = _described(bytes(size), block_bytes)
    other = data.draw(st.integers(0, 1 << 62))
    if blocks.count(other, block_bytes) != blocks.count(size, block_bytes):
        assert blocks.problem(other, checksum, block_bytes, text)
    at = data.draw(st.integers(0, len(text) - 1))
    digit = data.draw(st.sampled_from("0123456789abcdefABCDEF g\u0661"))
    if text[at] != digit:
        assert blocks.problem(size, checksum, block_bytes, text[:at] + digit + text[at + 1 :])
    assert blocks.problem(size, checksum[:-1], block_bytes, text)
    assert blocks.problem(size, checksum, block_bytes, text[:-1])
    assert blocks.problem(size, checksum, block_bytes, text + "0" * 32)


@pytest.mark.parametrize("block_bytes", [-4096, 0, 1, 2048, 4095, 4097, 12_288, 1 << 31, 1 << 62])
def test_blocks_of_an_odd_size_are_refused(block_bytes: int) -> None:
    assert "not of a power of two" in blocks.problem(1 << 62, "", block_bytes, "")


@pytest.mark.parametrize("text", ["0", "0" * 31, "0" * 33, "A" * 32, "g" * 32, " " * 32, "é" * 32])
def test_what_is_no_list_of_digests_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no digests"):
        blocks.decode(text)
