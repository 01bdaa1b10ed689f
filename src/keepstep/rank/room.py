"""Whether the staging of saves fits, as all ranks of a script without an agent find together.

Runs in the ranks. All of them look before any takes memory, so that nobody's is counted twice, and
all come to the same answer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from keepstep import memory
from keepstep.errors import CheckpointError, KeepstepError
from keepstep.rank import exchange
from keepstep.rank.slots import HEADROOM


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank wants and sees: ``size`` bytes a slot, ``available`` of ``limit`` in ``where``.

    Ranks with the same ``node`` use the same memory. ``error`` is why nothing can be saved at all.
    """

    node: str
    size: int
    available: int
    limit: int
    where: str
    error: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Slots that every rank can have, and one line about the memory that they take."""

    slots: int
    statement: str


def node_id() -> str:
    """Names the machine and the container in which this process runs, in a few characters."""
    parts = [os.uname().nodename]
    for read in (_boot_id, _namespace):
        try:
            parts.append(read())
        except OSError:
            parts.append("")
    return hashlib.blake2b(" ".join(parts).encode(), digest_size=8).hexdigest()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    return os.readlink("/proc/self/ns/cgroup")


def decide(needs: Sequence[Need], slots: int) -> Answer:
    """How many slots every rank can have: ``slots``, or 1. Pure.

    Raises:
        NotEnoughMemory: not even one fits on some node.
        CheckpointError: a rank cannot save.
    """
    for rank, need in enumerate(needs):
        if need.error:
            raise CheckpointError(f"rank {rank} cannot save: {need.error.rstrip('.')}")
    least, line = slots, ""
    for node in dict.fromkeys(need.node for need in needs):
        ours = [need for need in needs if need.node == node]
        tightest = min(ours, key=lambda need: need.available)
        left = memory.Room(tightest.available, tightest.limit, tightest.where)
        mean = -(-sum(need.size for need in ours) // len(ours))
        wanted = memory.Wanted(mean, slots, len(ours))
        fits = memory.fitting(wanted, left)
        if not fits:
            raise memory.shortage(wanted, left)
        if not line or fits < least:
            line = memory.statement(memory.Wanted(mean, fits, len(ours)), slots, left)
        least = min(least, fits)
    return Answer(slots=least, statement=line)


def agree(size_of: Callable[[], int], slots: int, world: int) -> tuple[int, Answer]:
    """Ask all ranks, and decide: this rank's bytes a slot, and the answer. A small collective.

    Raises:
        NotEnoughMemory: not even one slot fits on some node.
        CheckpointError: a rank cannot save; on that rank its own error.
    """
    size, own = 0, None
    try:
        size = size_of()
    except KeepstepError as error:  # the others wait for this rank's word
        own = error
    left = memory.room()
    need = Need(
        node=node_id(),
        size=size + HEADROOM,
        available=left.available,
        limit=left.limit,
        where=left.where,
        error="" if own is None else str(own),
    )
    needs = [need]
    if world > 1:
        heard = exchange.gather(msgspec.json.encode(need))
        needs = [msgspec.json.decode(one, type=Need) for one in heard]
    if own is not None:
        raise own
    return size, decide(needs, slots)
