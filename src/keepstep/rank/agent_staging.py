"""Staging slots that belong to the agent: a staged shard outlives the rank that made it.

Runs in the rank; implements ``shard_writer.Staging``.
"""

from __future__ import annotations

import mmap
import os
import threading

from keepstep.clock import SYSTEM
from keepstep.errors import SaveFailed
from keepstep.rank.runtime import Runtime
from keepstep.rank.shard_writer import Slot
from keepstep.wire.messages import SaveResult, SlotWanted, Staged
from keepstep.wire.types import Version

_ROUND_UP = 1 << 16


class AgentWrite:
    """A save that the coordinator commits; implements ``ports.PendingWrite``."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self._settled = threading.Event()
        self._error = ""

    def settle(self, error: str) -> None:
        """The coordinator's verdict."""
        self._error = error
        self._settled.set()

    def staged(self) -> bool:
        """True from the start: ``submit`` is called after the copy."""
        return True

    def done(self) -> bool:
        """Whether it is committed or has failed."""
        return self._settled.is_set()

    def wait(self, timeout_s: float) -> None:
        """Return when committed.

        Raises:
            SaveFailed: it failed, or is not settled after ``timeout_s`` seconds.
        """
        step = self.version.step
        if not self._settled.wait(timeout_s):
            raise SaveFailed(f"the save of step {step} is not committed after {timeout_s:.0f} s")
        if self._error:
            raise SaveFailed(f"the save of step {step} failed: {self._error}")


class AgentStaging:
    """Slots granted by the agent, reused for every save of this process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._slots: dict[int, Slot] = {}
        self._busy: set[int] = set()
        self._changed = threading.Condition()
        self._pending: dict[int, AgentWrite] = {}
        runtime.control.on_slot_free = self._freed
        runtime.control.on_saved = self._saved

    def acquire(self, size: int, timeout_s: float) -> Slot:
        """A free slot of at least ``size`` bytes; waits for one.

        Raises:
            SaveFailed: none became free within ``timeout_s`` seconds.
        """
        if not self._slots or next(iter(self._slots.values())).capacity < size:
            self._grow(size, timeout_s)
        deadline = SYSTEM.mono() + timeout_s
        with self._changed:
            # A slot is busy from submit on: one that an abort interrupted before is simply free.
            while not (free := sorted(self._slots.keys() - self._busy)):
                left = deadline - SYSTEM.mono()
                if left <= 0 or not self._changed.wait(left):
                    raise SaveFailed(
                        f"no staging slot became free in {timeout_s:.0f} s",
                        where=f"rank {self._runtime.start.rank}, {len(self._slots)} slots in use",
                        advice="storage is slower than the saves: raise checkpoint.every_steps",
                    )
            return self._slots[free[0]]

    def _grow(self, size: int, timeout_s: float) -> None:
        count = self._runtime.config.checkpoint.slots
        capacity = (size + _ROUND_UP - 1) // _ROUND_UP * _ROUND_UP
        self._drop_slots()
        self._runtime.control.send(
            SlotWanted(inc=self._runtime.start.inc, size=capacity, count=count)
        )
        for number, granted, fd in self._runtime.control.take_grants(count, timeout_s):
            buffer = mmap.mmap(fd, granted)
            os.close(fd)
            self._slots[number] = Slot(id=number, buffer=buffer, capacity=granted)

    def _drop_slots(self) -> None:
        self._busy.clear()
        for slot in self._slots.values():
            slot.buffer.close()
        self._slots.clear()

    def submit(self, slot: Slot, size: int, version: Version) -> AgentWrite:
        """Hand a filled slot over to the agent's writer."""
        pending = AgentWrite(version)
        self._pending[version.step] = pending
        self._busy.add(slot.id)
        self._runtime.control.send(
            Staged(
                inc=self._runtime.start.inc,
                slot=slot.id,
                size=size,
                version=version,
                t=SYSTEM.mono(),
            )
        )
        return pending

    def close(self, abort: bool = False) -> None:
        """Forget the slots; the agent keeps what is being written."""
        self._drop_slots()

    def _freed(self, number: int) -> None:
        with self._changed:
            self._busy.discard(number)
            self._changed.notify_all()

    def _saved(self, result: SaveResult) -> None:
        pending = self._pending.pop(result.step, None)
        if pending is not None:
            pending.settle(result.error)
