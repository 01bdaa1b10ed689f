"""The native engine in a rank, with a fake rank and a fake writer."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from keepstep.config import Config
from keepstep.engines.native import LaunchedSaver, NativeEngine
from keepstep.errors import CheckpointCorrupt, SaveFailed
from keepstep.rank.runtime import Runtime
from keepstep.rank.shard_writer import NativeShardWriter
from keepstep.shm import Phase
from keepstep.wire.types import Version, World
from tests.engines.fakes import FakeRuntime, FakeShardWriter

_WORLD = World(
    rank=1,
    size=4,
    local_rank=1,
    local_size=4,
    node=0,
    round=3,
    resume=10,
    folder="step-00000010.t2r1",
    term=2,
)


def _saver(runtime: FakeRuntime, writer: FakeShardWriter, world: World = _WORLD) -> LaunchedSaver:
    return LaunchedSaver(cast(Runtime, runtime), cast(NativeShardWriter, writer), world)


def test_a_save_names_the_version_of_the_round_and_frames_the_copy_with_events(
    tmp_path: Path,
) -> None:
    runtime, writer = FakeRuntime(tmp_path), FakeShardWriter()
    assert _saver(runtime, writer).save({}, 15).done()
    version = Version(run="demo", term=2, round=3, step=15, world=4)
    assert writer.begun == [(version, tmp_path)]
    assert runtime.emitted == [("checkpoint.begin", 15), ("checkpoint.staged", 15)]
    assert runtime.phases == [Phase.SAVE]


def test_a_save_that_fails_is_begun_but_never_staged(tmp_path: Path) -> None:
    runtime = FakeRuntime(tmp_path)
    with pytest.raises(SaveFailed):
        _saver(runtime, FakeShardWriter(SaveFailed("no slot"))).save({}, 15)
    assert runtime.emitted == [("checkpoint.begin", 15)]


def test_a_round_loads_the_folder_that_the_coordinator_named(tmp_path: Path) -> None:
    runtime, writer = FakeRuntime(tmp_path), FakeShardWriter()
    assert _saver(runtime, writer).load({}) == 10
    assert writer.loaded == [tmp_path / "step-00000010.t2r1"]
    assert runtime.emitted == [("restore.begin", 10), ("restore.end", 10)]
    assert runtime.phases == [Phase.LOAD]


def test_a_round_from_the_start_loads_nothing(tmp_path: Path) -> None:
    runtime, writer = FakeRuntime(tmp_path), FakeShardWriter()
    start = World(rank=0, size=1, local_rank=0, local_size=1, node=0, round=1)
    assert _saver(runtime, writer, start).load({}) == 0
    assert writer.loaded == [] and runtime.emitted == []


def test_neither_steps_nor_the_end_of_main_are_the_savers_business(tmp_path: Path) -> None:
    runtime, writer = FakeRuntime(tmp_path), FakeShardWriter()
    saver = _saver(runtime, writer)
    saver.poll()
    saver.finish(1.0)
    assert writer.begun == [] and runtime.emitted == []


def test_a_damaged_checkpoint_is_never_said_to_be_restored(tmp_path: Path) -> None:
    runtime = FakeRuntime(tmp_path)
    with pytest.raises(CheckpointCorrupt):
        _saver(runtime, FakeShardWriter(CheckpointCorrupt("a byte"))).load({})
    assert runtime.emitted == [("restore.begin", 10)]


def test_an_engine_that_never_ran_ends_with_0_and_closes_twice(
    tmp_path: Path,
) -> None:
    runtime = FakeRuntime(tmp_path)
    engine = NativeEngine(Config(), cast(Runtime, runtime))
    assert engine.exit_code == 0
    engine.close()
    engine.close()
