from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest

from keepstep.wire import messages
from keepstep.wire.messages import (
    FROM_COORDINATOR,
    FROM_LEASE,
    FROM_RANK,
    FROM_WRITER,
    FROM_ZYGOTE,
    TO_COORDINATOR,
    TO_RANK,
    TO_WRITER,
    TO_ZYGOTE,
    Attach,
    Evidence,
    Go,
    Join,
    Message,
    RankEvent,
    ToRank,
)
from keepstep.wire.types import Version

DIRECTIONS: dict[str, Any] = {
    "to zygote": TO_ZYGOTE,
    "from zygote": FROM_ZYGOTE,
    "to rank": TO_RANK,
    "from rank": FROM_RANK,
    "to writer": TO_WRITER,
    "from writer": FROM_WRITER,
    "from lease process": FROM_LEASE,
    "to coordinator": TO_COORDINATOR,
    "from coordinator": FROM_COORDINATOR,
}
SAMPLES: dict[Any, Any] = {
    int: 7,
    float: 1.5,
    str: "text",
    bytes: b"\0bytes",
    bool: True,
    list[str]: ["a", "b"],
    list[bytes]: [b"a", b"\xff"],
    dict[str, str]: {"RANK": "0"},
    tuple[str, str, str, str]: ("a", "b", "c", "d"),
    dict[str, int]: {"default": 41},
    Version: Version(run="demo", term=1, round=2, step=3, world=4),
}


def members(direction: Any) -> list[type[Message]]:
    return list(typing.get_args(direction)) or [direction]


def all_messages() -> list[type[Message]]:
    return [
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, Message) and value is not Message
    ]


def sample(kind: Any) -> Any:
    """A value of type ``kind`` that differs from every default."""
    if kind in SAMPLES:
        return SAMPLES[kind]
    if typing.get_origin(kind) is list:
        return [sample(typing.get_args(kind)[0])]
    if not isinstance(kind, type):
        return sample(typing.get_args(kind)[0])  # a union
    return kind(**{field.name: sample(field.type) for field in msgspec.structs.fields(kind)})


@pytest.mark.parametrize(("name", "direction"), DIRECTIONS.items(), ids=list(DIRECTIONS))
def test_every_message_of_a_direction_arrives_as_it_was_sent(name: str, direction: Any) -> None:
    decoder = msgspec.msgpack.Decoder(direction)
    for kind in members(direction):
        message = sample(kind)
        assert decoder.decode(msgspec.msgpack.encode(message)) == message


def test_every_message_goes_in_some_direction() -> None:
    used = {kind for direction in DIRECTIONS.values() for kind in members(direction)}
    only_inside_others = {Evidence}
    in_the_environment = {Attach}
    assert set(all_messages()) == used | only_inside_others | in_the_environment


def test_a_message_of_the_wrong_direction_is_refused() -> None:
    sent = msgspec.msgpack.encode(Go(term=1, round=1, resume=0, folder=""))
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'Go'"):
        msgspec.msgpack.decode(sent, type=FROM_RANK)


@pytest.mark.parametrize("kind", all_messages())
def test_every_field_is_checked_for_its_type(kind: type[Message]) -> None:
    plain = msgspec.to_builtins(sample(kind), builtin_types=[bytes])
    for field in msgspec.structs.fields(kind):
        damaged = msgspec.msgpack.encode({**plain, field.name: None})
        with pytest.raises(msgspec.ValidationError, match=f"`\\$.{field.name}`"):
            msgspec.msgpack.decode(damaged, type=kind)


@pytest.mark.parametrize("kind", all_messages())
def test_messages_do_not_change(kind: type[Message]) -> None:
    message = sample(kind)
    for field in msgspec.structs.fields(kind):
        with pytest.raises(AttributeError):
            setattr(message, field.name, None)


@pytest.mark.parametrize("kind", all_messages())
def test_every_message_says_what_it_is_for(kind: type[Message]) -> None:
    assert kind.__doc__ and kind.__doc__ != Message.__doc__


def test_a_message_inside_a_message_keeps_its_type() -> None:
    event = RankEvent(rank=3, body=Join(inc=1, after_round=2, seqs={"0": 5}))
    sent = ToRank(rank=3, inc=1, body=Go(term=1, round=3, resume=2, folder="step-00000002"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=TO_COORDINATOR) == event
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=FROM_COORDINATOR) == sent


def test_a_field_that_a_newer_version_added_is_passed_over() -> None:
    plain = {"type": "Join", "inc": 1, "after_round": 2, "later": "yes"}
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=FROM_RANK)
    assert got == Join(inc=1, after_round=2)
