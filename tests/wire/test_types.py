from __future__ import annotations

import signal
from pathlib import Path

import msgspec
import pytest

from keepstep.wire.types import STACK_SIGNAL, Version, World, stack_file


def test_a_version_is_equal_only_if_all_of_it_is() -> None:
    version = Version(run="demo", term=1, round=2, step=3, world=4)
    assert version == Version(run="demo", term=1, round=2, step=3, world=4)
    for name in ("term", "round", "step", "world"):
        other = msgspec.structs.replace(version, **{name: 9})
        assert other != version
        assert len({version, other}) == 2
    assert msgspec.structs.replace(version, run="other") != version


def test_versions_and_worlds_do_not_change() -> None:
    version = Version(run="demo", term=1, round=2, step=3, world=4)
    with pytest.raises(AttributeError):
        version.step = 4  # type: ignore[misc]


def test_a_world_without_checkpoint_starts_from_the_start() -> None:
    world = World(rank=1, size=2, local_rank=1, local_size=2, node=0, round=1)
    assert (world.resume, world.folder, world.term) == (0, "", 0)


def test_each_incarnation_has_a_stack_file_of_its_own() -> None:
    names = {stack_file(Path("run"), rank, inc) for rank in range(3) for inc in range(3)}
    assert len(names) == 9
    assert stack_file(Path("run"), 3, 12) == Path("run/stacks/rank-00003-012.txt")


def test_the_stack_signal_is_a_real_time_signal_that_python_and_torch_do_not_use() -> None:
    assert signal.SIGRTMIN < STACK_SIGNAL < signal.SIGRTMAX
