"""Whether all ranks see one and the same folder of checkpoints. Runs in the ranks.

Found out before the first step instead of after hours: each node may have a folder of that name.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from keepstep.checkpoint import layout
from keepstep.clock import SYSTEM, Clock
from keepstep.errors import CheckpointNotWritable
from keepstep.rank import exchange

LIMIT_S = 5.0
"""How long a new file may take to be seen by other nodes; a name never asked for is in no cache."""
_POLL_S = 0.02
_SHOWN = 8


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a rank found what rank 0 wrote, and where the rank is."""

    found: bool
    host: str


def check(root: Path, rank: int, world: int, clock: Clock = SYSTEM) -> None:
    """Make sure that all ranks see what rank 0 writes into ``root``. A collective.

    Where rank 0 cannot write, which is no error for who only reads, nothing is found out.

    Raises:
        CheckpointNotWritable: they do not; on every rank.
    """
    if world == 1:
        return
    name = ""
    if rank == 0:
        with contextlib.suppress(OSError):
            name = _leave(root)
    name = exchange.broadcast(name.encode() if rank == 0 else None).decode()
    if not name:
        return
    try:
        mine = _Seen(found=_look(root / name, clock), host=os.uname().nodename)
        seen = [
            msgspec.json.decode(one, type=_Seen)
            for one in exchange.gather(msgspec.json.encode(mine))
        ]
    finally:
        if rank == 0:
            with contextlib.suppress(OSError):
                (root / name).unlink()
    blind = [(number, one.host) for number, one in enumerate(seen) if not one.found]
    if blind:
        shown = ", ".join(f"rank {number} on {host}" for number, host in blind[:_SHOWN])
        more = ", ..." if len(blind) > _SHOWN else ""
        raise CheckpointNotWritable(
            f"the checkpoint folder is not shared by all ranks: {len(blind)} of {world} do not see "
            f"what rank 0 on {seen[0].host} wrote there: {shown}{more}",
            where=str(root),
            done="nothing was saved",
            advice="use a folder on storage that all nodes have mounted in the same place",
        )


def _leave(root: Path) -> str:
    """Make a file in ``root`` for the others to look for; returns its name."""
    root.mkdir(parents=True, exist_ok=True)
    name = layout.temporary_name("shared")  # the next save removes it if this process is killed
    (root / name).write_text(name)
    return name


def _look(path: Path, clock: Clock) -> bool:
    deadline = clock.mono() + LIMIT_S
    while True:
        with contextlib.suppress(OSError):
            if path.read_text() == path.name:
                return True
        if clock.mono() >= deadline:
            return False
        clock.sleep(_POLL_S)
