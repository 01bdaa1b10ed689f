"""The tracked objects of a rank as named tensors and plain values, and where they go on restore.

Runs in the ranks. ``flatten`` decides what this rank writes: its chunk of every sharded tensor, its
share of the tensors that several ranks hold alike (spread over them by a hash of the name), and
every other tensor as a value of this rank only: to restore another rank's would not be equal. It
also says which of them only an optimizer's step changes: those may be copied while training goes
on.
"""

from __future__ import annotations

import bisect
import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from keepstep.checkpoint import typed_json
from keepstep.checkpoint.shard_file import Kind
from keepstep.checkpoint.torch_flat import FlatPart
from keepstep.checkpoint.torch_fsdp1_optimizer import Owned
from keepstep.checkpoint.torch_nested import Named, Spec
from keepstep.checkpoint.torch_optimizer import OptimizerPart
from keepstep.checkpoint.torch_parts import (
    HolderPart,
    ModulePart,
    Part,
    Stateful,
    StatefulPart,
    TensorPart,
)
from keepstep.checkpoint.torch_rng import RngState
from keepstep.errors import CheckpointError, CheckpointMismatch

OPTIONAL = "$engine."
"""Names of an engine's own state start so: another engine neither has it nor misses it."""
NESTED = "nested"
"""Type of a stored state of which its checkpoint, another library's, does not tell more."""
NAMES_KEY = "$names"
"""Key of ``Snapshot.values`` under which the digest of all tensor names of the rank lies."""

DTYPES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
"""safetensors' name of each torch type that a shard file can hold."""

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class Entry(NamedTuple):
    """A tensor that this rank writes.

    ``tensor`` is the live local part (it changes when training goes on), ``global_shape`` and
    ``offsets`` place it in the whole. ``stable``: nothing changes it until an optimizer steps, and
    torch's hooks see that. An operator that changes it in place counts it in ``_version`` of one of
    ``counted``, unless it is one of the fused optimizers'. ``of``: the tensor of which this is one
    of several chunks, where that has another name.
    """

    name: str
    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    kind: Kind
    stable: bool = False
    counted: tuple[torch.Tensor, ...] = ()
    of: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What this rank writes. No tensor is copied yet: it must be used before the state changes.

    ``values`` are the live ones, ``encoded`` what they were: see ``typed_json.encode``.
    """

    entries: tuple[Entry, ...]
    values: Mapping[str, object]
    encoded: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a checkpoint goes: tensors by name, then the other state with ``apply``.

    Until ``apply`` nothing but the contents of ``tensors`` has to change; tensors that do not exist
    yet (optimizer state before the first step) are made but not handed over.
    """

    parts: Mapping[str, Part]
    values: Mapping[str, Mapping[str, object]]
    tensors: Mapping[str, torch.Tensor]

    def apply(self) -> None:
        """Hand over everything that is not copied in place; random generators come last.

        Raises:
            CheckpointMismatch: a stored state has a form that its object does not take.
        """
        for name, part in self.parts.items():
            part.apply(self.values[name], self.tensors)


def parts_of(tracked: Mapping[str, object], world: int) -> dict[str, Part]:
    """A part for each tracked object.

    Raises:
        CheckpointError: an object cannot be kept; it is named.
    """
    for name in tracked:
        if not name or (name.startswith("$") and not name.startswith(OPTIONAL)):
            raise CheckpointError(
                f"{name!r} cannot be the name of something that is saved",
                done="nothing was saved",
                advice="use a text that is not empty and does not start with $",
            )
    modules = {
        name: ModulePart(name, item, world)
        for name, item in tracked.items()
        if isinstance(item, nn.Module)
    }
    names: dict[int, str] = {}
    replicated: set[int] = set()
    flat: dict[int, list[Owned]] = {}
    for module in modules.values():
        names = {**module.names, **names}
        replicated |= module.replicated
        flat = {**module.flat, **flat}
    parts: dict[str, Part] = {}
    for name, item in _random_last(tracked):
        if name in modules:
            parts[name] = modules[name]
        elif isinstance(item, torch.optim.Optimizer):
            parts[name] = OptimizerPart(name, item, names, replicated, flat)
        elif isinstance(item, torch.Tensor):
            parts[name] = TensorPart(name, item)
        elif isinstance(item, Stateful):
            parts[name] = StatefulPart(name, item)
        else:
            parts[name] = HolderPart(name, item)
    return parts


def _random_last(tracked: Mapping[str, object]) -> list[tuple[str, object]]:
    return sorted(tracked.items(), key=lambda item: isinstance(item[1], RngState))


