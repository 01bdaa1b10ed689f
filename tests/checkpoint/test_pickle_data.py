"""Pickles as data: what is in them comes back, and nothing of it is ever run."""

from __future__ import annotations

import collections
import struct
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keepstep.checkpoint import pickle_data
from keepstep.checkpoint.pickle_data import Inert, loads
from keepstep.errors import CheckpointCorrupt
from tests.checkpoint import pickles

_PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 300), 1 << 300)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=20,
)


@given(_PLAIN, st.integers(3, 5))
@example([list(range(3000)), "x" * 70_000, b"y" * 300], 4)
def test_plain_values_come_back_as_they_were(value: Any, number: int) -> None:
    data = pickles.dumps(value, number)
    found = loads(data, ())
    assert found == value
    assert type(found) is type(value)


class Point:
    """Something with state."""

    def __init__(self) -> None:
        self.x = 1


def test_objects_are_names_with_their_arguments_and_state() -> None:
    names = {f"{__name__}.Point", "collections.OrderedDict", "pathlib.PurePosixPath"}
    value = [Point(), collections.OrderedDict(a=2), Point, PurePosixPath("c")]
    made, ordered, named, path = loads(pickles.dumps(value, 4), names)
    assert all(isinstance(one, Inert) for one in (made, ordered, named, path))
    assert (made.name, made.args, made.state) == (f"{__name__}.Point", (), {"x": 1})
    assert (ordered.args, ordered.state) == ((), {"a": 2})
    assert (named.name, named.args) == (made.name, None)
    assert path.args == ("c",)


@pytest.mark.parametrize("number", [0, 2, 4])
@pytest.mark.parametrize(
    "call", ["os.system", "posix.system", "builtins.eval", "builtins.exec", "subprocess.Popen"]
)
def test_a_name_that_is_not_allowed_is_refused_and_nothing_is_run(
    tmp_path: Path, call: str, number: int
) -> None:
    mark = tmp_path / "ran"
    data = pickles.call(call, f"touch {mark}", number)
    with pytest.raises(CheckpointCorrupt, match=call.rpartition(".")[2]) as caught:
        loads(data, {"torch.Size"}, "some/file")
    assert caught.value.where == "some/file"
    assert "nothing of it was run" in caught.value.done
    assert not mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x04",
        b"\x80\x63N.",
        b"N.N",
        b"NN.",
        b"0.",
        b"(.",
        b"\x80\x04]\x94h\x05.",
        b"\x80\x04X\xff\xff\xff\xff.",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b".",
        b"\x80\x04\x8b" + struct.pack("<i", 1 << 30) + b".",
        b"\x80\x04\x8b" + struct.pack("<i", -1) + b".",
        b"\x80\x04}]Ns.",
        b"\x80\x04}(Nu.",
        b"\x80\x04}(}Nu.",
        b"\x80\x04)Nb.",
        b"\x80\x04NNR.",
        b"\x80\x04\x8f.",
        b"\x80\x04\x82\x01.",
        b"ios\nsystem\n.",
        b"cos\n",
        b"\x80\x04\x8c\x01\xff.",
        b"\x80\x05\x97.",
    ],
)
def test_damaged_and_unusual_pickles_are_errors(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="cannot be read as plain data"):
        loads(data, ())


@settings(max_examples=200)
@given(st.binary(max_size=60))
def test_no_bytes_do_more_than_fail(data: bytes) -> None:
    try:
        loads(b"\x80\x04" + data, {"a.b"})
    except CheckpointCorrupt:
        return


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_does_not_do_more_than_fail(at: int, value: int) -> None:
    data = bytearray(pickles.dumps({"a": [1, (2, "x" * 300)], "b": Point()}, 4))
    data[at % len(data)] = value
    try:
        loads(bytes(data), {f"{__name__}.Point"})
    except CheckpointCorrupt:
        return


def test_a_huge_place_in_the_memo_costs_no_memory() -> None:
    data = b"\x80\x02Nr\xff\xff\xff\xff."
    assert loads(data, ()) is None


def test_what_is_nested_very_deep_is_read_without_recursion() -> None:
    depth = 200_000
    found = loads(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".", ())
    for _ in range(depth - 1):
        (found,) = found
    assert found == []
    with pytest.raises(CheckpointCorrupt, match="a tuple is the key of a dict"):
        loads(b"\x80\x02})" + b"\x85" * depth + b"Ns.", ())


def test_the_same_object_twice_stays_one_and_a_loop_is_no_problem() -> None:
    shared = ["x"]
    first, second = loads(pickles.dumps([shared, shared], 4), ())
    assert first is second
    loop: list[Any] = []
    loop.append(loop)
    (inner,) = loads(pickles.dumps([loop], 4), ())
    assert inner[0] is inner


def test_a_persistent_id_is_an_inert_one() -> None:
    found = loads(b"\x80\x02X\x01\x00\x00\x00aQ.", ())
    assert (found.name, found.args) == (pickle_data.PERSISTENT, ("a",))
