"""Tracked objects as parts of a checkpoint: modules, objects with ``state_dict``, data holders.

Runs in the ranks. A part names its tensors, gives its other state as plain values, says where
stored tensors go, and takes both back. Nothing of the tracked object changes before ``apply`` but
the tensors that ``targets`` returned. Optimizers have a file of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from keepstep.checkpoint import torch_fsdp1
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

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_EXTRA = "_extra_state"


class Part(Protocol):
    """One tracked object."""

    def named(self) -> list[Named]:
        """Its tensors as they are now."""

    def value(self) -> dict[str, object]:
        """Its other state; ``type`` says what it is a state of."""

    def targets(
        self, value: Mapping[str, object], specs: Mapping[str, Spec]
    ) -> dict[str, torch.Tensor]:
        """Where the stored tensors ``specs`` go; a name that they lack is missing from them."""

    def apply(self, value: Mapping[str, object], loaded: Mapping[str, torch.Tensor]) -> None:
        """Take the stored state; ``loaded`` are the filled tensors of ``targets``."""


@runtime_checkable
class Stateful(Protocol):
    """Anything that can give and take its state."""

    def state_dict(self) -> object:
        """The state."""

    def load_state_dict(self, state_dict: object, /) -> object:
        """Take ``state_dict``."""


class ModulePart:
    """Parameters, persistent buffers and extra state of a module.

    Raises:
        CheckpointError: a key of its ``state_dict`` cannot be kept.
    """

    def __init__(self, name: str, module: nn.Module, world: int) -> None:
        self._name, self._module = name, module
        self._named: list[Named] = []
        self._extra: dict[str, object] = {}
        self._tied: dict[str, str] = {}
        """Further names of tensors that have one already, within the module."""
        self.names: dict[int, str] = {}
        self.replicated = _replicated(module, world)
        self.flat: dict[int, list[tuple[str, torch_fsdp1.Shard]]] = {}
        """What FSDP1 holds: by id of what an optimizer has, names and parts."""
        if torch_fsdp1.is_wrapped(module):
            self._take_fsdp1()
        else:
            self._take_state()

    def _take_fsdp1(self) -> None:
        wrapped = _replica_paths(self._module)
        for shard in torch_fsdp1.shards(self._module):
            full = f"{self._name}.{strip(shard.name, wrapped)}"
            self._named.append(Named(full, shard.part))
            self.flat.setdefault(id(shard.owner), []).append((full, shard))
        for key, tensor in torch_fsdp1.rest(self._module):
            self._add(f"{self._name}.{strip(key, wrapped)}", tensor)
        self._extra = dict(torch_fsdp1.extra_state(self._module))

    def _take_state(self) -> None:
        module, wrapped = self._module, _replica_paths(self._module)
        # state_dict first: its hooks bring FSDP2's parameters back into their sharded form.
        state = module.state_dict(keep_vars=True)
        known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        for key, value in state.items():
            full = f"{self._name}.{strip(key, wrapped)}"
            if key.rpartition(".")[2] == _EXTRA:
                self._extra[key] = value
            elif not isinstance(value, torch.Tensor) or id(value) not in known:
                raise CheckpointError(
                    f"{full} cannot be kept: it is in the module's state_dict but is neither a "
                    "parameter nor a buffer",
                    done="nothing was saved",
                    advice="track what it stands for by itself, or keep it in get_extra_state",
                )
            else:
                self._add(full, value)

    def _add(self, full: str, tensor: torch.Tensor) -> None:
        if id(tensor) not in self.names:
            self.names[id(tensor)] = full
            self._named.append(Named(full, tensor, id(tensor) in self.replicated))
        else:
            inner = len(self._name) + 1
            self._tied[full[inner:]] = self.names[id(tensor)][inner:]

    def named(self) -> list[Named]:
        return [*self._named, *self._extra_state.named()]

    @functools.cached_property
    def _extra_state(self) -> Nested:
        wrapped = _replica_paths(self._module)
        return split(
            f"{self._name}.{_EXTRA}",
            {strip(key, wrapped): value for key, value in self._extra.items()},
        )

    def value(self) -> dict[str, object]:
        value: dict[str, object] = {"type": "module"}
        if self._tied:
            value["tied"] = self._tied
        if self._extra:
            value["extra"] = self._extra_state.packed()
        return value

    def targets(
        self, value: Mapping[str, object], specs: Mapping[str, Spec]
    ) -> dict[str, torch.Tensor]:
        result = {item.name: item.tensor for item in self._named}
        prefix, live = f"{self._name}.{_EXTRA}", self._extra_state
        if "extra" in value:
            stored, paths = unpack(prefix, value["extra"])
            result |= targets(prefix, paths, specs, live.tensors, in_place=False)
        else:
            stored = {}
        if _keys(stored) != _keys(live.skeleton):
            raise CheckpointMismatch(
                f"{self._name} has extra state of {_keys(live.skeleton)}, the checkpoint of "
                f"{_keys(stored)}",
                done="nothing was restored",
            )
        return result

    def apply(self, value: Mapping[str, object], loaded: Mapping[str, torch.Tensor]) -> None:
        if "extra" not in value:
            return
        stored = rebuild(f"{self._name}.{_EXTRA}", value["extra"], loaded)
        wrapped = _replica_paths(self._module)
        for key in self._extra:
            owner = self._module.get_submodule(key.rpartition(".")[0])
            if isinstance(stored, Mapping):
                owner.set_extra_state(stored[strip(key, wrapped)])


class StatefulPart:
    """State of an object with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, name: str, stateful: Stateful) -> None:
        self._name, self._stateful = name, stateful

    @functools.cached_property
    def _nested(self) -> Nested:
        return split(self._name, self._stateful.state_dict())

    def named(self) -> list[Named]:
        return self._nested.named()

    def value(self) -> dict[str, object]:
        return {"type": "stateful", **self._nested.packed()}

    def targets(
        self, value: Mapping[str, object], specs: Mapping[str, Spec]
    ) -> dict[str, torch.Tensor]:
        _, paths = unpack(self._name, value)
        # A loader may start workers in state_dict: it is asked only where tensors are stored.
        live = self._nested.tensors if paths else {}
        return targets(self._name, paths, specs, live, in_place=False)

    def apply(self, value: Mapping[str, object], loaded: Mapping[str, torch.Tensor]) -> None:
        self._stateful.load_state_dict(rebuild(self._name, value, loaded))


