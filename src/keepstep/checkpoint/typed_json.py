"""Non-tensor state as JSON and back without loss. No pickle: decoding creates plain values only.

What JSON has (None, bool, int, finite float, str, list, dict with str keys) is written as it is.
The rest is an object with the key ``$`` that names the type::

    {"$": "tuple", "v": [1, 2]}
    {"$": "dict", "v": [[key, value], ...]}
    {"$": "bytes", "v": "AA=="}

A dict of the user that has the key ``$`` itself is written as pairs, so that it is never taken for
such an object. Types are matched exactly: a subclass would come back as something else, so it is
refused, except for those listed here.
"""

from __future__ import annotations

import base64
import binascii
import collections
import importlib
import math
import sys
from collections.abc import Callable, Hashable
from typing import Any

import msgspec

from keepstep.errors import CheckpointCorrupt, CheckpointError

MAX_DEPTH = 100
_MARK = "$"
_INT_LIMIT = 1 << 63
_DICTS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "ordered_dict",
    collections.Counter: "counter",
}
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}


def dumps(value: object, path: str = "value") -> bytes:
    """``value`` as JSON text. Raises as ``encode``."""
    return msgspec.json.encode(encode(value, path))


def loads(data: bytes, path: str = "value") -> Any:
    """The value that ``dumps`` wrote.

    Raises:
        CheckpointCorrupt: the text is not what ``dumps`` writes.
        CheckpointError: numpy is needed and not installed.
    """
    try:
        node = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _corrupt(path, str(error)) from error
    return decode(node, path)


def encode(value: object, path: str = "value") -> Any:
    """``value`` as a tree of what JSON has.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict, Counter, set,
            frozenset, numpy arrays and scalars, nested at most ``MAX_DEPTH`` deep.
        path: What the value is called in errors.

    Raises:
        CheckpointError: something in it cannot be kept; the message names its key.
    """
    return _encode(value, path, 0)


