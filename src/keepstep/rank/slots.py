"""The staging slots of one rank: made and populated ahead of the first save, taken, given back.

Runs in the rank. Where the memory comes from is the maker's business: the agent under the launcher,
the rank itself in a plain script. All methods may be called from any thread.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from keepstep import linux
from keepstep.clock import SYSTEM, Clock
from keepstep.errors import KeepstepError, NotEnoughMemory, SaveFailed
from keepstep.rank.shard_writer import Slot

_ROUND_UP = 1 << 16
HEADROOM = 1 << 18
"""Slots are larger than what they are made for: numbers in a header get longer as a run goes on."""


@dataclass(slots=True)
class _Kept:
    """A slot, its descriptor, and whether it is making, free, taken (being filled) or written."""

    slot: Slot
    fd: int
    state: str = "making"


Made = list[tuple[int, int, int]]
"""Slots as they are made: number, capacity in bytes, descriptor (the pool's from then on)."""


class SlotPool:
    """Slots of equal size.

    A slot is busy from ``acquire`` on until it is ``freed`` (its bytes are durable, or the save
    was given up) or handed back with ``release``.

    Args:
        make: Gets a capacity in bytes and a number of slots, and makes them, or fewer. It may wait,
            and is called in a thread of the pool.
        gone: Told of each slot that is dropped, by its number.
        rank: This rank, for messages.
    """

    def __init__(
        self,
        make: Callable[[int, int], Made],
        *,
        rank: int,
        gone: Callable[[int], None] = lambda number: None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._make = make
        self._gone = gone
        self._rank = rank
        self._clock = clock
        self._changed = threading.Condition()
        self._kept: dict[int, _Kept] = {}
        self._capacity = 0
        self._error: Exception | None = None
        self._maker: threading.Thread | None = None
        self._closed = False

    @property
    def count(self) -> int:
        """Slots that are there, or being made."""
        return len(self._kept)

    @property
    def capacity(self) -> int:
        """Bytes of each slot; 0 while there is none."""
        return self._capacity

    @property
    def free(self) -> int:
        """Slots that a save could take now."""
        return sum(kept.state == "free" for kept in self._kept.values())

    def fd(self, number: int) -> int:
        """Descriptor of a slot; the pool's own."""
        return self._kept[number].fd

    # --- making ---------------------------------------------------------------------------------

    def prepare(self, size: int, count: int) -> None:
        """Begin to make ``count`` slots for images of ``size`` bytes; returns at once.

        Nothing happens if there are slots of that size, if some are being made, or if slots that
        are too small are still in use: then they grow when a save needs it.
        """
        with self._changed:
            busy = any(kept.state in ("taken", "written") for kept in self._kept.values())
            if not busy:
                self._begin(size + HEADROOM, count, least=size)

    def check(self) -> None:
        """Nothing, if making the slots has not failed.

        Raises:
            NotEnoughMemory: there is no memory for them.
        """
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _begin(self, size: int, count: int, *, least: int) -> None:
        """Start the maker, with the lock held, unless there is nothing to make."""
        if self._closed or self._maker is not None or self._capacity >= least:
            return
        self._drop_all()
        self._error = None
        capacity = -(-size // _ROUND_UP) * _ROUND_UP
        self._maker = threading.Thread(
            target=self._run, args=(capacity, count), name="keepstep-slots", daemon=True
        )
        self._maker.start()

    def _run(self, capacity: int, count: int) -> None:
        error: Exception | None = None
        try:
            made = [self._map(*one) for one in self._make(capacity, count)]
            with self._changed:
                self._kept = {kept.slot.id: kept for kept in made}
                self._capacity = capacity
            for kept in made:
                linux.populate(kept.slot.buffer, kept.fd, lambda: self._closed)
                self._set(kept.slot.id, "free")
        except KeepstepError as failure:
            error = failure
        except OSError as failure:
            error = _no_memory(capacity, failure, self._rank)
        with self._changed:
            if error is not None:
                self._drop_all()
            self._error, self._maker = error, None
            self._changed.notify_all()

    def _map(self, number: int, capacity: int, fd: int) -> _Kept:
        return _Kept(Slot(number, mmap.mmap(fd, capacity), capacity), fd)

    def _drop_all(self) -> None:
        self._capacity = 0
        kept, self._kept = self._kept, {}
        for number, one in kept.items():
            # A view that somebody still has keeps the mapping until that is gone too.
            with contextlib.suppress(BufferError):
                one.slot.close()
                if one.state == "free":
                    os.ftruncate(one.fd, 0)  # the writer may still have it mapped
            os.close(one.fd)
            self._gone(number)

    # --- using ------------------------------------------------------------------------------------

    def acquire(self, size: int, timeout_s: float, count: int) -> Slot:
        """A free slot of at least ``size`` bytes, yours until ``freed`` or ``release``.

        Makes ``count`` slots if there are none, or if these are too small: then only once all of
        them are free again, so that there is never more memory in use than was stated.

        Raises:
            SaveFailed: none became free within ``timeout_s`` seconds.
            NotEnoughMemory: there is no memory for slots.
        """
        deadline = self._clock.mono() + timeout_s
        with self._changed:
            while True:
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if self._capacity >= size:
                    for kept in self._kept.values():
                        if kept.state == "free":
                            kept.state = "taken"
                            return kept.slot
                elif all(kept.state == "free" for kept in self._kept.values()):
                    self._begin(size + HEADROOM, count, least=size)
                left = deadline - self._clock.mono()
                if left <= 0 or self._closed or not self._changed.wait(left):
                    raise self._none_free(timeout_s)

    def _none_free(self, timeout_s: float) -> SaveFailed:
        return SaveFailed(
            f"no staging slot became free in {timeout_s:g} s",
            where=f"rank {self._rank}, {self.count} slots in use",
            done="this step was not saved",
            advice="storage is slower than the saves: raise checkpoint.every_steps, save less "
            "often",
        )

    def written(self, number: int) -> None:
        """The slot was handed over to a writer."""
        self._set(number, "written")

    def freed(self, number: int) -> None:
        """The writer is done with the slot."""
        self._set(number, "free")

    def release(self, slot: Slot) -> None:
        """A slot that was taken is given back unused."""
        with self._changed:
            kept = self._kept.get(slot.id)
            if kept is not None and kept.slot is slot and kept.state == "taken":
                kept.state = "free"
                self._changed.notify_all()

    def reclaim(self) -> None:
        """Nobody fills a slot any more: those that were taken and not handed over are free."""
        with self._changed:
            for kept in self._kept.values():
                if kept.state == "taken":
                    kept.state = "free"
            self._changed.notify_all()

    def _set(self, number: int, state: str) -> None:
        with self._changed:
            kept = self._kept.get(number)
            if kept is not None:
                kept.state = state
                self._changed.notify_all()

    def close(self) -> None:
        """Let go of the memory; what others hold of it lives on."""
        with self._changed:
            self._closed = True
            maker = self._maker
            self._changed.notify_all()
        if maker is not None:
            maker.join()
        with self._changed:
            self._drop_all()


def _no_memory(capacity: int, error: OSError, rank: int) -> NotEnoughMemory:
    return NotEnoughMemory(
        f"no staging slot of {capacity} bytes could be made: {error.strerror or error}",
        where=f"rank {rank}",
        done="no memory was taken and nothing was saved",
        advice="raise the memory limit of the container, or the limit on address space (ulimit -v)",
    )
