"""Who writes what: kinds, offsets, replicas, names."""

from __future__ import annotations

import types
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.checkpoint.torch_nested import Spec
from keepstep.checkpoint.torch_state import Entry, flatten, prepare_for_load
from keepstep.errors import CheckpointError, CheckpointMismatch
from tests.checkpoint.torch_worlds import fake_world, hybrid, replicated, sharded


def entries(tracked: dict[str, object], rank: int = 0, world: int = 1) -> dict[str, Entry]:
    return {entry.name: entry for entry in flatten(tracked, rank=rank, world=world).entries}


def test_a_rank_writes_its_uneven_shard_at_its_offsets_and_leaves_out_an_empty_one() -> None:
    whole = torch.arange(10.0).reshape(5, 2)
    found = []
    for rank in range(4):  # chunks of 2, 2, 1 and 0 rows
        with fake_world(rank, 4):
            found.append(entries({"w": {"a": sharded(whole, 4)}}, rank, 4))
    assert [list(one) for one in found] == [["w.a"], ["w.a"], ["w.a"], []]
    placed = [(one["w.a"].offsets, tuple(one["w.a"].tensor.shape)) for one in found[:3]]
    assert placed == [((0, 0), (2, 2)), ((2, 0), (2, 2)), ((4, 0), (1, 2))]
    assert {(one["w.a"].kind, one["w.a"].global_shape) for one in found[:3]} == {("shard", (5, 2))}
    assert torch.equal(torch.cat([one["w.a"].tensor for one in found[:3]]), whole)


def test_a_shard_along_another_dimension_has_its_offset_there() -> None:
    with fake_world(1, 2):
        entry = entries({"w": {"a": sharded(torch.ones(2, 5), 2, dim=1)}}, 1, 2)["w.a"]
    assert (entry.offsets, tuple(entry.tensor.shape)) == ((0, 3), (2, 2))


def test_of_several_replicas_exactly_one_writes_and_the_work_is_spread() -> None:
    names = [f"p{number}" for number in range(40)]
    writers: dict[str, list[int]] = {name: [] for name in names}
    for rank in range(4):
        with fake_world(rank, 4):
            state = {name: hybrid(torch.ones(4), 2, 2) for name in names}
            for name in entries({"w": state}, rank, 4):
                writers[name.removeprefix("w.")].append(rank)
    # The mesh is [[0, 1], [2, 3]]: a replica is a row, and both shards come from the same one.
    assert all(pair in ([0, 1], [2, 3]) for pair in writers.values())
    rows = Counter(tuple(pair) for pair in writers.values())
    assert min(rows[0, 1], rows[2, 3]) >= 8


def test_a_tensor_that_every_rank_holds_is_written_once() -> None:
    names = [f"p{number}" for number in range(30)]
    counts: Counter[str] = Counter()
    per_rank = []
    for rank in range(3):
        with fake_world(rank, 3):
            found = entries({"w": {name: replicated(torch.ones(2), 3) for name in names}}, rank, 3)
        counts.update(list(found))
        per_rank.append(len(found))
    assert counts == Counter({f"w.{name}": 1 for name in names})
    assert min(per_rank) >= 3


def test_plain_tensors_belong_to_their_rank() -> None:
    module = nn.BatchNorm1d(3)
    found = entries({"model": module, "ema": torch.ones(2)}, rank=1, world=2)
    assert {entry.kind for entry in found.values()} == {"rank"}
    assert set(found) == {
        "model.weight",
        "model.bias",
        "model.running_mean",
        "model.running_var",
        "model.num_batches_tracked",
        "ema",
    }


def test_what_is_not_persistent_is_not_saved_and_tied_parameters_are_saved_once() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    assert set(entries({"model": module})) == {"model.0.weight"}


def test_names_do_not_depend_on_compiling() -> None:
    module = nn.Linear(2, 2)
    wrapped = nn.Sequential()
    wrapped.add_module("_orig_mod", module)
    assert set(entries({"m": wrapped})) == {"m.weight", "m.bias"}


