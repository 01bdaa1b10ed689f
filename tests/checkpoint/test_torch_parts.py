"""Tracked objects give their state and take it back in place."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

from keepstep.checkpoint.torch_parts import strip
from keepstep.checkpoint.torch_reader import load
from keepstep.checkpoint.torch_state import flatten
from keepstep.errors import CheckpointError, CheckpointMismatch
from tests.checkpoint.torch_worlds import save


@dataclass
class Progress:
    epoch: int = 0
    seen: list[int] = field(default_factory=list)
    mean: torch.Tensor = field(default_factory=lambda: torch.zeros(2))


@dataclass(frozen=True)
class Frozen:
    epoch: int = 0


class Counting(nn.Module):
    """A module with extra state, as quantised layers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.calls = 0
        self.scale = torch.zeros(1)

    def get_extra_state(self) -> object:
        return {"calls": self.calls, "scale": self.scale}

    def set_extra_state(self, state: dict[str, object]) -> None:
        self.calls, self.scale = state["calls"], state["scale"]  # type: ignore[assignment]


class Loader:
    """Keeps a buffer that grows."""

    def __init__(self) -> None:
        self.state: object = {"position": (0, 0), "buffer": []}

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


def restore(root: Path, tracked: dict[str, object]) -> None:
    load(tracked, root, "step-00000001", rank=0, world=1)


def test_data_holders_are_restored_in_place_with_their_tensors(tmp_path: Path) -> None:
    nested = torch.ones(2)
    saved: dict[str, object] = {
        "a": {"step": 3, "table": {1: "one"}, "tensor": nested},
        "b": [1, (2, 3)],
        "c": types.SimpleNamespace(rate=0.5),
        "d": Progress(2, [1, 2], torch.ones(2)),
        "e": torch.full((2,), 7.0),
    }
    save(tmp_path, saved)
    live_tensor, plain = torch.zeros(2), torch.zeros(2)
    a: dict[str, object] = {"old": 1, "tensor": live_tensor}
    b: list[object] = [0]
    c, d = types.SimpleNamespace(rate=0.0), Progress()
    restore(tmp_path, {"a": a, "b": b, "c": c, "d": d, "e": plain})
    assert a["tensor"] is live_tensor
    assert live_tensor.tolist() == [1, 1]
    assert a == {"step": 3, "table": {1: "one"}, "tensor": live_tensor}
    assert b == [1, (2, 3)]
    assert c.rate == 0.5
    assert (d.epoch, d.seen, d.mean.tolist()) == (2, [1, 2], [1, 1])
    assert plain.tolist() == [7, 7]


def test_an_object_with_state_dict_gets_its_tensors_back_whatever_their_number(
    tmp_path: Path,
) -> None:
    loader = Loader()
    loader.state = {"position": (3, 4), "buffer": [torch.ones(2), torch.zeros(0, 3)], "n": None}
    save(tmp_path, {"data": loader})
    other = Loader()
    restore(tmp_path, {"data": other})
    state = other.state
    assert isinstance(state, dict)
    assert state["position"] == (3, 4)
    assert [tuple(tensor.shape) for tensor in state["buffer"]] == [(2,), (0, 3)]
    assert state["buffer"][0].tolist() == [1, 1]


def test_extra_state_of_modules_is_kept(tmp_path: Path) -> None:
    module = nn.Sequential(Counting())
    module[0].calls, module[0].scale = 5, torch.full((3,), 2.0)  # type: ignore[assignment]
    save(tmp_path, {"model": module})
    other = nn.Sequential(Counting())
    restore(tmp_path, {"model": other})
    assert isinstance(other[0], Counting)
    assert (other[0].calls, other[0].scale.tolist()) == (5, [2, 2, 2])
    with pytest.raises(CheckpointMismatch, match=r"extra_state|extra state"):
        restore(tmp_path, {"model": nn.Sequential(nn.Linear(1, 1))})


def test_parameters_keep_their_identity_and_their_storage(tmp_path: Path) -> None:
    save(tmp_path, {"model": nn.Linear(2, 2)})
    module = nn.Linear(2, 2)
    before = [(parameter, parameter.data_ptr()) for parameter in module.parameters()]
    restore(tmp_path, {"model": module})
    after = [(parameter, parameter.data_ptr()) for parameter in module.parameters()]
    assert all(
        old[0] is new[0] and old[1] == new[1] for old, new in zip(before, after, strict=True)
    )


def test_another_type_of_object_under_the_same_name_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {"data": {"a": 1}})
    with pytest.raises(CheckpointMismatch, match=r"data is tracked as stateful.* as data"):
        restore(tmp_path, {"data": Loader()})
    with pytest.raises(CheckpointMismatch, match=r"1 missing \(more\), 1 unexpected \(data\)"):
        restore(tmp_path, {"more": {}})


@pytest.mark.parametrize("holder", [Frozen(), 3, (1, 2), {1, 2}, object()])
def test_what_cannot_be_restored_in_place_is_refused_when_saving(holder: object) -> None:
    with pytest.raises(CheckpointError, match="it cannot be kept"):
        flatten({"it": holder}, rank=0, world=1)


@pytest.mark.parametrize(
    ("key", "replicas", "name"),
    [
        ("module.layer.weight", {""}, "layer.weight"),
        ("module.layer.weight", set(), "module.layer.weight"),
        ("module.module.weight", {""}, "module.weight"),
        ("part.module.weight", {"part"}, "part.weight"),
        ("_orig_mod.module.weight", {"_orig_mod"}, "weight"),
        ("a._fsdp_wrapped_module.b._checkpoint_wrapped_module.c", set(), "a.b.c"),
    ],
)
def test_names_do_not_depend_on_wrappers(key: str, replicas: set[str], name: str) -> None:
    assert strip(key, frozenset(replicas)) == name
