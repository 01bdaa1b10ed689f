"""The native engine in a rank, with a fake rank and a fake writer."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from keepstep.checkpoint import layout
from keepstep.config import Config
from keepstep.engines.native import LaunchedSaver, NativeEngine
from keepstep.errors import CheckpointCorrupt, NotEnoughMemory, RestartSignal, SaveFailed
from keepstep.rank.runtime import Runtime
from keepstep.rank.shard_writer import NativeShardWriter
from keepstep.rank.slots import SlotPool
from keepstep.shm import Phase
from keepstep.wire.messages import SaveAsk
from keepstep.wire.types import Version, World
from tests.checkpoint.torch_worlds import save, version
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


class _Pool:
    """Slots, of which ``error`` says that they could not be made."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.reclaimed = 0

    def reclaim(self) -> None:
        self.reclaimed += 1

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def _saver(
    runtime: FakeRuntime,
    writer: FakeShardWriter,
    world: World = _WORLD,
    pool: _Pool | None = None,
) -> LaunchedSaver:
    slots = cast(SlotPool, pool or _Pool())
    return LaunchedSaver(cast(Runtime, runtime), cast(NativeShardWriter, writer), slots, world)


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
    named = tmp_path / "step-00000010.t2r1"
    (tmp_path / save(tmp_path, {"t": torch.ones(2)}, version(10))).rename(named)
    save(tmp_path, {"t": torch.zeros(2)}, version(10, round_number=9))
    runtime, tensor = FakeRuntime(tmp_path), torch.zeros(2)
    assert _saver(runtime, FakeShardWriter()).load({"t": tensor}) == 10
    assert tensor.tolist() == [1, 1]
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
    named = tmp_path / "step-00000010.t2r1"
    (tmp_path / save(tmp_path, {"t": torch.ones(2)}, version(10))).rename(named)
    shard = named / layout.shard_name(0)
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    runtime = FakeRuntime(tmp_path)
    with pytest.raises(CheckpointCorrupt, match=r"bytes 0 to .* differ"):
        _saver(runtime, FakeShardWriter()).load({"t": torch.zeros(2)})
    assert runtime.emitted == [("restore.begin", 10)]


def test_an_engine_that_never_ran_ends_with_0_and_closes_twice(
    tmp_path: Path,
) -> None:
    runtime = FakeRuntime(tmp_path)
    engine = NativeEngine(Config(), cast(Runtime, runtime))
    assert engine.exit_code == 0
    engine.close()
    engine.close()


def test_the_coordinator_is_asked_when_the_step_begins_and_its_answer_counts_when_it_ends(
    tmp_path: Path,
) -> None:
    runtime, writer = FakeRuntime(tmp_path), FakeShardWriter()
    saver = _saver(runtime, writer)
    runtime.control.answers = {(3, 15): "", (3, 20): "2 saves are still being written"}
    saver.expect(15)
    saver.expect(15)
    assert runtime.control.sent == [SaveAsk(inc=0, round=3, step=15)]
    assert not saver.save({}, 15, "skip").skipped
    # An own loop does not say when a step begins: then it is asked now.
    skipped = saver.save({}, 20, "skip")
    assert runtime.control.sent[1:] == [SaveAsk(inc=0, round=3, step=20)]
    assert skipped.skipped and skipped.done() and skipped.staged()
    assert skipped.reason == "2 saves are still being written"
    skipped.wait(0.0)
    assert [version.step for version, _ in writer.begun] == [15]
    assert [step for _, step in runtime.emitted] == [15, 15], "the coordinator tells of the skip"
    assert not saver.save({}, 20, "wait").skipped, "nobody is asked"
    assert len(runtime.control.sent) == 2


def test_a_round_that_is_aborted_before_the_answer_unwinds(tmp_path: Path) -> None:
    runtime, writer = FakeRuntime(tmp_path), FakeShardWriter()
    with pytest.raises(RestartSignal):
        _saver(runtime, writer).save({}, 15, "skip")
    assert writer.begun == []


def test_memory_is_asked_for_ahead_and_its_lack_is_told_at_the_next_step(tmp_path: Path) -> None:
    runtime, writer = FakeRuntime(tmp_path), FakeShardWriter()
    pool = _Pool()
    saver = _saver(runtime, writer, pool=pool)
    assert (pool.reclaimed, writer.settled) == (1, 1), "what the round before left"
    saver.prepare({})
    assert writer.prepared == [(40, runtime.config.checkpoint.slots)]
    saver.poll()
    pool.error = NotEnoughMemory("3 GB are needed")
    with pytest.raises(NotEnoughMemory, match="3 GB"):
        saver.poll()
    saver.mutates()
    assert writer.mutated == 1
