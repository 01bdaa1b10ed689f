"""What the agent tells a process that becomes a rank, as tests of the rank's parts need it."""

from __future__ import annotations

from pathlib import Path

from keepstep.config import Config
from keepstep.config.load import encode
from keepstep.wire.messages import Start


def start(run_dir: Path) -> Start:
    """Rank 1 of 2, first incarnation, round 1, with the default settings."""
    return Start(
        run="demo",
        rank=1,
        local_rank=1,
        world=2,
        local_world=2,
        node=0,
        inc=0,
        round=1,
        env={},
        mode="script",
        target="train.py",
        args=[],
        config=encode(Config()),
        run_dir=str(run_dir),
    )
