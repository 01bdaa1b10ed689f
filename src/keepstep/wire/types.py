"""Plain values that several processes share: which world a rank is in, which state a shard holds."""

from __future__ import annotations

import msgspec


class World(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one round, seen from one of them.

    ``rank`` and ``size`` are global, ``local_rank`` counts inside the node, ``round`` numbers the
    rendezvous (1 for the first), ``resume`` is the step to resume from (0: from the start) and
    ``folder`` the name of the checkpoint that holds it.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    round: int
    resume: int = 0
    folder: str = ""


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """Which state a shard belongs to. Shards combine only if all of it matches."""

    run: str
    term: int
    round: int
    step: int
    world: int
