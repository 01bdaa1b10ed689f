"""Reads the data in a pickle without running any of it.

Used where a format of another library has a pickle that cannot be done without (``.metadata`` of
torch's distributed checkpoints). This is an interpreter of its own for the part of the pickle
language that describes data: it never imports, calls or builds anything. A global name must be on
the caller's list, and becomes an ``Inert``: a name with arguments and state, and no behaviour. What
is not on the list, or is no plain data, is refused. Memory and time grow with the length of the
text only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from typing import Any, Final

from keepstep.errors import CheckpointCorrupt

_MAX_KEY_PARTS = 1000


class Inert:
    """Something that a pickle names, with what it would have been made from.

    Attributes:
        name: Module and name, joined by a dot.
        args: Arguments of the call; None: it is only named.
        state: What its state would have been set to.
    """

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...] | None = None) -> None:
        self.name = name
        self.args = args
        self.state: Any = None

    def __repr__(self) -> str:
        return f"Inert({self.name})"


PERSISTENT: Final = "persistent"
"""Name of the ``Inert`` for a persistent id; its argument is the id."""


class _Odd(Exception):
    """The text is no pickle of plain data."""


class _Mark:
    """What the pickle language calls a mark."""


_MARK = _Mark()
_U1 = struct.Struct("<B")
_U2 = struct.Struct("<H")
_I4 = struct.Struct("<i")
_U4 = struct.Struct("<I")
_U8 = struct.Struct("<Q")
_F8 = struct.Struct(">d")


def loads(data: bytes, allowed: Collection[str], where: str = "") -> Any:
    """The data that the pickle ``data`` describes.

    None, bool, int, float, str, bytes, lists, tuples and dicts come back as themselves, everything
    else as ``Inert``. A dict has keys that are str, int, tuples of these, or ``Inert``, which are
    told apart by identity.

    Args:
        data: One pickle of protocol 2 to 5, as CPython writes it.
        allowed: The global names that it may have, module and name joined by a dot.
        where: Names the file in errors.

    Raises:
        CheckpointCorrupt: it names something else, or is not such a pickle.
    """
    try:
        return _Interpreter(data, allowed).run()
    except _Odd as odd:
        raise _refused(str(odd), where) from odd
    except (struct.error, IndexError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise _refused(f"it is damaged ({type(error).__name__})", where) from error


class _Interpreter:
    """One pass over a pickle."""

    def __init__(self, data: bytes, allowed: Collection[str]) -> None:
        self._data = data
        self._at = 0
        self._allowed = allowed
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._globals: dict[str, Inert] = {}

    def run(self) -> Any:
        data = self._data
        while True:
            code = data[self._at]
            self._at += 1
            if code == _STOP:
                break
            handler = _HANDLERS.get(code)
            if handler is None:
                raise _Odd(f"the instruction {code:#04x} at byte {self._at - 1} describes no data")
            handler(self)
        (result,) = self._stack
        if result is _MARK:
            raise _Odd("there is nothing in it")
        if self._at != len(data):
            raise _Odd(f"{len(data) - self._at} bytes follow its end")
        return result

    # --- reading ----------------------------------------------------------------------------------

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise _Odd(f"{count} bytes are wanted at byte {self._at} of {len(self._data)}")
        start = self._at
        self._at += count
        return self._data[start : self._at]

    def _number(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        assert isinstance(value, int)
        return value

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        text = self._data[self._at : end].decode()
        self._at = end + 1
        return text

    def _pop_mark(self) -> list[Any]:
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise _Odd("a mark is missing")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    # --- instructions -----------------------------------------------------------------------------

    def proto(self) -> None:
        number = self._number(_U1)
        if number > 5:
            raise _Odd(f"it has protocol {number}")

    def frame(self) -> None:
        self._number(_U8)  # only a hint for reading

    def mark(self) -> None:
        self._stack.append(_MARK)

    def pop(self) -> None:
        self._stack.pop()

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def unicode(self, form: struct.Struct) -> None:
        self._stack.append(self._bytes(self._number(form)).decode("utf-8", "surrogatepass"))

    def binary(self, form: struct.Struct) -> None:
        self._stack.append(self._bytes(self._number(form)))

    def integer(self, form: struct.Struct) -> None:
        self._stack.append(self._number(form))

    def long(self, form: struct.Struct) -> None:
        size = self._number(form)
        if not 0 <= size <= 64:
            raise _Odd(f"it has a number of {size} bytes")
        self._stack.append(int.from_bytes(self._bytes(size), "little", signed=True))

    def real(self) -> None:
        self._stack.append(_F8.unpack(self._bytes(8))[0])

    def put(self, form: struct.Struct) -> None:
        self._memo[self._number(form)] = self._stack[-1]

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, form: struct.Struct) -> None:
        self._stack.append(self._memo[self._number(form)])

    def sequence(self, count: int) -> None:
        items = tuple(self._stack[-count:])
        if len(items) != count or any(item is _MARK for item in items):
            raise _Odd("a tuple is not whole")
        del self._stack[-count:]
        self._stack.append(items)

    def marked_sequence(self) -> None:
        self._stack.append(tuple(self._pop_mark()))

    def marked_list(self) -> None:
        self._stack.append(self._pop_mark())

    def append(self) -> None:
        item = self._stack.pop()
        self._list().append(item)

    def appends(self) -> None:
        items = self._pop_mark()
        self._list().extend(items)

    def _list(self) -> list[Any]:
        found = self._stack[-1]
        if type(found) is not list:
            raise _Odd("something is added to what is no list")
        return found

    def marked_dict(self) -> None:
        items = self._pop_mark()
        self._stack.append({})
        self._set(items)

    def setitem(self) -> None:
        items = self._stack[-2:]
        del self._stack[-2:]
        self._set(items)

    def setitems(self) -> None:
        self._set(self._pop_mark())

    def _set(self, items: list[Any]) -> None:
        found = self._stack[-1]
        if isinstance(found, Inert):  # an OrderedDict gets its items like a dict
            found.state = {} if found.state is None else found.state
            found = found.state
        if type(found) is not dict or len(items) % 2:
            raise _Odd("something is put into what is no dict")
        for at in range(0, len(items), 2):
            found[_key(items[at])] = items[at + 1]

    def named(self) -> None:
        module, name = self._line(), self._line()
        self._name(module, name)

    def stack_named(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._name(module, name)

    def _name(self, module: object, name: object) -> None:
        if type(module) is not str or type(name) is not str:
            raise _Odd("a name is no text")
        full = f"{module}.{name}"
        if full not in self._allowed:
            raise _Odd(f"it names {full[:200]!r}, which is not needed to describe it")
        self._stack.append(self._globals.setdefault(full, Inert(full)))

    def call(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        self._made(function, args)

    def call_with_names(self) -> None:
        named, args, function = self._stack.pop(), self._stack.pop(), self._stack.pop()
        if named != {}:
            raise _Odd("a call has named arguments")
        self._made(function, args)

    def _made(self, function: object, args: object) -> None:
        if not isinstance(function, Inert) or function.args is not None or type(args) is not tuple:
            raise _Odd("something is called that is no name")
        self._stack.append(Inert(function.name, args))

    def build(self) -> None:
        state = self._stack.pop()
        made = self._stack[-1]
        if not isinstance(made, Inert) or made.args is None or made.state is not None:
            raise _Odd("the state is set of something that has none")
        made.state = state

    def persistent(self) -> None:
        self._stack.append(Inert(PERSISTENT, (self._stack.pop(),)))


def _key(key: object) -> Any:
    """``key``, if it can be that of a dict without surprises."""
    if type(key) in (str, int, bytes, bool, type(None)) or isinstance(key, Inert):
        return key
    if type(key) is tuple and len(key) <= _MAX_KEY_PARTS:
        assert isinstance(key, tuple)
        if all(type(part) in (str, int) for part in key):
            return key
    raise _Odd(f"a {type(key).__name__} is the key of a dict")


Handler = Callable[[_Interpreter], None]


def _push(make: Callable[[], Any]) -> Handler:
    return lambda interpreter: interpreter.push(make())


def _sized(method: Callable[[_Interpreter, struct.Struct], None], form: struct.Struct) -> Handler:
    return lambda interpreter: method(interpreter, form)


def _sequence(count: int) -> Handler:
    return lambda interpreter: interpreter.sequence(count)


_STOP = ord(".")
_I = _Interpreter
_HANDLERS: dict[int, Handler] = {
    0x80: _I.proto,
    0x95: _I.frame,
    ord("("): _I.mark,
    ord("0"): _I.pop,
    ord("N"): _push(lambda: None),
    0x88: _push(lambda: True),
    0x89: _push(lambda: False),
    ord("]"): _push(list),
    ord(")"): _push(tuple),
    ord("}"): _push(dict),
    ord("X"): _sized(_I.unicode, _U4),
    0x8C: _sized(_I.unicode, _U1),
    0x8D: _sized(_I.unicode, _U8),
    ord("B"): _sized(_I.binary, _U4),
    ord("C"): _sized(_I.binary, _U1),
    0x8E: _sized(_I.binary, _U8),
    ord("J"): _sized(_I.integer, _I4),
    ord("K"): _sized(_I.integer, _U1),
    ord("M"): _sized(_I.integer, _U2),
    0x8A: _sized(_I.long, _U1),
    0x8B: _sized(_I.long, _I4),
    ord("G"): _I.real,
    ord("q"): _sized(_I.put, _U1),
    ord("r"): _sized(_I.put, _U4),
    0x94: _I.memoize,
    ord("h"): _sized(_I.get, _U1),
    ord("j"): _sized(_I.get, _U4),
    0x85: _sequence(1),
    0x86: _sequence(2),
    0x87: _sequence(3),
    ord("t"): _I.marked_sequence,
    ord("l"): _I.marked_list,
    ord("d"): _I.marked_dict,
    ord("a"): _I.append,
    ord("e"): _I.appends,
    ord("s"): _I.setitem,
    ord("u"): _I.setitems,
    ord("c"): _I.named,
    0x93: _I.stack_named,
    ord("R"): _I.call,
    0x81: _I.call,
    0x92: _I.call_with_names,
    ord("b"): _I.build,
    ord("Q"): _I.persistent,
}
"""What each instruction does. Those for sets, for classes of old and for registered extensions are
left out: no such file has them."""


def _refused(why: str, where: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"this pickle cannot be read as plain data: {why}",
        where=where,
        done="nothing of it was run and nothing was read from the checkpoint",
        advice="do not use it unless you know who wrote it",
    )
