"""Staging slots of a node: anonymous shared memory that the agent owns, and the writer's tickets.

A slot outlives the rank that filled it, so a staged shard is written even after a SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

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
    writes: int = 0
    orphan: bool = False


@dataclass(frozen=True, slots=True)
class Freed:
    """Slot ``number`` of process ``owner`` may be filled again."""

    owner: int
    number: int


class Slots:
    """All slots of the node.

    Args:
        root: Folder of the checkpoints, as a path.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._slots: dict[int, _Slot] = {}
        self._tickets: dict[int, tuple[int, WriteShard]] = {}
        """By ticket the slot, and what the writer was asked for."""
        self._next = 0

    def grant(self, owner: int, size: int, count: int) -> list[tuple[SlotGrant, int]]:
        """Make ``count`` slots of ``size`` bytes; earlier ones of ``owner`` are let go.

        Returns:
            Message and descriptor for each.
        """
        self.release(owner)
        made: list[tuple[SlotGrant, int]] = []
        for _ in range(count):
            self._next += 1
            fd = os.memfd_create(f"keepstep-slot-{self._next}", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
            self._slots[self._next] = _Slot(owner=owner, fd=fd)
            made.append((SlotGrant(slot=self._next, size=size), fd))
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
        for number in [n for n, slot in self._slots.items() if slot.owner == owner]:
            self._slots[number].orphan = True
            self._drop(number)

    def _drop(self, number: int) -> None:
        slot = self._slots[number]
        if slot.writes == 0:
            os.close(slot.fd)
            del self._slots[number]

    @property
    def writing(self) -> int:
        """Shards that the writer has not finished."""
        return len(self._tickets)

    def close(self) -> None:
        """Let go of all memory."""
        for slot in self._slots.values():
            os.close(slot.fd)
        self._slots.clear()
