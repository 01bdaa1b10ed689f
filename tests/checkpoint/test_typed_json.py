from __future__ import annotations

import collections
import enum
import importlib
import importlib.util
import math
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import typed_json
from keepstep.errors import CheckpointCorrupt, CheckpointError

_ANY_TEXT = st.text(st.characters(exclude_categories=()))  # lone surrogates too
_SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(1 << 5000), max_value=1 << 5000),
    st.floats(),
    _ANY_TEXT,
    st.sampled_from(["$", "v", "tuple"]),
    st.binary(),
)
_KEYS = st.recursive(
    _SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner), max_leaves=3
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.sampled_from(["$", "v", "a"]) | _ANY_TEXT, inner, max_size=4),
        st.dictionaries(_KEYS, inner, max_size=4),
        st.sets(_KEYS, max_size=4),
        st.frozensets(_KEYS, max_size=4),
        st.dictionaries(_ANY_TEXT, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(st.integers(), st.integers(), max_size=3).map(collections.Counter),
    ),
    max_leaves=12,
)


def _same(a: Any, b: Any) -> bool:
    """Equal in value and type at every depth, order of dicts and sign of zero included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            _same(x, y) for x, y in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, set | frozenset):
        left = [typed_json.dumps(item) for item in a]
        return sorted(left) == sorted(typed_json.dumps(item) for item in b)
    return bool(a == b)


@given(_VALUES)
def test_every_value_comes_back_with_its_types(value: Any) -> None:
    assert _same(typed_json.loads(typed_json.dumps(value)), value)


def test_plain_state_is_readable_json() -> None:
    state = {"lr": 0.5, "names": ["a", None, True], "deep": {"n": 3}}
    assert typed_json.encode(state) == state


@pytest.mark.parametrize(
    "value",
    [
        {"$": "tuple", "v": [1]},
        {"$": "dict", "v": []},
        {"a": {"$": "bytes", "v": "AA=="}},
        {"$": 1},
    ],
)
def test_user_data_that_looks_like_a_marker_stays_what_it_is(value: dict[str, Any]) -> None:
    assert typed_json.loads(typed_json.dumps(value)) == value


def test_equal_sets_give_equal_bytes() -> None:
    words = [f"word{number}" for number in range(50)]
    assert typed_json.dumps(set(words)) == typed_json.dumps(set(reversed(words)))


class _Colour(enum.IntEnum):
    RED = 1


class _OwnDict(dict[str, int]):
    pass


_Pair = collections.namedtuple("_Pair", "a b")


@pytest.mark.parametrize(
    "bad",
    [object(), _Colour.RED, _OwnDict(a=1), _Pair(1, 2), 1j, bytearray(b"x"), len, {1, 2}.union],
    ids=lambda bad: type(bad).__name__,
)
def test_what_cannot_be_kept_is_refused_with_the_path_of_its_key(bad: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        typed_json.encode({"groups": [0, {"extra": bad}]}, "optimizer")
    assert "optimizer['groups'][1]['extra']" in str(caught.value)
    assert type(bad).__name__ in str(caught.value)


def test_a_key_that_cannot_be_kept_is_refused_too() -> None:
    with pytest.raises(CheckpointError, match=r"key .* of scheduler"):
        typed_json.encode({(1, object()): 1}, "scheduler")


def test_a_container_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match="nested more than 100 levels deep"):
        typed_json.encode(endless)


def test_text_that_is_too_deep_is_refused() -> None:
    for depth in (typed_json.MAX_DEPTH + 2, 100_000):
        with pytest.raises(CheckpointCorrupt):
            typed_json.loads(b"[" * depth + b"]" * depth)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[1",
        b'{"$":"module","v":"os"}',
        b'{"$":["tuple"],"v":[]}',
        b'{"$":"tuple"}',
        b'{"$":"tuple","v":{"a":1}}',
        b'{"$":"bytes","v":"?"}',
        b'{"$":"bytes","v":3}',
        b'{"$":"int","v":"12z"}',
        b'{"$":"int","v":7}',
        b'{"$":"float","v":"1.5"}',
        b'{"$":"dict","v":[[1]]}',
        b'{"$":"dict","v":[[[1],2]]}',
        b'{"$":"dict","v":7}',
        b'{"$":"set","v":[[1]]}',
        b'{"$":"counter","v":[[{"$":"tuple","v":[[1]]},2]]}',
    ],
)
def test_damaged_text_is_an_error_and_nothing_else(text: bytes) -> None:
    with pytest.raises(CheckpointCorrupt):
        typed_json.loads(text)


@given(
    st.recursive(
        _SCALARS.filter(lambda v: isinstance(v, str | int | None)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(["$", "v", "dtype", "shape"]),
                inner
                | st.sampled_from(
                    ["tuple", "dict", "set", "int", "array", "scalar", "bytes", "str", "float"]
                ),
                max_size=4,
            ),
        ),
    )
)
def test_any_tree_decodes_or_is_refused_as_a_checkpoint_error(tree: Any) -> None:
    try:
        typed_json.decode(tree)
    except CheckpointError:
        return


def test_a_numpy_value_without_numpy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    text = b'{"$":"scalar","dtype":"<f8","shape":[],"v":"AAAAAAAAAAA="}'
    with pytest.raises(CheckpointError, match="Install numpy"):
        typed_json.loads(text)


_HAS_NUMPY = importlib.util.find_spec("numpy") is not None
_needs_numpy = pytest.mark.skipif(not _HAS_NUMPY, reason="numpy is optional and not installed")


@_needs_numpy
def test_numpy_values_come_back_with_dtype_and_shape() -> None:
    numpy: Any = importlib.import_module("numpy")
    values = [
        numpy.arange(6, dtype="<u4").reshape(2, 3),
        numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
        numpy.array(3, dtype=">i2"),
        numpy.zeros((0, 4), dtype="f2"),
        numpy.array(["a", "bc"]),
        numpy.array(["2020-01-01"], dtype="M8[D]"),
        numpy.float64(0.1),
        numpy.float32("nan"),
        numpy.bool_(True),
        numpy.int64(-5),
    ]
    back = typed_json.loads(typed_json.dumps(values))
    for old, new in zip(values, back, strict=True):
        assert type(new) is type(old)
        assert (new.dtype, new.shape, new.tobytes()) == (old.dtype, old.shape, old.tobytes())
    back[0][0, 0] = 9  # arrays can be changed after a restore
    state = numpy.random.RandomState(5).get_state()
    assert repr(typed_json.loads(typed_json.dumps(state))) == repr(state)


@_needs_numpy
def test_numpy_values_whose_dtype_has_no_short_name_are_refused() -> None:
    numpy: Any = importlib.import_module("numpy")
    for bad in (numpy.array([object()]), numpy.zeros(2, dtype=[("a", "i4"), ("b", "f4")])):
        with pytest.raises(CheckpointError, match="dtype"):
            typed_json.encode({"x": bad})
    for dtype in ("O", "i4,f4", "nonsense", ">f8x"):
        node = {"$": "array", "dtype": dtype, "shape": [1], "v": "AAAAAAAAAAA="}
        with pytest.raises(CheckpointCorrupt):
            typed_json.loads(msgspec.json.encode(node))
