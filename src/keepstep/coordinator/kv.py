"""torch's store as plain data: one dictionary a round, with waiting calls. Pure.

The coordinator feeds it calls and passes the answers on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from keepstep.wire.messages import StoreCall, StoreReply

_LEAST = {"add": (1, 0), "append": (1, 1), "compare_set": (1, 2), "delete": (1, 0)}
"""How many keys and values an operation needs."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply and the rank (with incarnation) that it is for."""

    rank: int
    inc: int
    reply: StoreReply


@dataclass(frozen=True, slots=True)
class _Waiting:
    rank: int
    call: StoreCall
    deadline: float


class KeyValue:
    """The store of the current round; calls of other rounds are refused."""

    def __init__(self) -> None:
        self._round = 0
        self._data: dict[str, bytes] = {}
        self._waiting: deque[_Waiting] = deque()

    def open(self, round: int) -> list[Answer]:
        """Start ``round`` with an empty dictionary; whoever still waits gets an error."""
        dropped = [self._error(w.rank, w.call, "the round was aborted") for w in self._waiting]
        self._waiting.clear()
        self._data.clear()
        self._round = round
        return dropped

    def call(self, rank: int, call: StoreCall, now: float) -> list[Answer]:
        """Do one operation; returns the answers that it makes possible."""
        if call.round != self._round:
            return [self._error(rank, call, f"round {call.round} is over")]
        if call.op in ("get", "wait"):
            self._waiting.append(_Waiting(rank, call, now + call.timeout_s))
            return self._wake(call.keys)
        try:
            values, number = self._do(call)
        except ValueError as error:
            return [self._error(rank, call, str(error))]
        done = Answer(rank, call.inc, StoreReply(id=call.id, values=values, number=number))
        changed = call.op in ("set", "add", "append", "compare_set")
        return [done, *(self._wake(call.keys) if changed and self._waiting else [])]

    def _do(self, call: StoreCall) -> tuple[list[bytes], int]:
        data, keys, values = self._data, call.keys, call.values
        least_keys, least_values = _LEAST.get(call.op, (0, 0))
        if len(keys) < least_keys or len(values) < least_values:
            raise ValueError(f"{call.op} with {len(keys)} keys and {len(values)} values")
        match call.op:
            case "set":
                if len(keys) != len(values):
                    raise ValueError(f"{len(keys)} keys and {len(values)} values")
                data.update(zip(keys, values, strict=True))
                return [], 0
            case "add":
                total = int(data.get(keys[0], b"0")) + call.number
                data[keys[0]] = str(total).encode()
                return [], total
            case "append":
                data[keys[0]] = data.get(keys[0], b"") + values[0]
                return [], 0
            case "compare_set":
                # As torch's own stores: an absent key is set if the expected value is empty.
                held = data.get(keys[0])
                if held == values[0] or (held is None and not values[0]):
                    data[keys[0]] = values[1]
                return [data.get(keys[0], values[0])], 0
            case "check":
                return [], int(all(key in data for key in keys))
            case "delete":
                return [], int(data.pop(keys[0], None) is not None)
            case "count":
                return [], len(data)
        raise ValueError(f"unknown operation {call.op!r}")

    def _wake(self, _changed: list[str]) -> list[Answer]:
        answers: list[Answer] = []
        still: deque[_Waiting] = deque()
        for waiting in self._waiting:
            call = waiting.call
            if all(key in self._data for key in call.keys):
                values = [self._data[key] for key in call.keys] if call.op == "get" else []
                reply = StoreReply(id=call.id, values=values)
                answers.append(Answer(waiting.rank, call.inc, reply))
            else:
                still.append(waiting)
        self._waiting = still
        return answers

    def expire(self, now: float) -> list[Answer]:
        """Errors for calls whose time is over."""
        over = [w for w in self._waiting if now >= w.deadline]
        if not over:
            return []
        self._waiting = deque(w for w in self._waiting if now < w.deadline)
        return [
            self._error(w.rank, w.call, f"wait timeout after {w.call.timeout_s:.1f} s")
            for w in over
        ]

    def _error(self, rank: int, call: StoreCall, text: str) -> Answer:
        return Answer(rank, call.inc, StoreReply(id=call.id, error=text))
