"""Checksums of a file block by block: they can be computed, and damage be found, in any order.

Used by writer, restore and command line. A file is cut into blocks of ``block_bytes`` bytes from
its start; the last one may be short. The checksum of the file is that of the blocks' checksums, so
that several threads can hash one file, and a reader can check a block while it is in the cache.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import xxhash

BLOCK_BYTES = 4 << 20
"""Bytes of a block in the files that we write: small enough to stay in a processor's cache."""
MIN_BLOCK = 4096
MAX_BLOCK = 1 << 30
_HEX = 32
_DIGESTS = re.compile(r"[0-9a-f]*")


def digest(block: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 of a block as 16 bytes. Releases the interpreter while it works."""
    return xxhash.xxh3_128_digest(block)


def combine(digests: Sequence[bytes]) -> str:
    """The checksum of a file whose blocks have these digests, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def encode(digests: Sequence[bytes]) -> str:
    """The digests one after the other, 32 hex digits each."""
    return b"".join(digests).hex()


def decode(text: str) -> tuple[bytes, ...]:
    """The digests in ``text``. Raises ValueError if ``encode`` does not make such a text."""
    if len(text) % _HEX or not _DIGESTS.fullmatch(text):
        raise ValueError(f"{len(text)} characters are no digests of 32 hex digits each")
    raw = bytes.fromhex(text)
    return tuple(raw[at : at + _HEX // 2] for at in range(0, len(raw), _HEX // 2))


def count(size: int, block_bytes: int) -> int:
    """Number of blocks of a file of ``size`` bytes."""
    return -(-size // block_bytes)


def span(index: int, size: int, block_bytes: int) -> tuple[int, int]:
    """First byte of block ``index`` in a file of ``size`` bytes, and the byte after its last."""
    start = index * block_bytes
    return start, min(start + block_bytes, size)


def problem(size: int, checksum: str, block_bytes: int, text: str) -> str:
    """Why a file of ``size`` bytes cannot have these block digests; empty if it can.

    Costs no more than the length of ``text``, whatever ``size`` says.
    """
    if not MIN_BLOCK <= block_bytes <= MAX_BLOCK or block_bytes & (block_bytes - 1):
        return (
            f"blocks of {block_bytes} bytes, not of a power of two from {MIN_BLOCK} to {MAX_BLOCK}"
        )
    wanted = count(size, block_bytes)
    if len(text) != wanted * _HEX:
        return f"{len(text)} hex digits for {wanted} blocks of {block_bytes} bytes"
    try:
        digests = decode(text)
    except ValueError as error:
        return str(error)
    if combine(digests) != checksum:
        return f"the checksum {checksum!r} is not that of its {wanted} blocks"
    return ""