def flatten(tracked: Mapping[str, object], *, rank: int, world: int) -> Snapshot:
    """What ``rank`` of ``world`` writes of ``tracked``.

    Args:
        tracked: By name: modules, optimizers, objects with ``state_dict`` and ``load_state_dict``,
            tensors, dicts, lists, namespaces and dataclasses.
        rank: This rank. world: Number of ranks.

    Raises:
        CheckpointError: something cannot be kept; the message names it.
    """
    parts = parts_of(tracked, world)
    owned: set[int] = set()
    for part in parts.values():
        owned |= part.owned if isinstance(part, OptimizerPart) else set()
    named = _unique(item for part in parts.values() for item in part.named())
    places = _Places(rank, world, owned)
    with torch.no_grad():
        entries = [entry for item in named for entry in places.entries(item)]
    values: dict[str, object] = {name: part.value() for name, part in parts.items()}
    values[NAMES_KEY] = digest(item.name for item in named)
    encoded = {name: typed_json.encode(value, name) for name, value in values.items()}
    return Snapshot(places.without_aliases(entries), values, encoded)


def prepare_for_load(
    tracked: Mapping[str, object],
    values: Mapping[str, object],
    specs: Mapping[str, Spec],
    *,
    world: int,
) -> Destination:
    """Where a checkpoint with ``values`` and tensors ``specs`` goes in ``tracked``.

    Optimizer state that does not exist yet is allocated here. Nothing tracked is changed. Objects
    whose names start with ``OPTIONAL`` may be on one side only.

    Raises:
        CheckpointError: an object cannot be kept.
        CheckpointMismatch: the checkpoint is of other objects.
    """
    parts = parts_of(tracked, world)
    stored = {name: value for name, value in values.items() if name != NAMES_KEY}
    for name in {one for one in parts.keys() ^ stored.keys() if one.startswith(OPTIONAL)}:
        parts.pop(name, None)
        stored.pop(name, None)
    _same_names("tracked objects", parts.keys(), stored.keys())
    checked: dict[str, Mapping[str, object]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, part in parts.items():
        value, kind = stored[name], part_type(part)
        if not isinstance(value, Mapping) or not _is_of(kind, value.get("type")):
            found = value.get("type") if isinstance(value, Mapping) else type(value).__name__
            raise CheckpointMismatch(
                f"{name} is tracked as {kind}, the checkpoint has it as {found}",
                done="nothing was restored",
            )
        checked[name] = value
        try:
            tensors |= part.targets(value, specs)
        except CheckpointMismatch:
            _same_modules(parts, specs)  # names say more than an optimizer's count of parameters
            raise
    return Destination(parts, checked, tensors)


def _same_modules(parts: Mapping[str, Part], specs: Mapping[str, Spec]) -> None:
    """Raise CheckpointMismatch if tensors of the tracked modules have other names than stored."""
    modules = {name: part for name, part in parts.items() if isinstance(part, ModulePart)}
    live = {item.name for part in modules.values() for item in part.named()}
    stored = {name for name in specs if any(name.startswith(f"{one}.") for one in modules)}
    _same_names("tensors", live, stored)


def _is_of(kind: str, stored: object) -> bool:
    """Whether a part of this kind takes a stored state of that one."""
    return stored == kind or (stored == NESTED and kind != "optimizer")


def part_type(part: Part) -> str:
    """What a part's stored value has as its ``type``."""
    return {
        ModulePart: "module",
        OptimizerPart: "optimizer",
        StatefulPart: "stateful",
        HolderPart: "data",
        TensorPart: "tensor",
    }[type(part)]


def digest(names: Iterable[str]) -> str:
    """A short digest of a set of tensor names."""
    return hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=16).hexdigest()


def _same_names(what: str, live: Iterable[str], stored: Iterable[str]) -> None:
    missing, unexpected = sorted(set(live) - set(stored)), sorted(set(stored) - set(live))
    if missing or unexpected:
        raise CheckpointMismatch(
            f"the checkpoint is of other {what}: {listed('missing', missing, unexpected)}",
            done="nothing was restored",
            advice="restore with the objects that were saved, under the same names",
        )


def listed(first: str, missing: list[str], unexpected: list[str]) -> str:
    """Up to ten names of each list and their number, as part of a sentence."""
    parts = []
    for word, names in ((first, missing), ("unexpected", unexpected)):
        if names:
            more = ", ..." if len(names) > 10 else ""
            parts.append(f"{len(names)} {word} ({', '.join(names[:10])}{more})")
    return ", ".join(parts)


def _unique(items: Iterable[Named]) -> list[Named]:
    seen: dict[str, Named] = {}
    for item in items:
        if item.name in seen:
            raise CheckpointError(
                f"{item.name} cannot be kept: two tensors have that name",
                done="nothing was saved",
                advice="track them under names that do not begin alike",
            )
        seen[item.name] = item
    return list(seen.values())


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Where a DTensor's local part lies; of ``replicas`` ranks with it this one is ``index``."""

    replicas: int
    index: int
    offsets: tuple[int, ...]