class HolderPart:
    """A dict, a list, a SimpleNamespace or a dataclass, restored in place.

    Raises:
        CheckpointError: ``holder`` is none of these, or cannot be changed in place.
    """

    def __init__(self, name: str, holder: object) -> None:
        self._name, self._holder = name, holder
        if isinstance(holder, dict | list | types.SimpleNamespace):
            return
        if _is_changeable_dataclass(holder):
            return
        raise CheckpointError(
            f"{name} cannot be kept: a {type(holder).__name__} cannot be restored in place",
            done="nothing was saved",
            advice="give it state_dict and load_state_dict, or put the data into a dict",
        )

    def _data(self) -> object:
        holder = self._holder
        if isinstance(holder, types.SimpleNamespace):
            return dict(vars(holder))
        if isinstance(holder, dict | list):
            return holder
        fields: tuple[dataclasses.Field[object], ...] = dataclasses.fields(cast("Any", holder))
        return {field.name: getattr(holder, field.name) for field in fields}

    @functools.cached_property
    def _nested(self) -> Nested:
        return split(self._name, self._data())

    def named(self) -> list[Named]:
        return self._nested.named()

    def value(self) -> dict[str, object]:
        return {"type": "data", **self._nested.packed()}

    def targets(
        self, value: Mapping[str, object], specs: Mapping[str, Spec]
    ) -> dict[str, torch.Tensor]:
        _, paths = unpack(self._name, value)
        return targets(self._name, paths, specs, self._nested.tensors, in_place=True)

    def apply(self, value: Mapping[str, object], loaded: Mapping[str, torch.Tensor]) -> None:
        stored, holder = rebuild(self._name, value, loaded), self._holder
        if isinstance(holder, list) and isinstance(stored, list):
            holder[:] = stored
        elif isinstance(holder, dict) and isinstance(stored, Mapping):
            holder.clear()
            holder.update(stored)
        elif isinstance(stored, Mapping) and not isinstance(holder, list | dict):
            for key, item in stored.items():
                setattr(holder, str(key), item)
        else:
            raise CheckpointMismatch(
                f"{self._name} is a {type(holder).__name__}, the checkpoint has a "
                f"{type(stored).__name__}"
            )


class TensorPart:
    """A single tensor."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._item = Named(name, tensor)

    def named(self) -> list[Named]:
        return [self._item]

    def value(self) -> dict[str, object]:
        return {"type": "tensor"}

    def targets(
        self, value: Mapping[str, object], specs: Mapping[str, Spec]
    ) -> dict[str, torch.Tensor]:
        return {self._item.name: self._item.tensor}

    def apply(self, value: Mapping[str, object], loaded: Mapping[str, torch.Tensor]) -> None:
        return None


def _is_changeable_dataclass(holder: object) -> bool:
    if not dataclasses.is_dataclass(holder) or isinstance(holder, type):
        return False
    parameters: Any = vars(type(holder)).get("__dataclass_params__")
    return parameters is not None and not parameters.frozen


def _keys(state: object) -> list[str]:
    return sorted(str(key) for key in state) if isinstance(state, Mapping) else []


def strip(key: str, replica_paths: frozenset[str]) -> str:
    """``key`` of a ``state_dict`` without what wrappers put into it.

    ``module`` is dropped only right under a DistributedDataParallel (``replica_paths``): a user's
    own submodule may have that name.
    """
    kept: list[str] = []
    walked: list[str] = []
    for part in key.split("."):
        under = ".".join(walked) in replica_paths and part == "module"
        walked.append(part)
        if not under and part not in _WRAPPERS:
            kept.append(part)
    return ".".join(kept)


def _replica_paths(module: nn.Module) -> frozenset[str]:
    return frozenset(
        name
        for name, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, DistributedDataParallel)
    )


def _replicated(module: nn.Module, world: int) -> set[int]:
    """Ids of the parameters that data parallelism keeps equal on every rank of the world."""
    result: set[int] = set()
    for child in module.modules():
        if not isinstance(child, DistributedDataParallel):
            continue
        if dist.get_world_size(child.process_group) != world:
            continue
        ignored: set[str] = set(getattr(child, "parameters_to_ignore", ()))
        for name, parameter in child.module.named_parameters():
            if name not in ignored:
                result.add(id(parameter))
    return result
