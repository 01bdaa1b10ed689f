"""torch's store on the control channel: no port, no DNS, no host that must live.

Calls go through the agent to the coordinator, which keeps one dictionary a round. A blocked call
returns at once when the round is aborted. Runs in the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from keepstep.rank.control import Control
from keepstep.wire.messages import StoreCall

_SLACK_S = 10.0  # the server answers a time-out itself; this bounds a server that does not answer


class ControlStore(dist.Store):  # type: ignore[name-defined,misc]
    """A ``torch.distributed.Store`` for one round.

    The caller must keep a reference for as long as a process group made from it lives.

    Args:
        control: The rank's connection. inc: its incarnation. round: whose dictionary to use.
        timeout_s: Default limit of blocking calls.
    """

    def __init__(self, control: Control, *, inc: int, round: int, timeout_s: float) -> None:
        super().__init__()
        self._control = control
        self._inc = inc
        self._round = round
        self._timeout_s = timeout_s
        self._clones: list[ControlStore] = []
        self._aborted = False

    def abort(self) -> None:
        """Make every call, waiting ones included, raise. Any thread."""
        self._aborted = True
        for clone in self._clones:
            clone.abort()
        self._control.wake()

    def _call(
        self,
        op: str,
        keys: Sequence[str] = (),
        values: Sequence[bytes] = (),
        number: int = 0,
        timeout_s: float | None = None,
    ) -> tuple[list[bytes], int]:
        limit = self._timeout_s if timeout_s is None else timeout_s
        call = self._control.call_id()
        self._control.send(
            StoreCall(
                id=call,
                inc=self._inc,
                round=self._round,
                op=op,
                keys=list(keys),
                values=list(values),
                number=number,
                timeout_s=limit,
            )
        )
        reply = self._control.wait_reply(call, limit + _SLACK_S, lambda: self._aborted)
        if reply.error:
            raise dist.DistStoreError(f"store {op} {', '.join(keys)[:200]}: {reply.error}")
        return reply.values, reply.number

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", [key], [_bytes(value)])

    def get(self, key: str) -> bytes:
        return self._call("get", [key])[0][0]

    def add(self, key: str, amount: int) -> int:
        return self._call("add", [key], number=amount)[1]

    def check(self, keys: list[str]) -> bool:
        return bool(self._call("check", keys)[1])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._call("wait", keys, timeout_s=None if timeout is None else timeout.total_seconds())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._call("get", keys)[0]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        self._call("set", keys, [_bytes(value) for value in values])

    def append(self, key: str, value: str | bytes) -> None:
        self._call("append", [key], [_bytes(value)])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._call("compare_set", [key], [_bytes(expected), _bytes(desired)])[0][0]

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete", [key])[1])

    def num_keys(self) -> int:
        return self._call("count")[1]

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> ControlStore:
        copy = ControlStore(
            self._control, inc=self._inc, round=self._round, timeout_s=self._timeout_s
        )
        self._clones.append(copy)  # a native caller holds no Python reference
        return copy


def _bytes(value: str | bytes | Sequence[int]) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
