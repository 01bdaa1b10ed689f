"""Staging slots that belong to the agent: a staged shard outlives the rank that made it.

Runs in the rank; implements ``shard_writer.Staging``.
"""

from __future__ import annotations

import threading

from keepstep.clock import SYSTEM
from keepstep.errors import SaveFailed
from keepstep.rank.runtime import Runtime
from keepstep.rank.shard_writer import Slot
from keepstep.rank.slots import Made, SlotPool
from keepstep.wire.messages import SaveResult, SlotWanted, Staged, Unstaged
from keepstep.wire.types import Version

GRANT_LIMIT_S = 60.0
"""How long the agent may take to answer; it does nothing but answer."""


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
    """Slots granted by the agent, reused for every save of this process. For any thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._pending: dict[int, AgentWrite] = {}
        self._pool = SlotPool(self._make, rank=runtime.start.rank)
        runtime.control.on_slot_free = self._pool.freed
        runtime.control.on_saved = self._saved

    @property
    def pool(self) -> SlotPool:
        """The slots."""
        return self._pool

    def prepare(self, size: int, slots: int) -> None:
        """Begin to make ``slots`` slots for images of ``size`` bytes; returns at once."""
        self._pool.prepare(size, slots)

    def acquire(self, size: int, timeout_s: float) -> Slot:
        """A free slot of at least ``size`` bytes; waits for one.

        Raises:
            SaveFailed: none became free within ``timeout_s`` seconds.
            NotEnoughMemory: the node has no memory for one.
        """
        return self._pool.acquire(size, timeout_s, self._runtime.config.checkpoint.slots)

    def _make(self, capacity: int, count: int) -> Made:
        """In a thread of the pool: ask the agent."""
        control = self._runtime.control
        control.send(SlotWanted(inc=self._runtime.start.inc, size=capacity, count=count))
        return control.take_grants(GRANT_LIMIT_S)

    def release(self, slot: Slot) -> None:
        """Give back a slot that will not be submitted."""
        self._pool.release(slot)

    def submit(self, slot: Slot, size: int, version: Version) -> AgentWrite:
        """Hand a filled slot over to the agent's writer."""
        pending = AgentWrite(version)
        with self._lock:
            self._pending[version.step] = pending
        self._pool.written(slot.id)
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

    def failed(self, version: Version, error: str) -> None:
        """The copy for ``version`` failed: nobody need wait for this rank's shard."""
        self._runtime.control.send(
            Unstaged(inc=self._runtime.start.inc, version=version, error=error)
        )

    def close(self, abort: bool = False) -> None:
        """Forget the slots; the agent keeps what is being written."""
        self._pool.close()

    def _saved(self, result: SaveResult) -> None:
        with self._lock:
            pending = self._pending.pop(result.step, None)
        if pending is not None:
            pending.settle(result.error)
