"""An optimizer as a part of a checkpoint: state by parameter name, hyper-parameters as values.

Runs in the ranks. State is named after the parameter it belongs to
(``optimizer.state.model.0.weight.exp_avg``), so neither the order of parameters nor the world size
matters on restore. State that does not exist yet is made when a checkpoint has it, and dropped when
the checkpoint was taken before it existed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from keepstep.checkpoint.torch_fsdp1_optimizer import FlatStates, Owned
from keepstep.checkpoint.torch_nested import (
    Named,
    Nested,
    Spec,
    rebuild,
    split,
    targets,
    unpack,
)
from keepstep.errors import CheckpointError, CheckpointMismatch

BY_NAME = "by_name"
"""Key of a stored value whose options are told by parameter: a list of ``params`` (full names) and
their ``options``. Other libraries' checkpoints have them so."""


class _Owner(NamedTuple):
    """A parameter, the prefix of its state's names, and its group's index.

    ``stable``: nothing but a step that torch's hooks see changes it and its state.
    """

    prefix: str
    parameter: torch.Tensor
    group: int
    replicated: bool
    stable: bool


class OptimizerPart:
    """State and hyper-parameters of an optimizer.

    Args:
        name: Name under which it is tracked.
        optimizer: The optimizer.
        names: Name of each parameter of a tracked module, by ``id``.
        replicated: Ids of the parameters that are equal on all ranks.
        flat: Parameters that FSDP1 holds, by id of what the optimizer has.

    Raises:
        CheckpointError: its state is spread over ranks in a way that cannot be kept.
    """

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        replicated: set[int],
        flat: Mapping[int, list[Owned]] | None = None,
    ) -> None:
        self._name, self._optimizer = name, optimizer
        self._flat_states = FlatStates(name, optimizer, flat or {})
        if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
            raise CheckpointError(
                f"{name} is a ZeroRedundancyOptimizer, whose state lies on other ranks in part",
                done="nothing was saved",
                advice="use torch.distributed.fsdp.fully_shard, which shards optimizer state too",
            )
        hooked = getattr(type(optimizer).step, "hooked", False)
        self.owned: set[int] = set()
        """Ids of the parameters that only a step which torch's hooks see changes."""
        self._owners: list[_Owner] = []
        self._names: list[list[str]] = []
        """Full names of the parameters of each group, in their order."""
        for index, group in enumerate(optimizer.param_groups):
            called: list[str] = []
            self._names.append(called)
            # A step in a CUDA graph is replayed without hooks, and only a capturable one can be.
            stable = hooked and not group.get("capturable")
            for at, parameter in enumerate(group["params"]):
                key = id(parameter)
                if stable:
                    self.owned.add(key)
                if parameter in self._flat_states:
                    called += [full for full, _ in (flat or {})[key]]
                    continue
                called.append(names.get(key, f"{index}.{at}"))
                prefix = f"{name}.state.{called[-1]}"
                self._owners.append(_Owner(prefix, parameter, index, key in replicated, stable))

    def _groups(self) -> Nested:
        plain = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        return split(f"{self._name}.group", plain)

    def _sizes(self) -> list[int]:
        return [
            sum(self._flat_states.count(parameter) for parameter in group["params"])
            for group in self._optimizer.param_groups
        ]

    def _flat(self, owner: _Owner) -> dict[str, torch.Tensor]:
        return {key: value for key, value in self._live(owner).items() if _is_flat(key, value)}

    def _rest(self, owner: _Owner) -> Nested:
        live = self._live(owner)
        rest = {key: value for key, value in live.items() if not _is_flat(key, value)}
        return split(f"{owner.prefix}.rest", rest)

    def _live(self, owner: _Owner) -> dict[Any, Any]:
        state: dict[Any, Any] = self._optimizer.state.get(owner.parameter, {})
        return state

    def named(self) -> list[Named]:
        result = self._groups().named()
        result += self._flat_states.named(self.owned)
        for owner in self._owners:
            prefix, replicated, stable = owner.prefix, owner.replicated, owner.stable
            for key, tensor in self._live(owner).items():
                if _is_flat(key, tensor):
                    result.append(Named(f"{prefix}.{key}", tensor, replicated, stable))
            if prefix in self._rests:
                rest = self._rests[prefix].named()
                result += [Named(item.name, item.tensor, stable=stable) for item in rest]
        return result

    @functools.cached_property
    def _rests(self) -> dict[str, Nested]:
        """State that is more than tensors by plain keys, by prefix: few optimizers have any."""
        return {
            owner.prefix: self._rest(owner)
            for owner in self._owners
            if not all(_is_flat(key, value) for key, value in self._live(owner).items())
        }

    def value(self) -> dict[str, object]:
        return {
            "type": "optimizer",
            "parameters": self._sizes(),
            "names": self._names,
            "groups": self._groups().packed(),
            "state": {prefix: rest.packed() for prefix, rest in self._rests.items()},
        }

    def targets(
        self, value: Mapping[str, object], specs: Mapping[str, Spec]
    ) -> dict[str, torch.Tensor]:
        if BY_NAME in value:
            self._options_by_name(value)
            result: dict[str, torch.Tensor] = {}
        else:
            result = self._group_targets(value, specs)
        stored, rests = _by_prefix(specs), _rests(value)
        result |= self._flat_states.targets(stored, specs)
        for owner in self._owners:
            keys, live = stored.get(owner.prefix, []), self._flat(owner)
            for key in keys:
                name = f"{owner.prefix}.{key}"
                present = live.get(key)
                result[name] = (
                    present if present is not None else self._allocate(owner, key, specs[name])
                )
            if keys or owner.prefix in rests:
                # A stored state that lacks a key of the live one is reported as missing it.
                result |= {f"{owner.prefix}.{key}": live[key] for key in live if key not in keys}
            if owner.prefix in rests:
                rest = self._rest(owner)
                _, paths = unpack(rest.prefix, rests[owner.prefix])
                result |= targets(rest.prefix, paths, specs, rest.tensors, in_place=True)
        return result

    def _group_targets(
        self, value: Mapping[str, object], specs: Mapping[str, Spec]
    ) -> dict[str, torch.Tensor]:
        if value.get("parameters") != self._sizes():
            raise CheckpointMismatch(
                f"{self._name} has parameter groups of {self._sizes()} parameters, the checkpoint "
                f"has {value.get('parameters')}"
            )
        groups = self._groups()
        _, paths = unpack(groups.prefix, value.get("groups"))
        return targets(groups.prefix, paths, specs, groups.tensors, in_place=True)

    def _options_by_name(self, value: Mapping[str, object]) -> list[dict[str, object]]:
        """The stored options of each group, found by the names of its parameters."""
        told: dict[str, dict[str, object]] = {}
        stored = value[BY_NAME]
        for one in stored if isinstance(stored, list) else []:
            told |= dict.fromkeys(one["params"], one["options"])
        result: list[dict[str, object]] = []
        for index, called in enumerate(self._names):
            missing = [full for full in called if full not in told]
            if missing:
                raise CheckpointMismatch(
                    f"the checkpoint has no options of {self._name} for {len(missing)} parameters, "
                    f"for example {missing[0]}",
                    done="nothing was restored",
                )
            other = next((full for full in called if told[full] != told[called[0]]), None)
            if other is not None:
                raise CheckpointMismatch(
                    f"{called[0]} and {other} are in group {index} of {self._name}, and have "
                    "different options in the checkpoint",
                    done="nothing was restored",
                    advice="make the optimizer with the groups that it was saved with",
                )
            result.append(told[called[0]] if called else {})
        return result

    def _allocate(self, owner: _Owner, key: str, spec: Spec) -> torch.Tensor:
        parameter = owner.parameter
        if key == "step" or tuple(parameter.shape) != spec.shape:
            group = self._optimizer.param_groups[owner.group]
            on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
            return spec.empty("cpu" if on_host else parameter.device)
        # Every element of it is in the checkpoint: filling it first would touch the memory twice.
        return torch.empty_like(parameter.detach(), dtype=spec.dtype)

    def apply(self, value: Mapping[str, object], loaded: Mapping[str, torch.Tensor]) -> None:
        stored, rests = _by_prefix(loaded), _rests(value)
        self._flat_states.apply()
        for owner in self._owners:
            keys = stored.get(owner.prefix, [])
            if not keys and owner.prefix not in rests:
                self._optimizer.state.pop(owner.parameter, None)
                continue
            fresh: dict[Any, Any] = {key: loaded[f"{owner.prefix}.{key}"] for key in keys}
            if owner.prefix in rests:
                rest = rebuild(f"{owner.prefix}.rest", rests[owner.prefix], loaded)
                fresh |= rest if isinstance(rest, dict) else {}
            state = self._optimizer.state[owner.parameter]
            order = [*(key for key in state if key in fresh), *fresh]
            kept = {key: fresh[key] for key in order}
            state.clear()
            state.update(kept)
        groups: object
        if BY_NAME in value:
            groups = self._options_by_name(value)
        else:
            groups = rebuild(f"{self._name}.group", value.get("groups"), loaded)
        for group, stored_group in zip(
            self._optimizer.param_groups, groups if isinstance(groups, list) else [], strict=True
        ):
            for key, item in stored_group.items():
                _set_hyper_parameter(group, key, item)


def _is_flat(key: object, value: object) -> bool:
    return isinstance(value, torch.Tensor) and isinstance(key, str) and "." not in key


def _by_prefix(names: Mapping[str, object]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for name in names:
        prefix, _, key = name.rpartition(".")
        result.setdefault(prefix, []).append(key)
    return result


def _rests(value: Mapping[str, object]) -> Mapping[str, object]:
    rests = value.get("state")
    return rests if isinstance(rests, Mapping) else {}


def _set_hyper_parameter(group: dict[str, Any], key: str, item: object) -> None:
    live = group.get(key)
    if isinstance(live, torch.Tensor) and isinstance(item, int | float):
        # A captured graph or a compiled step holds this very tensor.
        live.fill_(item)
    elif isinstance(live, torch.Tensor) and isinstance(item, torch.Tensor) and live is not item:
        live.copy_(item.to(live.dtype))
    else:
        group[key] = item
