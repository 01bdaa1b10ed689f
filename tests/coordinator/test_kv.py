from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from keepstep.coordinator.kv import Answer, KeyValue
from keepstep.wire.messages import StoreCall, StoreReply

ROUND = 3


class Store:
    """A store and the number of the next call."""

    def __init__(self, round: int = ROUND) -> None:
        self.kv = KeyValue()
        self.kv.open(round)
        self.calls = 0

    def call(
        self, op: str, *keys: str, rank: int = 0, now: float = 0.0, **more: Any
    ) -> list[Answer]:
        self.calls += 1
        values: dict[str, Any] = {"inc": 0, "round": ROUND, "timeout_s": 10.0, **more}
        return self.kv.call(rank, StoreCall(id=self.calls, op=op, keys=list(keys), **values), now)

    def reply(self, op: str, *keys: str, **more: Any) -> StoreReply:
        """The one answer, which is to this call."""
        (answer,) = self.call(op, *keys, **more)
        assert answer.reply.id == self.calls
        assert answer.rank == more.get("rank", 0)
        return answer.reply

    def set(self, key: str, value: bytes, **more: Any) -> StoreReply:
        return self.reply("set", key, values=[value], **more)

    def get(self, key: str) -> bytes:
        return self.reply("get", key).values[0]


# --- operations ----------------------------------------------------------------------------------


def test_what_is_set_can_be_got_by_any_rank_and_incarnation() -> None:
    store = Store()
    assert store.set("a", b"\0value", rank=1) == StoreReply(id=1)
    (answer,) = store.call("get", "a", rank=2, inc=5)
    assert (answer.rank, answer.inc) == (2, 5)
    assert answer.reply == StoreReply(id=2, values=[b"\0value"])


def test_a_later_set_replaces_the_value() -> None:
    store = Store()
    store.set("a", b"1")
    store.set("a", b"")
    assert store.get("a") == b""


def test_several_keys_are_set_and_got_in_order() -> None:
    store = Store()
    store.reply("set", "a", "b", values=[b"1", b"2"])
    assert store.reply("get", "b", "a", "b").values == [b"2", b"1", b"2"]


def test_add_counts_from_zero_and_also_down() -> None:
    store = Store()
    assert [store.reply("add", "n", number=number).number for number in (1, 41, -50, 0)] == [
        1,
        42,
        -8,
        -8,
    ]
    assert store.get("n") == b"-8"


def test_add_goes_on_from_a_number_that_was_set() -> None:
    store = Store()
    store.set("n", b"5")
    assert store.reply("add", "n", number=2).number == 7


def test_append_makes_the_key_or_adds_to_it() -> None:
    store = Store()
    store.reply("append", "a", values=[b"x"])
    store.reply("append", "a", values=[b"yz"])
    assert store.get("a") == b"xyz"


@pytest.mark.parametrize(
    ("held", "expected", "desired", "answer", "after"),
    [
        pytest.param(None, b"", b"new", b"new", b"new", id="absent, nothing expected: set"),
        pytest.param(None, b"x", b"new", b"x", None, id="absent, something expected: not set"),
        pytest.param(b"x", b"x", b"new", b"new", b"new", id="as expected: set"),
        pytest.param(b"y", b"x", b"new", b"y", b"y", id="not as expected: the held value"),
        pytest.param(b"y", b"", b"new", b"y", b"y", id="held, nothing expected: the held value"),
        pytest.param(b"", b"", b"new", b"new", b"new", id="empty, as expected: set"),
    ],
)
def test_compare_set(
    held: bytes | None, expected: bytes, desired: bytes, answer: bytes, after: bytes | None
) -> None:
    store = Store()
    if held is not None:
        store.set("a", held)
    assert store.reply("compare_set", "a", values=[expected, desired]).values == [answer]
    assert store.reply("check", "a").number == int(after is not None)
    if after is not None:
        assert store.get("a") == after


def test_check_asks_for_all_keys_and_does_not_wait() -> None:
    store = Store()
    store.set("a", b"")
    assert store.reply("check", "a").number == 1
    assert store.reply("check", "a", "b").number == 0
    assert store.reply("check").number == 1


def test_delete_says_whether_there_was_anything() -> None:
    store = Store()
    store.set("a", b"1")
    assert [store.reply("delete", "a").number for _ in range(2)] == [1, 0]
    assert store.reply("check", "a").number == 0


def test_count_counts_keys() -> None:
    store = Store()
    store.reply("set", "a", "b", values=[b"", b""])
    store.reply("add", "n", number=1)
    store.set("a", b"2")
    assert store.reply("count").number == 3


@pytest.mark.parametrize(
    ("op", "keys", "more", "error"),
    [
        ("launch", ["a"], {}, "unknown operation 'launch'"),
        ("set", ["a", "b"], {"values": [b"1"]}, "2 keys and 1 values"),
        ("add", ["text"], {"number": 1}, "invalid literal"),
        ("add", [], {"number": 1}, "add with 0 keys and 0 values"),
        ("append", ["a"], {}, "append with 1 keys and 0 values"),
        ("compare_set", ["text"], {"values": [b"no number"]}, "compare_set with 1 keys and 1"),
        ("delete", [], {}, "delete with 0 keys"),
    ],
)
def test_a_call_that_makes_no_sense_gets_an_error_and_changes_nothing(
    op: str, keys: list[str], more: dict[str, Any], error: str
) -> None:
    store = Store()
    store.set("text", b"no number")
    assert error in store.reply(op, *keys, **more).error
    assert store.reply("count").number == 1
    assert store.get("text") == b"no number"


