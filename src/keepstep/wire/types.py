"""Plain values that several processes share: a rank's world, the version of a shard."""

from __future__ import annotations

import signal
from pathlib import Path

import msgspec

STACK_SIGNAL = signal.SIGRTMIN + 5
"""Asks a rank to write its Python stacks to its stack file, even while it holds the lock."""


ATTACH_VARIABLE = "KEEPSTEP_ATTACH"
"""Environment variable: ``messages.Attach`` as JSON, for ranks that another launcher starts."""
STORE_VARIABLE = "KEEPSTEP_STORE"
"""Environment variable: HOST:PORT of the store outside the ranks, where our launcher has one."""


def log_file(rank: int, inc: int, stream: str) -> str:
    """Name of the file that ``stream`` (stdout or stderr) of incarnation ``inc`` goes to."""
    return f"rank-{rank:05d}-{inc:03d}.{stream}.log"


def stack_file(run_dir: Path, rank: int, inc: int) -> Path:
    """Where incarnation ``inc`` of ``rank`` writes its stacks."""
    return run_dir / "stacks" / f"rank-{rank:05d}-{inc:03d}.txt"


class World(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one round, seen from one of them.

    ``rank`` and ``size`` are global, ``local_rank`` counts inside the node, ``round`` numbers the
    rendezvous (1 for the first), ``resume`` is the step to resume from (0: from the start) and
    ``folder`` the name of the checkpoint that holds it; ``term`` is the coordinator's.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    round: int
    resume: int = 0
    folder: str = ""
    term: int = 0


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """Which state a shard belongs to. Shards combine only if all of it matches."""

    run: str
    term: int
    round: int
    step: int
    world: int
