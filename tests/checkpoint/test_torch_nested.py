"""Containers lose their tensors and get them back, whatever they look like."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import typed_json
from keepstep.checkpoint.torch_nested import Path, Spec, join, rebuild, split, targets
from keepstep.errors import CheckpointError, CheckpointMismatch

leaves = st.one_of(
    st.none(), st.integers(), st.text(max_size=3), st.builds(torch.tensor, st.integers(0, 9))
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 9)), inner, max_size=3),
    ),
    max_leaves=12,
)


def equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@given(trees)
def test_a_container_comes_back_with_the_same_tensors(tree: object) -> None:
    nested = split("x", tree)
    skeleton = typed_json.loads(typed_json.dumps(nested.skeleton))
    assert equal(join(skeleton, nested.tensors), tree)


def test_nothing_in_the_users_data_is_taken_for_a_tensor() -> None:
    tricky = {"state": None, "tensors": [["a"]], "a": None, "b": torch.ones(1)}
    nested = split("x", tricky)
    packed = typed_json.loads(typed_json.dumps(nested.packed()))
    again = rebuild("x", packed, {"x.b": tricky["b"]})  # type: ignore[dict-item]
    assert equal(again, tricky)


def test_a_container_that_cannot_be_rebuilt_is_refused_only_with_tensors_inside() -> None:
    pair = namedtuple("pair", "a b")
    assert split("x", {"p": pair(1, 2)}).tensors == {}
    with pytest.raises(CheckpointError, match=r"x\.p cannot be kept: a pair"):
        split("x", {"p": pair(1, torch.ones(1))})
    assert split("x", OrderedDict(a=torch.ones(1))).skeleton == {"a": None}


def test_a_tensor_goes_into_the_live_one_if_it_fits_and_into_a_new_one_if_not() -> None:
    live: dict[Path, torch.Tensor] = {("same",): torch.ones(2), ("other",): torch.ones(3)}
    specs = {f"x.{name}": Spec(torch.float32, (2,)) for name in ("same", "other", "new")}
    paths: list[Path] = [("same",), ("other",), ("new",)]
    found = targets("x", paths, specs, live, in_place=True)
    assert found["x.same"] is live[("same",)]
    assert [tuple(found[name].shape) for name in specs] == [(2,), (2,), (2,)]
    with pytest.raises(CheckpointMismatch, match=r"lacks x\.unknown"):
        targets("x", [("unknown",)], specs, live, in_place=True)
    copied = targets("x", paths, specs, live, in_place=False)
    assert copied["x.same"] is not live[("same",)]


@pytest.mark.parametrize("packed", [None, 3, {}, {"tensors": 1}, {"tensors": [1]}])
def test_a_stored_form_that_makes_no_sense_is_refused(packed: object) -> None:
    with pytest.raises(CheckpointMismatch):
        rebuild("x", packed, {})
