"""Makes pickles for tests, hostile ones too. Nothing here loads one."""

from __future__ import annotations

import importlib
from typing import Any

_pickle: Any = importlib.import_module("pickle")


def dumps(value: object, protocol: int) -> bytes:
    """``value`` as a pickle."""
    data: bytes = _pickle.dumps(value, protocol)
    return data


class _Call:
    def __init__(self, function: Any, argument: str) -> None:
        self._made = (function, (argument,))

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return self._made


def call(name: str, argument: str, protocol: int) -> bytes:
    """A pickle that calls ``name`` (module and function) when it is loaded."""
    module, _, function = name.rpartition(".")
    return dumps(_Call(getattr(importlib.import_module(module), function), argument), protocol)


def calling(name: str, argument: str) -> object:
    """An object that calls ``name`` when it is loaded from a pickle."""
    module, _, function = name.rpartition(".")
    return _Call(getattr(importlib.import_module(module), function), argument)
