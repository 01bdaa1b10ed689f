"""Small checkpoints for tests, made without torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.manifest import Manifest, Receipt
from keepstep.checkpoint.shard_file import ShardPlan, TensorSpec
from keepstep.checkpoint.writer import write_shard
from keepstep.wire.types import Version

COLUMNS = 3
ROWS = 2


class FixedClock:
    """A clock that stands still until told otherwise; sleeping moves it."""

    def __init__(self, wall: float = 1_700_000_000.0) -> None:
        self.now = wall

    def wall(self) -> float:
        return self.now

    def mono(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_version(
    step: int = 5, *, run: str = "demo", term: int = 1, round: int = 1, world: int = 2
) -> Version:
    return Version(run=run, term=term, round=round, step=step, world=world)


def specs(version: Version, rank: int) -> list[TensorSpec]:
    """``weight`` is cut by rows over the ranks, ``count`` is rank 0's, ``rng`` is everyone's."""
    whole = (ROWS * version.world, COLUMNS)
    found = [
        TensorSpec(
            name="rng", dtype="U8", shape=(5,), global_shape=(5,), offsets=(0,), kind="rank"
        ),
        TensorSpec(
            name="weight",
            dtype="F32",
            shape=(ROWS, COLUMNS),
            global_shape=whole,
            offsets=(ROWS * rank, 0),
        ),
    ]
    if rank == 0:
        found.append(TensorSpec(name="count", dtype="I64", shape=(), global_shape=(), offsets=()))
    return found


def image(
    version: Version,
    rank: int,
    *,
    fill: int = 7,
    pad: int = 0,
    values: Mapping[str, object] | None = None,
) -> bytes:
    """A staged file image; ``fill`` is the byte its data is made of, ``pad`` adds bytes of data."""
    wanted = specs(version, rank)
    if pad:
        size = (pad,)
        wanted.append(
            TensorSpec(
                name="pad", dtype="U8", shape=size, global_shape=size, offsets=(0,), kind="rank"
            )
        )
    state = {"lr": 0.1, "seen": rank * 10} if values is None else values
    plan = ShardPlan(wanted, version, rank, state)
    return plan.header + bytes([fill]) * (plan.size - plan.data_start)


@contextlib.contextmanager
def staged(data: bytes) -> Iterator[int]:
    """A memfd that holds ``data`` (and some bytes more, as a slot does)."""
    fd = os.memfd_create("image", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data) + 12345)
        yield fd
    finally:
        os.close(fd)


def write(
    root: Path, version: Version, rank: int, data: bytes | None = None
) -> tuple[Receipt, str]:
    """Write one rank's shard."""
    data = image(version, rank) if data is None else data
    with staged(data) as fd:
        return write_shard(fd, len(data), root, version, rank)


def save(root: Path, version: Version, *, at: float = 1_700_000_000.0) -> tuple[Manifest, str]:
    """Write all shards and commit."""
    folder = ""
    for rank in range(version.world):
        _, folder = write(root, version, rank)
    return commit(root, folder, version, FixedClock(at)), folder


def flip(path: Path, at: int) -> None:
    """Change one bit of the byte at ``at``."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