# --- waiting -------------------------------------------------------------------------------------


def test_a_get_waits_for_its_key() -> None:
    store = Store()
    assert store.call("get", "a", rank=1, inc=4) == []
    done, woken = store.call("set", "a", rank=2, values=[b"1"])
    assert (done.rank, done.reply) == (2, StoreReply(id=2))
    assert woken == Answer(1, 4, StoreReply(id=1, values=[b"1"]))
    assert store.call("set", "a", values=[b"2"])[1:] == []


@pytest.mark.parametrize(
    ("op", "values"),
    [("set", [b"1"]), ("add", []), ("append", [b"1"]), ("compare_set", [b"", b""])],
)
def test_whatever_makes_a_key_wakes_those_who_wait_for_it(op: str, values: list[bytes]) -> None:
    store = Store()
    store.call("wait", "a", rank=1)
    _, woken = store.call(op, "a", values=values)
    assert woken.reply == StoreReply(id=1)


def test_a_wait_is_over_when_the_last_of_its_keys_is_there() -> None:
    store = Store()
    store.call("wait", "a", "b", rank=1)
    store.call("get", "b", "a", rank=2)
    assert len(store.call("set", "b", values=[b"2"])) == 1
    _, first, second = store.call("set", "a", values=[b"1"])
    assert (first.rank, first.reply.values) == (1, [])
    assert (second.rank, second.reply.values) == (2, [b"2", b"1"])


def test_a_wait_for_what_is_there_is_answered_at_once() -> None:
    store = Store()
    store.set("a", b"1")
    assert store.reply("wait", "a") == StoreReply(id=2)


def test_a_wait_ends_with_an_error_when_its_time_is_over() -> None:
    store = Store()
    store.call("wait", "a", rank=1, inc=2, now=100.0, timeout_s=5.0)
    store.call("get", "b", rank=3, now=100.0, timeout_s=9.0)
    assert store.kv.expire(104.9) == []
    (answer,) = store.kv.expire(105.0)
    assert (answer.rank, answer.inc, answer.reply.id) == (1, 2, 1)
    assert answer.reply.error == "wait timeout after 5.0 s"
    assert store.kv.expire(108.0) == []
    assert len(store.call("set", "a", now=108.0, values=[b"1"])) == 1
    assert len(store.call("set", "b", now=108.0, values=[b"1"])) == 2
    assert store.kv.expire(1000.0) == []


# --- rounds --------------------------------------------------------------------------------------


def test_a_new_round_begins_empty_and_calls_off_those_who_wait() -> None:
    store = Store()
    store.set("a", b"1")
    store.call("get", "b", rank=1, inc=2)
    (dropped,) = store.kv.open(ROUND + 1)
    assert (dropped.rank, dropped.inc, dropped.reply.id) == (1, 2, 2)
    assert "the round was aborted" in dropped.reply.error
    assert store.reply("check", "a", round=ROUND + 1).number == 0
    assert store.kv.expire(1000.0) == []


@pytest.mark.parametrize("round", [ROUND - 1, ROUND + 1])
@pytest.mark.parametrize("op", ["set", "get", "add", "count"])
def test_calls_of_another_round_are_refused_and_change_nothing(op: str, round: int) -> None:
    store = Store()
    reply = store.reply(op, "a", round=round, values=[b"1"], number=1)
    assert reply.error
    assert store.reply("count").number == 0


def test_before_the_first_round_there_is_no_store() -> None:
    store = Store(round=0)
    assert store.reply("set", "a", values=[b"1"]).error


class AgainstDictionary(RuleBasedStateMachine):
    """The store against a dictionary; a wait is answered exactly when it can be."""

    KEYS = st.sampled_from("abc")
    VALUES = st.sampled_from([b"", b"1", b"7"])

    def __init__(self) -> None:
        super().__init__()
        self.store = Store()
        self.data: dict[str, bytes] = {}
        self.waiting: dict[int, list[str]] = {}

    def woken(self, answers: list[Answer]) -> None:
        able = [i for i, keys in self.waiting.items() if all(key in self.data for key in keys)]
        assert [answer.reply.id for answer in answers] == able
        for answer in answers:
            keys = self.waiting.pop(answer.reply.id)
            assert answer.reply.values == [self.data[key] for key in keys]

    @rule(key=KEYS, value=VALUES)
    def set(self, key: str, value: bytes) -> None:
        self.data[key] = value
        self.woken(self.store.call("set", key, values=[value])[1:])

    @rule(key=KEYS, number=st.integers(-3, 3))
    def add(self, key: str, number: int) -> None:
        done, *rest = self.store.call("add", key, number=number)
        if self.data.get(key) == b"":
            assert done.reply.error
            return
        self.data[key] = str(int(self.data.get(key, b"0")) + number).encode()
        assert done.reply.number == int(self.data[key])
        self.woken(rest)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        had = self.data.pop(key, None) is not None
        assert self.store.reply("delete", key).number == int(had)

    @rule(keys=st.lists(KEYS, max_size=3))
    def get(self, keys: list[str]) -> None:
        answers = self.store.call("get", *keys)
        self.waiting[self.store.calls] = keys
        self.woken(answers)


TestAgainstDictionary = AgainstDictionary.TestCase
TestAgainstDictionary.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