def test_a_tensor_without_elements_is_noted_by_each_rank() -> None:
    with fake_world(1, 2):
        found = entries({"w": {"none": sharded(torch.ones(0, 3), 2)}}, 1, 2)
    assert (found["w.none"].kind, found["w.none"].global_shape) == ("rank", (0, 3))


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"a": torch.ones(2).to_sparse()}, "a"),
        ({"a": {"b": torch.empty(2, device="meta")}}, "a.b"),
        ({"a": [torch.ones(1, dtype=torch.complex128)]}, "a.0"),
        ({"a": {"b": [object()]}}, "b"),
        ({"a": 3}, "a"),
        ({"a": {(1, 2): torch.ones(1)}}, "a"),
        ({"a": {"1": torch.ones(1), 1: torch.ones(1)}}, "a.1"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "a.b"),
        ({"$names": {}}, "$names"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(state: dict[str, object], name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        flatten(state, rank=0, world=1)
    assert name in caught.value.what


def test_a_module_whose_state_dict_invents_tensors_is_refused() -> None:
    class Inventive(nn.Linear):
        def _save_to_state_dict(self, destination: object, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "double"] = self.weight.detach() * 2  # type: ignore[index]

    with pytest.raises(CheckpointError, match=r"model\.double cannot be kept"):
        flatten({"model": Inventive(1, 1)}, rank=0, world=1)


def test_a_sum_that_is_not_finished_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    with fake_world(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(CheckpointError, match=r"w\.a cannot be kept"):
            flatten({"w": {"a": tensor}}, rank=0, world=2)


def test_values_hold_everything_that_is_no_tensor() -> None:
    tracked: dict[str, object] = {
        "progress": {"epoch": 3, "seen": (1, 2)},
        "options": types.SimpleNamespace(rate=0.5),
    }
    values = flatten(tracked, rank=0, world=1).values
    assert values["progress"] == {
        "type": "data",
        "state": {"epoch": 3, "seen": (1, 2)},
        "tensors": [],
    }
    assert values["options"] == {"type": "data", "state": {"rate": 0.5}, "tensors": []}


def test_a_model_with_another_layer_is_refused_by_its_names_not_by_the_optimizer_s_count() -> None:
    def tracked(layers: int) -> dict[str, object]:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"optimizer": optimizer, "model": model}

    snapshot = flatten(tracked(2), rank=0, world=1)
    specs = {one.name: Spec(one.tensor.dtype, tuple(one.tensor.shape)) for one in snapshot.entries}
    with pytest.raises(CheckpointMismatch, match=r"2 missing \(model\.2\.bias, model\.2\.weight\)"):
        prepare_for_load(tracked(3), snapshot.values, specs, world=1)


class Own:
    """State that only one engine has."""

    def __init__(self) -> None:
        self.loaded: list[object] = []

    def state_dict(self) -> dict[str, object]:
        return {"longest": 3}

    def load_state_dict(self, state: object) -> None:
        self.loaded.append(state)


def test_an_engines_own_state_may_be_on_one_side_only() -> None:
    with_it = flatten({"data": {"at": 1}, "$engine.own": Own()}, rank=0, world=1)
    without = flatten({"data": {"at": 1}}, rank=0, world=1)
    own, data = Own(), {"at": 0}
    for snapshot, tracked in (
        (with_it, {"data": data}),
        (without, {"data": data, "$engine.own": own}),
    ):
        data["at"] = 0
        prepare_for_load(tracked, snapshot.values, {}, world=1).apply()
        assert (data, own.loaded) == ({"at": 1}, [])
    prepare_for_load({"data": data, "$engine.own": own}, with_it.values, {}, world=1).apply()
    assert own.loaded == [{"longest": 3}]


def stable(tracked: dict[str, object], rank: int = 0, world: int = 1) -> set[str]:
    found = entries(tracked, rank, world).values()
    assert all(bool(entry.counted) == entry.stable for entry in found)
    return {entry.name for entry in found if entry.stable}


def stepped(module: nn.Module, **options: object) -> torch.optim.Optimizer:
    """An AdamW of the parameters of ``module`` that need gradients, after a step."""
    parameters = [one for one in module.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, **options)  # type: ignore[arg-type]
    for one in parameters:
        one.grad = torch.ones_like(one)
    optimizer.step()
    return optimizer


def test_only_what_a_tracked_optimizer_owns_is_stable() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    optimizer = stepped(model, lr=torch.tensor(0.1))
    untracked = nn.Linear(2, 2)
    torch.optim.SGD(untracked.parameters(), lr=0.1)
    tracked = {
        **{"model": model, "optimizer": optimizer, "other": untracked},
        **{"average": torch.ones(2), "data": {"noise": torch.ones(2)}},
    }
    owned = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert stable(tracked) == {f"model.{name}" for name in owned} | {
        f"optimizer.state.model.{name}.{key}"
        for name in owned
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    assert "optimizer.group.0.lr" in entries(tracked)
    assert stable({"model": model}) == set()


def test_a_parameter_that_is_tracked_by_itself_is_stable_too() -> None:
    model = nn.Linear(2, 2)
    tracked = {"weight": model.weight, "held": {"bias": model.bias}, "optimizer": stepped(model)}
    assert {"weight", "held.bias"} <= stable(tracked)


def test_steps_that_no_hook_sees_make_nothing_stable() -> None:
    class Delegating(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.param_groups, self.state = inner.param_groups, inner.state

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise AssertionError

    model = nn.Linear(2, 2)
    optimizer = stepped(model)
    assert stable({"model": model, "optimizer": Delegating(optimizer)}) == set()
    optimizer.param_groups[0]["capturable"] = True
    assert stable({"model": model, "optimizer": optimizer}) == set()


def test_what_shares_memory_with_something_that_is_not_stable_is_not_either() -> None:
    flat = torch.ones(20)
    first, second = nn.Parameter(flat[:10]), nn.Parameter(flat[10:])
    other = nn.Parameter(torch.ones(10))
    optimizer = torch.optim.SGD([first, second, other], lr=0.1)
    tracked = {"optimizer": optimizer, "first": first, "second": second, "other": other}
    assert stable(tracked) == {"first", "second", "other"}
    assert stable({**tracked, "view": first.detach()[3:5]}) == {"other"}
    assert stable({**tracked, "view": flat}) == {"other"}


def test_a_view_that_another_rank_writes_counts_as_well() -> None:
    model = nn.Linear(3, 3)
    tracked = {"model": model, "optimizer": stepped(model)}
    assert "model.weight" in stable(tracked)
    with fake_world(0, 2):
        for rank in range(2):
            view = replicated(model.weight.detach(), 2)
            # The view is written by one rank only, and changes on both.
            view._local_tensor = model.weight.detach()
            assert "model.weight" not in stable({**tracked, "view": view}, rank, 2)


def test_shards_are_stable_and_both_of_their_tensors_are_watched() -> None:
    whole = torch.arange(10.0).reshape(5, 2)
    with fake_world(1, 2):
        parameter: Any = nn.Parameter(sharded(whole, 2))
        optimizer = torch.optim.AdamW([parameter])
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        found = entries({"w": parameter, "optimizer": optimizer}, 1, 2)
        for name in ("w", "optimizer.state.0.0.exp_avg"):
            assert found[name].stable
            before = [one._version for one in found[name].counted]
            optimizer.step()
            assert [one._version for one in found[name].counted] != before
        before = [one._version for one in found["w"].counted]
        with torch.no_grad():
            parameter.to_local().add_(1)
        assert [one._version for one in found["w"].counted] != before


def test_inference_tensors_have_no_count_and_are_not_stable() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert stable({"model": model, "optimizer": optimizer}) == set()


def test_values_are_encoded_as_they_are_now() -> None:
    data = {"seen": (1, 2), "list": [1]}
    snapshot = flatten({"data": data}, rank=0, world=1)
    data["list"].append(2)  # type: ignore[attr-defined]
    state = snapshot.encoded["data"]["state"]
    assert state == {"seen": {"$": "tuple", "v": [1, 2]}, "list": [1]}
