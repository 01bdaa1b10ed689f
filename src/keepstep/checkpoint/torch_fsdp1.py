"""What FSDP1 (``FullyShardedDataParallel``) holds on this rank, without gathering anything.

Runs in the ranks. FSDP1's own sharded ``state_dict`` gathers each parameter before it cuts it
again; its local shards are read here where they lie. This needs names of torch that are not public:
they are all in this file, and a torch that has others is refused by what it lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from keepstep.checkpoint.torch_flat import FlatPart
from keepstep.errors import CheckpointError

_WRAPPER = "FullyShardedDataParallel"
_PREFIX = "_fsdp_wrapped_module."
_NEEDED = ("_fqns", "_shapes", "_numels_with_padding", "_is_padding_mask")


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of one parameter.

    ``part.owner`` is what an optimizer has instead of it: the parameter itself
    (``use_orig_params``), or a flat parameter of which this one is the elements from ``at`` on.
    """

    name: str
    part: FlatPart
    owner: nn.Parameter
    at: int

    def part_of(self, value: torch.Tensor) -> FlatPart:
        """The part of ``value``, which has the owner's elements, that is of this parameter."""
        local = value.detach().view(-1).narrow(0, self.at, self.part.local.numel())
        return self.part.of(local)

    def scalar(self, value: torch.Tensor) -> FlatPart:
        """``value``, of one element, as the state of this parameter: the rank that holds its first
        element has it."""
        part = self.part
        holds = part.start == 0 and part.local.numel() > 0
        local = value.detach().view(-1)[: 1 if holds else 0]
        return FlatPart(
            local, (), 0, owner=part.owner, replica=part.replica, replicas=part.replicas
        )


def is_wrapped(module: nn.Module) -> bool:
    """Whether FSDP1 holds parameters of ``module``."""
    return any(type(child).__name__ == _WRAPPER for child in module.modules())


def plain(key: str) -> str:
    """``key`` without what the wrappers put into names."""
    return key.replace(_PREFIX, "")


def shards(module: nn.Module) -> list[Shard]:
    """Every parameter that FSDP1 holds in ``module``, by its plain name, in module order.

    Raises:
        CheckpointError: this torch keeps them in another way.
    """
    found: list[Shard] = []
    for path, wrapper in module.named_modules():
        handle = getattr(wrapper, "_handle", None)
        if type(wrapper).__name__ != _WRAPPER or handle is None:
            continue
        flat = handle.flat_param
        missing = [name for name in _NEEDED if not hasattr(flat, name)]
        if missing:
            raise CheckpointError(
                f"torch {torch.__version__} keeps the shards of {_WRAPPER} in another way: "
                f"{', '.join(missing)} missing",
                done="nothing was saved",
                advice="use torch.distributed.fsdp.fully_shard",
            )
        found += _of_handle(plain(f"{path}." if path else ""), wrapper, handle, flat)
    return found


def _of_handle(prefix: str, wrapper: Any, handle: Any, flat: Any) -> Iterator[Shard]:
    sharded = bool(handle.uses_sharded_strategy)
    # Before the first forward there is no other form of it than the shard.
    local: torch.Tensor = getattr(flat, "_local_shard", flat.data) if sharded else flat.data
    outer = getattr(wrapper, "_inter_node_pg", None)
    if sharded:
        replica, replicas = (dist.get_rank(outer), dist.get_world_size(outer)) if outer else (0, 1)
    else:
        replica = dist.get_rank(wrapper.process_group)
        replicas = dist.get_world_size(wrapper.process_group)
    originals = getattr(flat, "_params", None)
    offsets = _offsets(flat._numels_with_padding, flat._is_padding_mask)
    for index, (fqn, shape) in enumerate(zip(flat._fqns, flat._shapes, strict=True)):
        shape = tuple(shape)
        if sharded:
            info = flat._shard_param_infos[index]
            count = int(info.numel_in_shard or 0) if info.in_shard else 0
            offset = int(info.offset_in_shard or 0) if info.in_shard else 0
            start = int(info.intra_param_start_idx or 0) if info.in_shard else 0
        else:
            count, start, offset = torch.Size(shape).numel(), 0, offsets[index]
        own = originals[index] if originals is not None else None
        owner = flat if own is None else own
        part = FlatPart(
            local.detach().view(-1).narrow(0, offset, count),
            shape,
            start,
            owner=owner,
            replica=replica,
            replicas=replicas,
        )
        yield Shard(f"{prefix}{fqn}", part, owner, offset if own is None else 0)


def _offsets(sizes: Iterable[int], are_padding: Iterable[bool]) -> list[int]:
    """Where each parameter begins in the whole flat one; between them lies padding."""
    found, at = [], 0
    for size, is_padding in zip(sizes, are_padding, strict=True):
        if not is_padding:
            found.append(at)
        at += size
    return found


def rest(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What else belongs to the state of ``module``: parameters that FSDP1 does not hold, and
    persistent buffers, by plain name."""
    held = {id(shard.owner) for shard in shards(module)}
    for path, child in module.named_modules(remove_duplicate=False):
        prefix = plain(f"{path}." if path else "")
        for name, parameter in child._parameters.items():
            if parameter is not None and id(parameter) not in held and not _is_flat(parameter):
                yield f"{prefix}{name}", parameter
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield f"{prefix}{name}", buffer


def _is_flat(parameter: nn.Parameter) -> bool:
    return all(hasattr(parameter, name) for name in _NEEDED)


def extra_state(module: nn.Module) -> Iterator[tuple[str, object]]:
    """What modules keep besides tensors (``get_extra_state``), by plain name."""
    for path, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            prefix = plain(f"{path}." if path else "")
            yield f"{prefix}_extra_state", child.get_extra_state()
