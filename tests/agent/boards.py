"""A rank's process without a process: a real board, a real channel, no fork."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keepstep import shm
from keepstep.agent.processes import RankProcess
from keepstep.wire.channel import Channel, pair
from keepstep.wire.messages import FROM_RANK


@contextmanager
def rank_process(rank: int = 0, *, pid: int = 0) -> Iterator[RankProcess]:
    """``rank`` as its agent sees it; this process plays the rank unless ``pid`` says otherwise."""
    ours, theirs = pair()
    fd = shm.create()
    board = shm.Board(fd)
    os.close(fd)
    channel: Channel[FROM_RANK] = Channel(ours, FROM_RANK, blocking=False)
    process = RankProcess(
        ticket=rank + 1,
        channel=channel,
        board=board,
        logs={1: Path("out"), 2: Path("err")},
        pid=pid or os.getpid(),
        state="rank",
        rank=rank,
        inc=0,
        round=1,
    )
    try:
        yield process
    finally:
        channel.close()
        theirs.close()
        board.close()
