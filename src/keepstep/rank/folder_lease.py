"""The lease of a folder for a script without a launcher. Runs in rank 0.

One process holds a folder once, however many checkpointers it makes for it.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from keepstep.checkpoint.lease_keeper import LeaseKeeper


@dataclass
class _Held:
    keeper: LeaseKeeper
    pid: int
    users: int


_LOCK = threading.Lock()
_HELD: dict[Path, _Held] = {}


def hold(root: Path, run: str) -> int:
    """Hold ``root`` until as many calls of ``let_go``; returns the number of the lease.

    Raises:
        FolderInUse: another job, alive, saves into it.
        CheckpointNotWritable: storage refuses, or does not answer.
    """
    with _LOCK:
        held = _HELD.get(root)
        if held is None or held.pid != os.getpid():  # the parent of a fork holds its own
            keeper = LeaseKeeper(root, run, relieves=False, say=_say)
            keeper.claim()
            held = _HELD[root] = _Held(keeper, os.getpid(), 0)
        held.users += 1
        return held.keeper.number


def let_go(root: Path) -> None:
    """Give back what ``hold`` gave."""
    with _LOCK:
        held = _HELD.get(root)
        if held is None or held.pid != os.getpid():
            return
        held.users -= 1
        if held.users == 0:
            del _HELD[root]
            held.keeper.close()


def _say(text: str) -> None:
    sys.stderr.write(f"keepstep: {text}\n")
