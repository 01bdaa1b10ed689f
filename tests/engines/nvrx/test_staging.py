"""Copies in shared memory, and how NVRx's worker finds them."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.torch_state import DTYPES, Entry, Snapshot
from keepstep.engines.nvrx.staging import ERROR_BYTES, Staging


@pytest.fixture
def staging() -> Iterator[Staging]:
    made = Staging()
    yield made
    made.close()


def snapshot(*tensors: torch.Tensor) -> Snapshot:
    entries = tuple(
        Entry(f"t{number}", one, tuple(one.shape), (0,) * one.dim(), "rank")
        for number, one in enumerate(tensors)
    )
    return Snapshot(entries, {}, {})


def bits(tensor: torch.Tensor) -> list[int]:
    raw: list[int] = tensor.detach().clone().contiguous().view(-1).view(torch.uint8).tolist()
    return raw


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    )
)
def test_every_type_and_shape_comes_out_as_it_went_in(
    kinds: list[tuple[torch.dtype, list[int]]],
) -> None:
    made = Staging()
    try:
        live = []
        for dtype, shape in kinds:
            size = torch.Size(shape).numel() * dtype.itemsize
            raw = torch.arange(size, dtype=torch.int64).remainder(2).to(torch.uint8)
            live.append(raw.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype))
        staged = made.copy(snapshot(*live))
        opened = staged.parcel.open()
        assert list(opened.tensors) == [f"t{number}" for number in range(len(live))]
        for found, wanted in zip(opened.tensors.values(), live, strict=True):
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            assert bits(found) == bits(wanted)
            # DCP writes whole storages: each must be its tensor's own.
            assert found.untyped_storage().nbytes() == found.numel() * found.element_size()
        assert staged.nbytes == sum(one.numel() * one.element_size() for one in live)
    finally:
        made.close()


def test_a_copy_is_not_changed_by_later_values(staging: Staging) -> None:
    live = torch.arange(12.0).reshape(3, 4).t()  # not contiguous
    wanted = live.clone()
    staged = staging.copy(snapshot(live))
    live.fill_(-1)
    assert torch.equal(staged.parcel.open().tensors["t0"], wanted)


def test_checksums_are_those_of_the_bytes(staging: Staging) -> None:
    tensor = torch.arange(1000, dtype=torch.int32)
    staged = staging.copy(snapshot(tensor, torch.empty(0)))
    assert staged.checksums() == {
        "t0": xxhash.xxh3_128_hexdigest(bytes(bits(tensor))),
        "t1": xxhash.xxh3_128_hexdigest(b""),
    }


def test_memory_is_used_again_and_replaced_where_it_is_too_small(staging: Staging) -> None:
    first = staging.copy(snapshot(torch.zeros(10)))
    second = staging.copy(snapshot(torch.ones(20)))
    assert second.memory is first.memory
    third = staging.copy(snapshot(torch.ones(1 << 16)))
    assert third.memory is not first.memory
    assert third.parcel.open().tensors["t0"].sum() == 1 << 16


def test_nvrx_gets_a_message_too_small_to_fill_a_pipe(staging: Staging) -> None:
    staged = staging.copy(snapshot(*[torch.ones(3) for _ in range(2000)]))
    assert len(ForkingPickler.dumps(staged.parcel)) < 1000
    assert len(staged.parcel.open().tensors) == 2000


def test_memory_that_was_given_up_cannot_be_opened(staging: Staging) -> None:
    parcel = staging.copy(snapshot(torch.ones(3))).parcel
    staging.close()
    with pytest.raises(OSError):
        parcel.open()
    staging.close()  # later calls do nothing


def test_the_worker_tells_the_first_error_of_a_chain(staging: Staging) -> None:
    staged = staging.copy(snapshot(torch.ones(3)))
    assert staged.error() == ""
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 1 vs 2")  # noqa: B904 - as torch.save does
    except RuntimeError as error:
        staged.parcel.open().put_error(error)
    assert staged.error() == "OSError: [Errno 28] No space left on device"
    assert staging.copy(snapshot(torch.ones(3))).error() == ""


def test_a_long_error_is_cut(staging: Staging) -> None:
    staged = staging.copy(snapshot(torch.ones(3)))
    staged.parcel.open().put_error(ValueError("ä" * ERROR_BYTES))
    assert staged.error().startswith("ValueError: ää")
    assert torch.equal(staged.parcel.open().tensors["t0"], torch.ones(3))
