"""Every layout and size comes out bit by bit, in any number of threads."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import torch_copy
from keepstep.checkpoint.torch_copy import ImageBytes, Piece, digest, is_plain


def pieces_of(*tensors: torch.Tensor) -> tuple[list[Piece], ImageBytes]:
    """The tensors one after the other, each at a multiple of 16 bytes, and memory for them."""
    pieces, at = [], 16  # an image begins with a header
    for number, tensor in enumerate(tensors):
        pieces.append(Piece(f"t{number}", tensor, at))
        at += -(-tensor.nbytes // 16) * 16
    return pieces, ImageBytes(bytearray(at), at)


def right(pieces: list[Piece], image: ImageBytes) -> bool:
    return all(
        torch.equal(image.target(piece), piece.tensor.resolve_conj().resolve_neg())
        for piece in pieces
    )


ODD = {
    "turned": lambda: torch.randn(30, 20).t(),
    "stepped": lambda: torch.randn(40)[::3],
    "expanded": lambda: torch.randn(1, 7).expand(5, 7),
    "scalar": lambda: torch.tensor(3.5, dtype=torch.float64),
    "nothing": lambda: torch.empty(0, 3),
    "conjugated": lambda: torch.randn(9, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(9, dtype=torch.complex64).conj().imag,
    "zero": lambda: torch._efficientzerotensor(4),
    "half": lambda: torch.randn(33).bfloat16(),
    "flags": lambda: torch.tensor([True, False, True]),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_layouts_come_out_in_the_order_of_their_elements(name: str) -> None:
    pieces, image = pieces_of(torch.ones(5), ODD[name](), torch.ones(3))
    assert image.copy(pieces)
    assert right(pieces, image)
    assert is_plain(pieces[1].tensor) == (name in ("scalar", "nothing", "half", "flags"))


@given(
    st.lists(st.integers(0, 400), max_size=12),
    st.integers(1, 4),
    st.sampled_from([1, 16, 64, 4096]),
)
def test_chunks_and_threads_change_nothing(sizes: list[int], threads: int, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_copy, "CHUNK_BYTES", chunk)
        pieces, image = pieces_of(*(torch.randn(size) for size in sizes))
        assert image.copy(pieces, threads=threads)
    assert right(pieces, image)


def test_a_copy_that_is_called_off_ends_after_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_copy, "CHUNK_BYTES", 16)
    pieces, image = pieces_of(torch.ones(64))
    asked: list[int] = []

    def called_off() -> bool:
        asked.append(1)
        return len(asked) > 3

    assert not image.copy(pieces, called_off=called_off)
    copied = image.target(pieces[0])
    assert copied[:12].eq(1).all()
    assert copied[12:].eq(0).all()


def test_an_error_in_any_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(target: int, source: int, count: int) -> None:
        raise MemoryError(threading.current_thread().name)

    pieces, image = pieces_of(*(torch.ones(4) for _ in range(8)))
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "memmove", broken)
        for threads in (1, 4):
            with pytest.raises(MemoryError):
                image.copy(pieces, threads=threads)


def test_memory_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="requested buffer length"):
        ImageBytes(bytearray(10), 11)


def test_digests_are_of_the_bytes_in_order() -> None:
    pieces, image = pieces_of(torch.arange(12.0).reshape(3, 4).t(), torch.empty(0))
    image.copy(pieces)
    for piece in pieces:
        raw = bytes(piece.tensor.contiguous().view(-1).view(torch.uint8).tolist())
        expected = xxhash.xxh3_64_intdigest(raw)
        assert digest(piece.tensor) == image.digest(piece) == expected
