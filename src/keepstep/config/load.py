"""From a file, the environment and the command line to one checked ``Config``.

Runs in the agent (``load``, ``encode``) and in ranks (``decode``). Precedence, lowest first:
default, TOML file, environment (``KEEPSTEP_CHECKPOINT__EVERY_STEPS=500``),
``--set checkpoint.every_steps=500``, argument. A file is read only when it is named.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from keepstep.config.rules import broken
from keepstep.config.settings import Config
from keepstep.errors import InternalError, UsageError

ENVIRONMENT_PREFIX = "KEEPSTEP_"
_INT_RANGE = range(-(2**63), 2**63)  # what the encoding of settings for ranks can carry


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """One value that somebody gave. ``text``: it is a string to be parsed by the setting's type."""

    name: str
    value: object
    label: str
    text: bool
    spell: Callable[[str], str]


def _sections() -> dict[str, dict[str, object]]:
    hints = typing.get_type_hints(Config)
    return {
        section.name: typing.get_type_hints(hints[section.name])
        for section in dataclasses.fields(Config)
    }


_SECTIONS = _sections()
_TYPES: Mapping[str, object] = types.MappingProxyType(
    {f"{section}.{key}": kind for section, keys in _SECTIONS.items() for key, kind in keys.items()}
)


def environment_name(setting: str) -> str:
    """The variable that sets ``section.key``: ``KEEPSTEP_SECTION__KEY``."""
    return ENVIRONMENT_PREFIX + setting.upper().replace(".", "__", 1)


def load(
    *,
    file: Path | None,
    environ: Mapping[str, str],
    sets: Sequence[str],
    arguments: Mapping[str, object],
    labels: Mapping[str, str] = types.MappingProxyType({}),
) -> Config:
    """Read all sources, check them, and report every problem at once.

    Args:
        file: A TOML file, or ``None``: no file is looked for.
        environ: The environment. Names that begin with ``KEEPSTEP_`` and hold a double underscore
            are settings; others are not looked at.
        sets: ``SECTION.KEY=VALUE``, as given with ``--set``; the last one of a key counts.
        arguments: Values by setting, ``{"checkpoint.every_steps": 500}``; ``None`` is not given.
        labels: How messages call an argument (by setting) or a variable (by its name), where that
            is not what the person wrote.

    Raises:
        UsageError: with all problems in one message.
    """
    problems: list[str] = []
    entries = [
        *_from_file(file, problems),
        *_from_environment(environ, labels),
        *_from_sets(sets, problems),
        *_from_arguments(arguments, labels),
    ]
    return _checked(Config(), entries, problems, done="Nothing was started")


def override(config: Config, arguments: Mapping[str, object]) -> Config:
    """``config`` with some settings replaced, checked as ``load`` does.

    Args:
        config: Settings that are in force.
        arguments: Values by setting, ``{"checkpoint.every_steps": 500}``; ``None`` is not given.

    Raises:
        UsageError: with all problems in one message.
    """
    return _checked(config, list(_from_arguments(arguments, {})), [])


def _checked(
    base: Config, entries: Sequence[_Entry], problems: list[str], *, done: str = ""
) -> Config:
    """``base`` with the values of ``entries``, the later ones counting; all rules hold.

    Raises:
        UsageError: ``problems`` and those of the entries, in one message.
    """
    values: dict[str, dict[str, typing.Any]] = {section: {} for section in _SECTIONS}
    unread: set[str] = set()
    for entry in entries:
        kind = _TYPES.get(entry.name)
        if kind is None:
            problems.append(f"{entry.label}: {_no_such_setting(entry)}")
            continue
        section, _, key = entry.name.partition(".")
        try:
            values[section][key] = _typed(entry.value, kind, text=entry.text)
            unread.discard(entry.name)
        except ValueError as error:
            problems.append(f"{entry.label}: {error}")
            unread.add(entry.name)
    sections = {
        section: dataclasses.replace(getattr(base, section), **given)
        for section, given in values.items()
    }
    config = dataclasses.replace(base, **sections)
    problems += broken(config, unread)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise UsageError(f"{count} in the configuration: {'; '.join(problems)}", done=done)
    return config


def encode(config: Config) -> bytes:
    """The settings as JSON, to be handed to another process."""
    return msgspec.json.encode(config)


def decode(data: bytes) -> Config:
    """What ``encode`` made.

    Raises:
        InternalError: the bytes are not settings of this version.
    """
    try:
        return msgspec.json.decode(data, type=Config)
    except msgspec.DecodeError as error:
        raise InternalError(
            f"{len(data)} bytes of settings from the agent cannot be read: {error}",
            advice="Check that agent and ranks use the same installation of keepstep",
        ) from error


# --- sources --------------------------------------------------------------------------------------


