"""Tensors inside nested containers: taken out for the shard file, put back after loading.

Runs in the ranks. A container is cut into a skeleton (the same containers with None where a tensor
was) and a list of tensors, each named by its path. Only tensors that this module hands out are ever
named by a path, so nothing in the user's data can be mistaken for one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from keepstep.errors import CheckpointError, CheckpointMismatch

Path = tuple[str | int, ...]


class Named(NamedTuple):
    """A live tensor and its name in the checkpoint.

    ``replicated``: every rank of the world holds the same values, so one of them writes.
    ``stable``: only a step of a torch optimizer changes it.
    """

    name: str
    tensor: torch.Tensor
    replicated: bool = False
    stable: bool = False


@dataclass(frozen=True, slots=True)
class Spec:
    """What a checkpoint holds under one name: element type and global shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def empty(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """A plain tensor of that shape and type, to be filled."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` (globally, for a DTensor) has that shape and type."""
        return tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype


@dataclass(frozen=True, slots=True)
class Nested:
    """A container without its tensors, and the tensors by path."""

    prefix: str
    skeleton: object
    tensors: Mapping[Path, torch.Tensor]

    def named(self) -> list[Named]:
        """The tensors with their names."""
        return [Named(name_of(self.prefix, path), value) for path, value in self.tensors.items()]

    def packed(self) -> dict[str, object]:
        """What is stored beside the tensors."""
        return {"state": self.skeleton, "tensors": [list(path) for path in self.tensors]}


def name_of(prefix: str, path: Path) -> str:
    """Name of the tensor at ``path``."""
    return ".".join([prefix, *(str(part) for part in path)])


def split(prefix: str, value: object) -> Nested:
    """Cut ``value`` into skeleton and tensors.

    Raises:
        CheckpointError: a tensor lies in a container that cannot be rebuilt; it is named.
    """
    found: dict[Path, torch.Tensor] = {}
    return Nested(prefix, _take(prefix, value, (), found), found)


def _take(prefix: str, value: object, path: Path, found: dict[Path, torch.Tensor]) -> object:
    if isinstance(value, torch.Tensor):
        found[path] = value
        return None
    before = len(found)
    cut: object
    if isinstance(value, Mapping):
        cut = {key: _take(prefix, item, (*path, key), found) for key, item in value.items()}
        kept = type(value) in (dict, OrderedDict) and all(type(key) in (str, int) for key in value)
    elif isinstance(value, list | tuple):
        parts = [_take(prefix, item, (*path, at), found) for at, item in enumerate(value)]
        cut = tuple(parts) if isinstance(value, tuple) else parts
        kept = type(value) in (list, tuple)
    else:
        return value
    if len(found) == before:
        return value
    if not kept:
        raise CheckpointError(
            f"{name_of(prefix, path)} cannot be kept: a {type(value).__name__} with tensors inside "
            "cannot be rebuilt on restore",
            done="nothing was saved",
            advice="use a dict with string or integer keys, a list or a tuple",
        )
    return cut


def unpack(prefix: str, packed: object) -> tuple[object, list[Path]]:
    """Skeleton and tensor paths of a stored value.

    Raises:
        CheckpointMismatch: it is not a stored container.
    """
    if isinstance(packed, Mapping) and isinstance(packed.get("tensors"), list):
        paths = [tuple(path) for path in packed["tensors"] if isinstance(path, list | tuple)]
        if len(paths) == len(packed["tensors"]):
            return packed.get("state"), paths
    raise CheckpointMismatch(f"the stored state of {prefix} has an unknown form")


def targets(
    prefix: str,
    paths: list[Path],
    specs: Mapping[str, Spec],
    live: Mapping[Path, torch.Tensor],
    *,
    in_place: bool,
) -> dict[str, torch.Tensor]:
    """Where the stored tensors at ``paths`` go.

    A live tensor of the same shape and type is taken itself (``in_place``) or copied in kind, so
    that a DTensor stays one; for the rest plain tensors are made.

    Raises:
        CheckpointMismatch: one of them is not stored.
    """
    result: dict[str, torch.Tensor] = {}
    for path in paths:
        name = name_of(prefix, path)
        if name not in specs:
            raise CheckpointMismatch(
                f"the checkpoint lacks {name}, which its own state names",
                done="nothing was restored",
                advice="use an older checkpoint",
            )
        spec, present = specs[name], live.get(path)
        if present is None or not spec.fits(present):
            result[name] = spec.empty(present.device if present is not None else "cpu")
        else:
            result[name] = present if in_place else torch.empty_like(present.detach())
    return result


def join(skeleton: object, tensors: Mapping[Path, torch.Tensor], path: Path = ()) -> object:
    """The container again, with ``tensors`` at their places."""
    if path in tensors:
        return tensors[path]
    if isinstance(skeleton, dict):
        return {key: join(value, tensors, (*path, key)) for key, value in skeleton.items()}
    if type(skeleton) in (list, tuple) and isinstance(skeleton, list | tuple):
        parts = [join(value, tensors, (*path, at)) for at, value in enumerate(skeleton)]
        return tuple(parts) if isinstance(skeleton, tuple) else parts
    return skeleton


def rebuild(prefix: str, packed: object, loaded: Mapping[str, torch.Tensor]) -> object:
    """The stored container with its tensors taken from ``loaded``, which ``targets`` has made."""
    skeleton, paths = unpack(prefix, packed)
    if not paths:
        return skeleton
    return join(skeleton, {path: loaded[name_of(prefix, path)] for path in paths})
