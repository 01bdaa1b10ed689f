"""Optimizer state of parameters that FSDP1 holds: cut and named like the parameters themselves.

Runs in the ranks. The state of a parameter has the elements that this rank has of it; where the
optimizer has a flat parameter, the state of each parameter in it is a part of that one's. Numbers
such as the step count are equal wherever they exist, and a rank without elements may have none:
they are stored once, by the rank that holds the first element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from keepstep.checkpoint.torch_fsdp1 import Shard
from keepstep.checkpoint.torch_nested import Named, Spec
from keepstep.errors import CheckpointError

Owned = tuple[str, Shard]
"""A parameter's full name, and this rank's part of it."""


class FlatStates:
    """State of the parameters of ``optimizer`` that are in ``owned``.

    Args:
        name: Name under which the optimizer is tracked.
        optimizer: The optimizer.
        owned: By id of what the optimizer has: the parameters that it stands for.
    """

    def __init__(
        self, name: str, optimizer: torch.optim.Optimizer, owned: Mapping[int, list[Owned]]
    ) -> None:
        self._name, self._optimizer, self._owned = name, optimizer, owned
        self._bases: dict[tuple[int, str], torch.Tensor] = {}
        """State to be: by parameter and key, filled through ``targets``."""

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._owned

    def count(self, parameter: torch.Tensor) -> int:
        """How many parameters ``parameter`` stands for."""
        return len(self._owned.get(id(parameter), (None,)))

    def _parameters(self) -> Iterator[tuple[torch.Tensor, dict[str, Any], list[Owned]]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self:
                    yield parameter, group, self._owned[id(parameter)]

    def _prefix(self, full: str) -> str:
        return f"{self._name}.state.{full}"

    def named(self, stable: set[int]) -> list[Named]:
        """The state that there is, under the names of the parameters.

        Args:
            stable: Ids of the parameters that nothing but a step changes.

        Raises:
            CheckpointError: there is some that is neither a number nor as large as its parameter.
        """
        found: list[Named] = []
        for parameter, _, owned in self._parameters():
            state: dict[Any, Any] = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                for full, shard in owned:
                    name = f"{self._prefix(full)}.{key}"
                    part = _part(name, shard, parameter, value)
                    found.append(Named(name, part, stable=id(parameter) in stable))
        return found

    def targets(
        self, stored: Mapping[str, list[str]], specs: Mapping[str, Spec]
    ) -> dict[str, torch.Tensor]:
        """Where stored state goes; ``stored``: keys by prefix."""
        found: dict[str, torch.Tensor] = {}
        for parameter, group, owned in self._parameters():
            live: dict[Any, Any] = self._optimizer.state.get(parameter, {})
            for full, shard in owned:
                prefix = self._prefix(full)
                keys = stored.get(prefix, [])
                for key in keys:
                    name = f"{prefix}.{key}"
                    at = (id(parameter), key)
                    if at not in self._bases:
                        present = live.get(key)
                        self._bases[at] = (
                            _empty(parameter, group, key, specs[name])
                            if present is None
                            else present
                        )
                    base = self._bases[at]
                    found[name] = base if base.dim() == 0 else shard.part_of(base)
                for key in live:
                    if keys and key not in keys:  # reported as missing from the checkpoint
                        found[f"{prefix}.{key}"] = live[key]
        return found

    def apply(self) -> None:
        """Hand the filled state over; parameters without stored state lose theirs."""
        for parameter, _, _ in self._parameters():
            fresh = {key: base for (at, key), base in self._bases.items() if at == id(parameter)}
            if not fresh:
                self._optimizer.state.pop(parameter, None)
                continue
            if not parameter.numel() and parameter not in self._optimizer.state:
                continue  # torch makes no state for a parameter of which this rank has nothing
            state = self._optimizer.state[parameter]
            order = [*(key for key in state if key in fresh), *fresh]
            kept = {key: fresh[key] for key in order}
            state.clear()
            state.update(kept)


def _part(name: str, shard: Shard, parameter: torch.Tensor, value: object) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return shard.scalar(value)
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return shard.part_of(value)
    raise CheckpointError(
        f"{name} cannot be kept: it is neither a number nor a tensor as large as its parameter, "
        "and FSDP1 does not say how it is cut",
        done="nothing was saved",
        advice="use torch.distributed.fsdp.fully_shard",
    )


def _empty(parameter: torch.Tensor, group: Mapping[str, Any], key: str, spec: Spec) -> torch.Tensor:
    if not spec.shape:
        on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
        return spec.empty("cpu" if on_host else parameter.device)
    return torch.zeros_like(parameter.detach(), dtype=spec.dtype)