def _encode(value: object, path: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CheckpointError(
            f"{path} is nested more than {MAX_DEPTH} levels deep",
            done="the state was not saved",
            advice="look for a container that holds itself",
        )
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        assert isinstance(value, int)
        return value if -_INT_LIMIT <= value < _INT_LIMIT else _marked("int", hex(value))
    if kind is float:
        assert isinstance(value, float)
        return value if math.isfinite(value) else _marked("float", repr(value))
    if kind is str:
        assert isinstance(value, str)
        return value if _is_unicode(value) else _marked("str", _text_of_surrogates(value))
    if kind is bytes:
        assert isinstance(value, bytes)
        return _marked("bytes", _to_base64(value))
    if kind is list:
        assert isinstance(value, list)
        return [_encode(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(value)]
    if kind in _SEQUENCES:
        assert isinstance(value, tuple | set | frozenset)
        items = [_encode(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(value)]
        if kind is not tuple:  # sets have no order; a fixed one makes equal states equal bytes
            items.sort(key=msgspec.json.encode)
        return _marked(_SEQUENCES[kind], items)
    if kind in _DICTS:
        assert isinstance(value, dict)
        return _encode_dict(value, path, depth)
    return _encode_numpy(value, path)


def _encode_dict(value: dict[Any, Any], path: str, depth: int) -> Any:
    kind = type(value)
    pairs = [(key, _encode(item, f"{path}[{key!r}]", depth + 1)) for key, item in value.items()]
    plain = kind is dict and _MARK not in value
    if plain and all(type(key) is str and _is_unicode(key) for key in value):
        return dict(pairs)
    return _marked(
        _DICTS[kind],
        [[_encode(key, f"key {key!r} of {path}", depth + 1), item] for key, item in pairs],
    )


def _encode_numpy(value: object, path: str) -> Any:
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        array: Any = numpy.asarray(value)
        # A dtype that its short name does not give back (objects, fields, bfloat16) would change.
        if not array.dtype.hasobject and numpy.dtype(array.dtype.str) == array.dtype:
            return {
                _MARK: "array" if type(value) is numpy.ndarray else "scalar",
                "dtype": array.dtype.str,
                "shape": list(array.shape),
                "v": _to_base64(array.tobytes()),
            }
        raise _refused(path, f"a numpy value of dtype {array.dtype}")
    raise _refused(path, f"of type {type(value).__module__}.{type(value).__qualname__}")


def _refused(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is {what}, which a checkpoint cannot keep",
        done="the state was not saved",
        advice="turn it into numbers, strings, lists, tuples, dicts, sets, bytes, numpy arrays or "
        "tensors in state_dict()",
    )


def _marked(kind: str, value: Any) -> dict[str, Any]:
    return {_MARK: kind, "v": value}


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text_of_surrogates(text: str) -> str:
    return _to_base64(text.encode("utf-8", "surrogatepass"))


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode(node: Any, path: str = "value") -> Any:
    """The value that ``encode`` turned into ``node``.

    Raises:
        CheckpointCorrupt: ``node`` is not what ``encode`` makes.
        CheckpointError: numpy is needed and not installed.
    """
    return _decode(node, path, 0)


def _decode(node: Any, path: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _corrupt(path, f"it is nested more than {MAX_DEPTH} levels deep")
    if isinstance(node, list):
        return [_decode(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if _MARK not in node:
        return {key: _decode(item, f"{path}[{key!r}]", depth + 1) for key, item in node.items()}
    kind = node[_MARK]
    try:
        if kind in _LEAVES:
            return _LEAVES[kind](node["v"])
        if kind in _SEQUENCE_TYPES:
            items = _decode_list(node["v"], path, depth)
            return _SEQUENCE_TYPES[kind](items)
        if kind in _DICT_TYPES:
            return _decode_pairs(_DICT_TYPES[kind](), node["v"], path, depth)
        if kind in ("array", "scalar"):
            return _decode_numpy(node, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _corrupt(path, f"{type(error).__name__}: {error}") from error
    raise _corrupt(path, f"the type {kind!r} is not known")


def _decode_list(node: Any, path: str, depth: int) -> list[Any]:
    if not isinstance(node, list):
        raise TypeError("a list is missing")
    return [_decode(item, f"{path}[{at}]", depth + 1) for at, item in enumerate(node)]


def _decode_pairs(into: Any, node: Any, path: str, depth: int) -> Any:
    for key_node, item in node:
        key = _decode(key_node, f"a key of {path}", depth + 1)
        if not isinstance(key, Hashable):
            raise TypeError("a key is a container that can change")
        into[key] = _decode(item, f"{path}[{key!r}]", depth + 1)
    return into


def _decode_numpy(node: dict[str, Any], path: str) -> Any:
    try:
        numpy: Any = importlib.import_module("numpy")
    except ImportError as error:
        raise CheckpointError(
            f"{path} is a numpy value and numpy is not installed",
            done="it was not restored",
            advice="install numpy",
        ) from error
    dtype = numpy.dtype(node["dtype"])
    if dtype.hasobject or dtype.str != node["dtype"]:
        raise ValueError(f"dtype {node['dtype']!r} is not allowed")
    data = bytearray(_from_base64(node["v"]))
    shape = tuple(node["shape"])
    if dtype.itemsize * math.prod(shape) != len(data):
        raise ValueError(f"{len(data)} bytes do not fill shape {shape} of {dtype}")
    array = numpy.ndarray(shape, dtype=dtype, buffer=data)
    return array if node[_MARK] == "array" else array[()]


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error


def _decode_float(text: str) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(f"{text!r} is no special number")
    return float(text)


_LEAVES: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),  # hex has no limit on digits
    "float": _decode_float,
    "str": lambda text: _from_base64(text).decode("utf-8", "surrogatepass"),
    "bytes": _from_base64,
}
_SEQUENCE_TYPES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
_DICT_TYPES: dict[str, Callable[[], Any]] = {name: kind for kind, name in _DICTS.items()}


def _corrupt(path: str, why: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"the saved value of {path} cannot be decoded: {why}",
        done="nothing was restored from it",
        advice="verify the checkpoint; use an older one",
    )