def _from_file(file: Path | None, problems: list[str]) -> Iterator[_Entry]:
    if file is None:
        return
    import tomllib  # here, so that ranks, which only decode, do not load it

    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{file}: cannot be read ({error.strerror})")
        return
    except UnicodeDecodeError:
        problems.append(f"{file}: is not UTF-8 text")
        return
    except (ValueError, RecursionError) as error:
        problems.append(f"{file}: is not TOML ({error})")
        return
    for section, table in tables.items():
        given = table if isinstance(table, dict) else None
        if given is None or section not in _SECTIONS:
            yield _entry(section, table, f"{file}: {section}", text=False)
            continue
        for key, value in given.items():
            yield _entry(f"{section}.{key}", value, f"{file}: {section}.{key}", text=False)


def _from_environment(environ: Mapping[str, str], labels: Mapping[str, str]) -> Iterator[_Entry]:
    for variable in sorted(environ):
        rest = variable.removeprefix(ENVIRONMENT_PREFIX)
        if rest != variable and "__" in rest:
            yield _Entry(
                name=rest.lower().replace("__", ".", 1),
                value=environ[variable],
                label=labels.get(variable, variable),
                text=True,
                spell=environment_name,
            )


def _from_sets(sets: Sequence[str], problems: list[str]) -> Iterator[_Entry]:
    for given in sets:
        name, equals, value = given.partition("=")
        name = name.strip()
        if not equals:
            problems.append(f"--set {given}: has no value; write --set SECTION.KEY=VALUE")
            continue
        yield _entry(name, value, f"--set {name}", text=True)


def _from_arguments(arguments: Mapping[str, object], labels: Mapping[str, str]) -> Iterator[_Entry]:
    for name, value in arguments.items():
        if value is not None:
            label = labels.get(name, f"argument {name}")
            yield _entry(name, value, label, text=False)


def _entry(name: str, value: object, label: str, *, text: bool) -> _Entry:
    section = name.partition(".")[0]

    def spell(setting: str) -> str:
        return setting.removeprefix(f"{section}.")

    return _Entry(name=name, value=value, label=label, text=text, spell=spell)


def _no_such_setting(entry: _Entry) -> str:
    section, _, key = entry.name.partition(".")
    if section in _SECTIONS and not key:
        return f"is a section, not a setting; its settings are {', '.join(_SECTIONS[section])}"
    meant = [] if key else difflib.get_close_matches(section, _SECTIONS, n=1, cutoff=0.8)
    near = "" if meant else _nearest_setting(section, key)
    if near:
        return f"no such setting (did you mean {entry.spell(near)}?)"
    if section in _SECTIONS:
        return f"no such setting; section {section} has {', '.join(_SECTIONS[section])}"
    sections = difflib.get_close_matches(section, _SECTIONS, n=1)
    if sections:
        return f"no such section (did you mean {sections[0]}?)"
    return f"no such section; the sections are {', '.join(_SECTIONS)}"


def _nearest_setting(section: str, key: str) -> str:
    """The setting that was meant, first by its section, then by its key; empty if none is near."""
    for known in difflib.get_close_matches(section, _SECTIONS, n=1) if key else ():
        for near in difflib.get_close_matches(key, _SECTIONS[known], n=1):
            return f"{known}.{near}"
    by_key = {name.partition(".")[2]: name for name in _TYPES}
    for near in difflib.get_close_matches(key or section, by_key, n=1, cutoff=0.8):
        return by_key[near]
    return ""


# --- values ---------------------------------------------------------------------------------------


def _typed(value: object, kind: object, *, text: bool) -> object:
    """``value`` as the setting's type; from a string as people write it, if ``text``.

    Raises:
        ValueError: with what was expected, as a phrase.
    """
    if typing.get_origin(kind) is typing.Literal:
        return _choice(value, typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return _strings(value, text=text)
    if text and isinstance(value, str) and kind is not str:
        value = _parsed(value.strip(), kind)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str):
        return _utf8(value)
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        if value not in _INT_RANGE:
            raise ValueError(f"{value} is too large")
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(value)
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    raise ValueError(f"expected {expected[typing.cast(type, kind)]}, not {value!r}")


def _parsed(text: str, kind: object) -> object:
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if kind is int:
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,40}(_[0-9]{1,40})*", text) else text
    try:
        return float(text)
    except ValueError:
        return text


def _choice(value: object, allowed: tuple[object, ...]) -> object:
    if value in allowed:
        return value
    names = [str(one) for one in allowed if one != ""]
    near = difflib.get_close_matches(str(value), names, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    nothing = " or nothing" if "" in allowed else ""
    raise ValueError(f"expected {' or '.join(names)}{nothing}, not {value!r}{hint}")


def _strings(value: object, *, text: bool) -> tuple[str, ...]:
    if text and isinstance(value, str):
        if value.lstrip().startswith("["):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"expected a JSON list of texts ({error})") from None
        else:
            value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"expected a list of texts, not {value!r}")
    return tuple(_utf8(one) for one in value)


def _utf8(value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{value!r} is not valid UTF-8") from None
    return value


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{value} is too large") from None
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, not {value}")
    return number
