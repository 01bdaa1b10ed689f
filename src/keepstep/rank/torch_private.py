"""Every private name of torch that keepstep uses, tested against the installed version at start.

If a name is missing, ``problems`` says so and what is lost; nothing else breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

_HELPER = "_new_process_group_helper"


def problems() -> list[str]:
    """What this version of torch does not offer, one sentence each; empty when all is well."""
    found: list[str] = []
    if not callable(getattr(c10d, _HELPER, None)):
        found.append(
            f"torch {torch.__version__} has no distributed_c10d.{_HELPER}: groups made inside the "
            "script cannot be freed at once; a blocked rank waits for its time limit"
        )
    if not hasattr(getattr(c10d, "_world", None), "pg_map"):
        found.append(
            f"torch {torch.__version__} has no distributed_c10d._world.pg_map: the rank that "
            "missed a collective cannot be named"
        )
    return found


def wrap_group_creation(around: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter ``around()`` whenever torch makes a process group; for the life of the process."""
    original: Callable[..., Any] | None = getattr(c10d, _HELPER, None)
    if original is None:
        return

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with around():
            return original(*args, **kwargs)

    setattr(c10d, _HELPER, wrapped)


def wrap_init(accept: Callable[[str | None], bool]) -> None:
    """Let ``init_process_group`` do nothing where ``accept(backend)`` says so, from now on.

    The name is public; replacing it is not, but it is the only way to let a script keep its call.
    """
    original = c10d.init_process_group

    def wrapped(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if not (c10d.is_initialized() and accept(backend)):
            original(backend, *args, **kwargs)

    for module in (c10d, torch.distributed):
        setattr(module, "init_process_group", wrapped)  # noqa: B010 - typed as a constant


def forget_group_names() -> None:
    """Let the next default group have the first name again, after one that was never completed.

    ``destroy_process_group`` does this, but only if the default group exists; ranks whose counters
    differ never find each other's addresses in the store.
    """
    world = getattr(c10d, "_world", None)
    if world is not None and not c10d.is_initialized():
        world.group_count = 0


def groups() -> Iterator[tuple[str, Any]]:
    """Name and object of every process group of this process."""
    world = getattr(c10d, "_world", None)
    for group in tuple(getattr(world, "pg_map", {})):
        yield str(getattr(group, "group_name", "") or "world"), group


def sequence_number(group: Any) -> int:
    """How many collectives this rank has entered on ``group``; -1 if it cannot be told."""
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return -1


def sequence_numbers() -> dict[str, int]:
    """Collectives entered so far, by group; groups that cannot tell are left out."""
    numbers = {name: sequence_number(group) for name, group in groups()}
    return {name: number for name, number in numbers.items() if number >= 0}
