"""Staging slots of a node: anonymous shared memory that the agent owns, and the writer's tickets.

A slot outlives the rank that filled it, so a staged shard is written even after a SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from keepstep import memory
from keepstep.errors import NotEnoughMemory
from keepstep.wire.channel import Channel, Closed
from keepstep.wire.messages import (
    FROM_WRITER,
    ShardFailed,
    ShardWritten,
    SlotGrant,
    Staged,
    WriteShard,
)


@dataclass(slots=True)
class _Slot:
    owner: int  # ticket of the process
    fd: int
    size: int
    writes: int = 0
    orphan: bool = False
    dead: bool = False
    """Its process is gone, so that nobody looks at it but the writer."""


@dataclass(frozen=True, slots=True)
class Freed:
    """Slot ``number`` of process ``owner`` may be filled again."""

    owner: int
    number: int


@dataclass(frozen=True, slots=True)
class Granted:
    """What a process gets: message and descriptor for each slot. ``line`` is for people, if there
    is something new to say; ``left`` was there before."""

    grants: list[tuple[SlotGrant, int]]
    left: memory.Room
    line: str


class Slots:
    """All slots of the node.

    Args:
        root: Folder of the checkpoints, as a path.
        retries: How often the writer tries again what storage refused.
        room: Says how much memory is left.
    """

    def __init__(
        self, root: str, retries: int = 0, room: Callable[[], memory.Room] = memory.room
    ) -> None:
        self._root = root
        self._retries = retries
        self._room = room
        self._most = 0
        """Slots of a rank, where not all that are wanted fit: then no later one gets more."""
        self._told = 0
        self._slots: dict[int, _Slot] = {}
        self._tickets: dict[int, tuple[int, WriteShard]] = {}
        """By ticket the slot, and what the writer was asked for."""
        self._next = 0
        self.finished = 0
        """Shards that were written, or given up."""

    def ask(self, owner: int, size: int, count: int, ranks: Collection[int]) -> Granted:
        """Grant ``count`` slots, or one, of ``size`` bytes; earlier ones of ``owner`` are let go.

        Args:
            owner: Who asks, as a process's ticket.
            ranks: Tickets of all ranks of the node. Those without slots will ask for as much.

        Raises:
            NotEnoughMemory: the node has no memory for even one slot of each.
        """
        self._let_go(owner)
        count = min(count, self._most) if self._most else count
        have = {slot.owner for slot in self._slots.values() if not slot.orphan}
        missing = len({*ranks, owner} - have)
        wanted = memory.Wanted(size, count, missing)
        left, promised = self._room(), self._promised()
        fits = memory.fitting(wanted, left, promised)
        if not fits:
            raise memory.shortage(wanted, left, promised)
        if fits < count:
            self._most = fits
        line = ""
        if size > self._told or fits < count:
            self._told = size + size // 8  # shards of other ranks may differ a little
            made = memory.Wanted(size, fits, max(len(ranks), 1))
            line = memory.statement(made, count, left)
        return Granted(self._grant(owner, size, fits), left, line)

    def _promised(self) -> int:
        """Bytes that were granted and that nobody has touched yet."""
        return sum(
            max(0, slot.size - os.fstat(slot.fd).st_blocks * 512) for slot in self._slots.values()
        )

    def _grant(self, owner: int, size: int, count: int) -> list[tuple[SlotGrant, int]]:
        made: list[tuple[SlotGrant, int]] = []
        for _ in range(count):
            self._next += 1
            try:
                fd = os.memfd_create(f"keepstep-slot-{self._next}", os.MFD_CLOEXEC)
                os.ftruncate(fd, size)
            except OSError as error:
                self.release(owner)
                raise NotEnoughMemory(
                    f"no staging slot of {size} bytes could be made: {error.strerror}"
                ) from error
            self._slots[self._next] = _Slot(owner=owner, fd=fd, size=size)
            made.append((SlotGrant(slot=self._next, size=size, of=count), fd))
        return made

    def write(self, rank: int, staged: Staged, writer: Channel[FROM_WRITER]) -> bool:
        """Hand a filled slot to the writer; False if the slot is not known any more."""
        slot = self._slots.get(staged.slot)
        if slot is None:
            return False
        self._next += 1
        slot.writes += 1
        message = WriteShard(
            ticket=self._next,
            rank=rank,
            size=staged.size,
            version=staged.version,
            root=self._root,
            retries=self._retries,
        )
        self._tickets[self._next] = (staged.slot, message)
        with contextlib.suppress(Closed):  # its successor gets all that is unfinished
            writer.send(message, (slot.fd,))
        return True

    def write_again(self, writer: Channel[FROM_WRITER]) -> int:
        """Hand everything unfinished to a new writer; what is on storage already is not redone.

        Returns:
            How many shards that is.
        """
        for number, message in self._tickets.values():
            writer.send(message, (self._slots[number].fd,))
        return len(self._tickets)

    def written(self, result: ShardWritten | ShardFailed) -> Freed | None:
        """The writer is done with a slot."""
        self.finished += 1
        asked = self._tickets.pop(result.ticket, None)
        if asked is None:
            return None
        number = asked[0]
        slot = self._slots[number]
        slot.writes -= 1
        if slot.orphan:
            self._drop(number)
            return None
        return Freed(slot.owner, number)

    def release(self, owner: int) -> None:
        """The process is gone: its slots go as soon as nothing reads them."""
        for slot in self._slots.values():
            slot.dead = slot.dead or slot.owner == owner
        self._let_go(owner)

    def _let_go(self, owner: int) -> None:
        for number in [n for n, slot in self._slots.items() if slot.owner == owner]:
            self._slots[number].orphan = True
            self._drop(number)

    def _drop(self, number: int) -> None:
        slot = self._slots[number]
        if slot.writes == 0:
            if slot.dead:
                os.ftruncate(slot.fd, 0)  # the writer may still have it mapped
            os.close(slot.fd)
            del self._slots[number]

    def busy(self, owner: int) -> bool:
        """Whether the process has slots and none of them is free: a save waits for storage."""
        own = [slot for slot in self._slots.values() if slot.owner == owner]
        return bool(own) and all(slot.writes for slot in own)

    @property
    def steps(self) -> Sequence[int]:
        """Steps of the shards that the writer has not finished, oldest first."""
        return [asked.version.step for _, asked in self._tickets.values()]

    @property
    def writing(self) -> int:
        """Shards that the writer has not finished."""
        return len(self._tickets)

    def close(self) -> None:
        """Let go of all memory."""
        for slot in self._slots.values():
            os.close(slot.fd)
        self._slots.clear()
