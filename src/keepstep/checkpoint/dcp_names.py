"""Which tracked object each name in a folder of torch's distributed checkpoints belongs to.

Pure. torch flattens nested state to names joined by dots; keepstep keeps one state per tracked
object, and an optimizer's by the full name of the parameter. What is understood::

    model.layers.0.weight                          parameter or buffer of the object "model"
    optimizer.state.layers.0.weight.exp_avg        optimizer state; or "optim" for "optimizer"
    optimizer.param_groups.0.lr                    options by group, with the group's names in
                                                   optimizer.param_groups.0.params
    optimizer.param_groups.layers.0.weight.lr      options by parameter (flattened)
    scheduler.last_epoch                           any other object

Where an optimizer's parameters are found without a name in front (torchtitan), they are the object
"model". Prefixes can be renamed before all this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keepstep.checkpoint.dcp_metadata import DcpMetadata
from keepstep.errors import CheckpointMismatch

_EXTRA = "_extra_state"
_STATE, _GROUPS = "state", "param_groups"
_MODEL, _OPTIMIZER = "model", "optimizer"
_ALIASES = {"optim": _OPTIMIZER}

Path = tuple[str | int, ...]


@dataclass(slots=True)
class OptimizerNames:
    """Names of one optimizer. Values are names in the folder.

    Attributes:
        options: By group (a number) or parameter (its full name), then by option.
        members: By group, the value that lists its parameters, as they are called in the folder.
        rest: State that is no tensor, by full name of the parameter and key.
        owners: Full names of parameters by the name that the folder has for them.
    """

    options: dict[int | str, dict[str, str]] = field(default_factory=dict)
    members: dict[int, str] = field(default_factory=dict)
    rest: dict[str, dict[str, str]] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Names:
    """What is used of a folder, by object. Names in the folder are called sources.

    Attributes:
        tensors: Source of each tensor, by the name that keepstep has for it.
        modules: Extra state of each module that is known to be one, as for others: the first part
            of a path is the key of a ``state_dict``.
        optimizers: By object.
        others: Of every other object: source and whether it is a tensor, by path inside it.
        unused: Why each other name is not used.
    """

    tensors: dict[str, str] = field(default_factory=dict)
    modules: dict[str, dict[Path, tuple[str, bool]]] = field(default_factory=dict)
    optimizers: dict[str, OptimizerNames] = field(default_factory=dict)
    others: dict[str, dict[Path, tuple[str, bool]]] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Item:
    """A name in the folder, cut into object, rest, and the path of the rest.

    ``bare``: it was a key of the outermost dict, so nothing says that it belongs to an object.
    """

    source: str
    root: str
    rest: str
    path: Path
    tensor: bool
    bare: bool


def resolve(
    found: DcpMetadata,
    renames: Sequence[tuple[str, str]] = (),
    tracked: Sequence[str] = (),
) -> Names:
    """Find out what each name in a folder is.

    Args:
        found: What the folder holds.
        renames: Prefixes of names to replace, as (old, new); the first that fits is used.
        tracked: Names of the objects that are to be restored, where they are known.

    Raises:
        CheckpointMismatch: an optimizer's state is kept by number, or two names become one.
    """
    items = [
        _item(source, found.paths[source], source in found.tensors, renames)
        for source in (*found.tensors, *found.values)
    ]
    optimizers = {item.root for item in items if item.path[:1] and _begins(item, _GROUPS)}
    items = _with_model(items, optimizers)
    names = Names()
    tensors = {f"{item.root}.{item.rest}" for item in items if item.tensor}
    modules = _modules(items, optimizers, tensors)
    for item in items:
        root = _tracked_as(item.root, optimizers, tracked)
        if item.root in optimizers:
            known = names.optimizers.setdefault(root, OptimizerNames())
            _add_optimizer(names, known, root, item, modules, tensors)
        elif item.root in modules:
            _add_module(names, root, item)
        else:
            names.others.setdefault(root, {})[item.path] = (item.source, item.tensor)
            if item.tensor:
                _add_tensor(names, f"{root}.{item.rest}" if item.rest else root, item.source)
    return names


def _item(source: str, path: Path, tensor: bool, renames: Sequence[tuple[str, str]]) -> _Item:
    name = source
    for old, new in renames:
        if name.startswith(old):
            name = new + name[len(old) :]
            break
    root, _, rest = name.partition(".")
    tail = path[1:]
    if ".".join(map(str, tail)) != rest:
        tail = tuple(rest.split(".")) if rest else ()
    return _Item(source, root, rest, tail, tensor, bare=len(path) == 1)


def _begins(item: _Item, word: str) -> bool:
    return item.rest.startswith(f"{word}.")


def _with_model(items: Sequence[_Item], optimizers: set[str]) -> list[_Item]:
    """Parameters that have no object in front of their names become those of ``model``."""
    full = {_joined(item) for item in items if item.tensor and item.root not in optimizers}
    bare = {
        item.rest[len(_STATE) + 1 :].rpartition(".")[0]
        for item in items
        if item.root in optimizers and _begins(item, _STATE)
    } & full
    if not bare or any(item.root == _MODEL for item in items):
        return list(items)
    return [
        _Item(item.source, _MODEL, _joined(item), (_joined(item),), item.tensor, bare=False)
        if item.bare
        and item.root not in optimizers
        and (item.tensor or _joined(item).rpartition(".")[2] == _EXTRA)
        else item
        for item in items
    ]


def _joined(item: _Item) -> str:
    return f"{item.root}.{item.rest}" if item.rest else item.root


def _modules(items: Sequence[_Item], optimizers: set[str], tensors: set[str]) -> set[str]:
    """Objects that are modules for sure: by their name, or because an optimizer has their
    parameters."""
    roots = {item.root for item in items} - optimizers
    parameters = {
        item.rest[len(_STATE) + 1 :].rpartition(".")[0]
        for item in items
        if item.root in optimizers and _begins(item, _STATE)
    }
    return {
        root
        for root in roots
        if root == _MODEL or any(f"{root}.{parameter}" in tensors for parameter in parameters)
    }


def _tracked_as(root: str, optimizers: set[str], tracked: Sequence[str]) -> str:
    """What an object is called here: optimizers have two usual names."""
    if root not in optimizers or root in tracked:
        return root
    usual = _ALIASES.get(root)
    if usual is not None and usual not in optimizers:
        return usual
    other = next((name for name, same in _ALIASES.items() if same == root), "")
    return other if other in tracked and other not in optimizers else root


def _add_tensor(names: Names, name: str, source: str) -> None:
    if name in names.tensors:
        raise CheckpointMismatch(
            f"{source} and {names.tensors[name]} would both be {name}",
            done="nothing was read",
            advice="rename one of them with another prefix",
        )
    names.tensors[name] = source


def _is_extra(item: _Item) -> bool:
    """Whether it is extra state of a module, or a part of it."""
    return bool(item.path) and str(item.path[0]).rpartition(".")[2] == _EXTRA


def _add_module(names: Names, root: str, item: _Item) -> None:
    extra = names.modules.setdefault(root, {})
    if _is_extra(item):
        extra[item.path] = (item.source, item.tensor)
        if item.tensor:
            _add_tensor(names, f"{root}.{_EXTRA}.{item.rest}", item.source)
    elif item.tensor and item.rest:
        _add_tensor(names, f"{root}.{item.rest}", item.source)
    else:
        names.unused[item.source] = "a module has no such value"


def _add_optimizer(
    names: Names,
    known: OptimizerNames,
    root: str,
    item: _Item,
    modules: set[str],
    tensors: set[str],
) -> None:
    owner, _, key = item.rest.partition(".")[2].rpartition(".")
    if _begins(item, _STATE) and owner:
        if owner.isdecimal() and f"{_MODEL}.{owner}" not in tensors:
            raise CheckpointMismatch(
                f"{item.source} is kept by the parameter's number, not by its name",
                done="nothing was read",
                advice="save it with torch.distributed.checkpoint.state_dict."
                "get_optimizer_state_dict, or restore the model alone",
            )
        full = known.owners.setdefault(owner, _full_name(owner, modules, tensors))
        if item.tensor:
            _add_tensor(names, f"{root}.{_STATE}.{full}.{key}", item.source)
        else:
            known.rest.setdefault(full, {})[key] = item.source
    elif _begins(item, _GROUPS) and owner and not item.tensor:
        if type(item.path[1] if len(item.path) > 1 else None) is int:
            group = int(item.path[1])
            if key == "params":
                known.members[group] = item.source
            else:
                known.options.setdefault(group, {})[key] = item.source
        else:
            full = known.owners.setdefault(owner, _full_name(owner, modules, tensors))
            known.options.setdefault(full, {})[key] = item.source
    else:
        names.unused[item.source] = "an optimizer has no such state"


def _full_name(owner: str, modules: set[str], tensors: set[str]) -> str:
    """The name of an optimizer's parameter with that of its module."""
    for module in sorted(modules):
        if f"{module}.{owner}" in tensors:
            return f"{module}.{owner}"
    return f"{_MODEL}.{owner}"


def nested(values: Mapping[Path, object]) -> object:
    """The container whose parts lie at these paths; numbers that count from 0 become a list."""
    if set(values) == {()}:
        return values[()]
    grouped: dict[str | int, dict[Path, object]] = {}
    for path, value in values.items():
        if path:  # a value beside its own parts has no place
            grouped.setdefault(path[0], {})[path[1:]] = value
    built = {key: nested(parts) for key, parts in grouped.items()}
    if built and all(type(key) is int for key in built) and set(built) == set(range(len(built))):
        return [built[key] for key in range(len(built))]
    return built
