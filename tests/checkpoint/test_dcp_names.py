from __future__ import annotations

from collections.abc import Sequence

import pytest

from keepstep.checkpoint.dcp_metadata import DcpMetadata, DcpTensor, Path_, Piece
from keepstep.checkpoint.dcp_names import nested, resolve
from keepstep.errors import CheckpointMismatch

_PIECE = Piece("file", 0, 1)


def found(tensors: list[Path_], values: Sequence[Path_] = ()) -> DcpMetadata:
    """What a folder holds with tensors and values at these paths."""
    names = {".".join(map(str, path)): path for path in (*tensors, *values)}
    kinds = [".".join(map(str, path)) for path in tensors]
    return DcpMetadata(
        tensors={name: DcpTensor("F32", (), ()) for name in kinds},
        values={name: _PIECE for name in names if name not in kinds},
        paths=names,
    )


MODEL: list[Path_] = [("model", "a.weight"), ("model", "a.bias")]


@pytest.mark.parametrize("name", ["optimizer", "optim"])
def test_state_by_parameter_is_found_with_options_by_group(name: str) -> None:
    state: list[Path_] = [(name, "state", "a.weight", "exp_avg")]
    groups: list[Path_] = [(name, "param_groups", 0, "lr"), (name, "param_groups", 0, "params")]
    names = resolve(found(MODEL + state, groups))
    assert names.tensors["optimizer.state.model.a.weight.exp_avg"] == (
        f"{name}.state.a.weight.exp_avg"
    )
    (known,) = names.optimizers.values()
    assert known.options == {0: {"lr": f"{name}.param_groups.0.lr"}}
    assert known.members == {0: f"{name}.param_groups.0.params"}
    assert known.owners == {"a.weight": "model.a.weight"}
    assert names.unused == {}


def test_flattened_options_are_those_of_a_parameter() -> None:
    state: list[Path_] = [("optimizer", "state.a.weight.exp_avg")]
    options: list[Path_] = [("optimizer", "param_groups.a.weight.lr")]
    names = resolve(found(MODEL + state, options))
    known = names.optimizers["optimizer"]
    assert known.options == {"model.a.weight": {"lr": "optimizer.param_groups.a.weight.lr"}}
    assert "optimizer.state.model.a.weight.exp_avg" in names.tensors


def test_bare_parameters_are_those_of_the_model() -> None:
    tensors: list[Path_] = [("a.weight",), ("seen",), ("train_state", "step")]
    tensors.append(("optimizer", "state.a.weight.exp_avg"))
    names = resolve(found(tensors, [("optimizer", "param_groups.a.weight.lr"), ("epoch",)]))
    assert names.tensors == {
        "model.a.weight": "a.weight",
        "model.seen": "seen",
        "train_state.step": "train_state.step",
        "optimizer.state.model.a.weight.exp_avg": "optimizer.state.a.weight.exp_avg",
    }
    assert set(names.others) == {"train_state", "epoch"}


def test_the_name_that_is_tracked_decides_how_an_optimizer_is_called() -> None:
    state: list[Path_] = [("optimizer", "state", "a.weight", "exp_avg")]
    groups: list[Path_] = [("optimizer", "param_groups", 0, "params")]
    names = resolve(found(MODEL + state, groups), tracked=["model", "optim"])
    assert set(names.optimizers) == {"optim"}
    assert "optim.state.model.a.weight.exp_avg" in names.tensors


def test_several_modules_keep_their_own_parameters() -> None:
    tensors: list[Path_] = [("generator", "g.w"), ("critic", "c.w")]
    state: list[Path_] = [("opt", "state", "g.w", "m"), ("opt", "state", "c.w", "m")]
    names = resolve(found(tensors + state, [("opt", "param_groups", 0, "params")]))
    assert names.modules == {"generator": {}, "critic": {}}
    assert names.optimizers["opt"].owners == {"g.w": "generator.g.w", "c.w": "critic.c.w"}


def test_renames_apply_to_beginnings_and_the_first_that_fits_is_used() -> None:
    tensors: list[Path_] = [("module._orig_mod.a.weight",), ("module.b.weight",), ("ema", "x")]
    names = resolve(found(tensors), [("module._orig_mod.", "model."), ("module.", "model.")])
    assert names.tensors == {
        "model.a.weight": "module._orig_mod.a.weight",
        "model.b.weight": "module.b.weight",
        "ema.x": "ema.x",
    }


def test_two_names_that_become_one_are_refused() -> None:
    tensors: list[Path_] = [("model", "a"), ("other", "a")]
    with pytest.raises(CheckpointMismatch, match=r"other\.a and model\.a would both be model\.a"):
        resolve(found(tensors), [("other.", "model.")])


def test_state_by_number_is_refused() -> None:
    state: list[Path_] = [("optimizer", "state", "0", "exp_avg")]
    with pytest.raises(CheckpointMismatch, match="by the parameter's number"):
        resolve(found(MODEL + state, [("optimizer", "param_groups", 0, "params")]))


def test_a_parameter_that_is_called_by_a_number_is_none_by_number() -> None:
    tensors: list[Path_] = [("model", "0"), ("optimizer", "state", "0", "exp_avg")]
    names = resolve(found(tensors, [("optimizer", "param_groups", 0, "params")]))
    assert "optimizer.state.model.0.exp_avg" in names.tensors


def test_values_that_no_module_or_optimizer_has_are_told() -> None:
    values: list[Path_] = [
        ("model", "note"),
        ("optimizer", "extra"),
        ("optimizer", "param_groups", 0, "lr"),
    ]
    names = resolve(found(MODEL, values))
    assert names.unused == {
        "model.note": "a module has no such value",
        "optimizer.extra": "an optimizer has no such state",
    }


def test_nested_values_become_lists_and_dicts_again() -> None:
    assert nested({("a", 0): 1, ("a", 1): 2, ("b",): 3}) == {"a": [1, 2], "b": 3}
    assert nested({(): 5}) == 5
    assert nested({("a", 1): 1}) == {"a": {1: 1}}
    assert nested({}) == {}