class _Places:
    """Turns named tensors into entries: what this rank writes of them, and where it belongs.

    Args:
        rank: This rank. world: Number of ranks.
        owned: Ids of what only an optimizer's step changes.
    """

    def __init__(self, rank: int, world: int, owned: set[int]) -> None:
        self._rank = rank
        self._world = world
        self._owned = owned
        self._chunks: dict[tuple[object, ...], _Chunk] = {}
        self._changing: list[tuple[int, int]] = []
        """First byte and the byte after the last of storages that may change at any time."""

    def entries(self, item: Named) -> list[Entry]:
        """What this rank writes of ``item``."""
        if item.tensor.numel() == 0:
            # Nobody has a chunk of it, so each rank notes that it exists.
            tensor = torch.empty(item.tensor.shape, dtype=item.tensor.dtype)
            shape = tuple(tensor.shape)
            return [Entry(item.name, tensor, shape, (0,) * tensor.dim(), "rank")]
        if isinstance(item.tensor, FlatPart):
            return self._flat(item, item.tensor)
        entry = self._entry(item)
        return [] if entry is None else [entry]

    def _flat(self, item: Named, part: FlatPart) -> list[Entry]:
        """An entry for each block; the first has the tensor's name."""
        name, stable = item.name, item.stable or id(part.owner) in self._owned
        _check(name, part.local)
        if not stable:
            self._note(part.local)
        if _chosen(name, part.replicas) != part.replica:
            return []
        return [
            Entry(
                name=f"{name}::{number}" if number else name,
                tensor=values,
                global_shape=part.global_shape,
                offsets=offsets,
                kind="shard",
                stable=stable,
                counted=(part.local,) if stable else (),
                of=name if number else "",
            )
            for number, ((offsets, _), values) in enumerate(part.blocks())
        ]

    def _entry(self, item: Named) -> Entry | None:
        name, whole = item.name, item.tensor
        sharded = isinstance(whole, DTensor)
        tensor = _local(name, whole) if isinstance(whole, DTensor) else whole.detach()
        stable = (item.stable or id(whole) in self._owned) and not tensor.is_inference()
        counted = () if not stable else (whole, tensor) if sharded else (whole,)
        if not stable:
            self._note(tensor)
        if isinstance(whole, DTensor):
            return self._sharded(name, whole, tensor, counted)
        _check(name, tensor)
        shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
        if not item.replicated:
            return Entry(name, tensor, shape, offsets, "rank", stable, counted)
        if _chosen(name, self._world) != self._rank:
            return None
        return Entry(name, tensor, shape, offsets, "shard", stable, counted)

    def _sharded(
        self, name: str, whole: DTensor, local: torch.Tensor, counted: tuple[torch.Tensor, ...]
    ) -> Entry | None:
        if whole.device_mesh.get_coordinate() is None:
            return None
        _check(name, local)
        key = (id(whole.device_mesh), whole.placements, whole.shape, local.shape)
        chunk = self._chunks.get(key)
        if chunk is None:
            chunk = self._chunks[key] = _chunk(name, whole, local)
        if _chosen(name, chunk.replicas) != chunk.index or local.numel() == 0:
            return None
        shape = tuple(whole.shape)
        return Entry(name, local, shape, chunk.offsets, "shard", bool(counted), counted)

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.layout == torch.strided and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            self._changing.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    def without_aliases(self, entries: Iterable[Entry]) -> tuple[Entry, ...]:
        """``entries``; one that shares memory with a tensor that is not stable is not either."""
        changing = sorted(self._changing)
        starts = [start for start, _ in changing]

        def shared(tensor: torch.Tensor) -> bool:
            address = tensor.data_ptr()
            at = bisect.bisect_right(starts, address) - 1
            return at >= 0 and address < changing[at][1]

        return tuple(
            entry._replace(stable=False, counted=())
            if entry.stable and shared(entry.tensor)
            else entry
            for entry in entries
        )


def _local(name: str, tensor: DTensor) -> torch.Tensor:
    for placement in tensor.placements:
        if placement.is_partial():
            raise _refused(name, f"its placement {placement} is a sum that is not finished")
    return tensor.to_local().detach()


def _chunk(name: str, tensor: DTensor, local: torch.Tensor) -> _Chunk:
    replicas, index = 1, 0
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            size = tensor.device_mesh.size(dim)
            replicas, index = replicas * size, index * size + coordinate[dim]
    if not local.numel():
        return _Chunk(replicas, index, ())
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        raise _refused(name, f"its local part under {tensor.placements} is not one block")
    return _Chunk(replicas, index, tuple(int(offset) for offset in chunks[0].offsets))


def _chosen(name: str, replicas: int) -> int:
    return zlib.crc32(name.encode()) % replicas


def _check(name: str, tensor: torch.Tensor) -> None:
    if type(tensor) is not torch.Tensor:
        raise _refused(name, f"it is a {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise _refused(name, f"its layout is {tensor.layout}")
    if tensor.device.type == "meta":
        raise _refused(name, "it has no data (device meta)")
    if tensor.dtype not in DTYPES:
        raise _refused(name, f"its type {tensor.dtype} has no place in a shard file")


def _refused(name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{name} cannot be kept: {why}",
        done="nothing was saved",
        advice="turn it into plain tensors in state_dict(), or do not track it",
    )
