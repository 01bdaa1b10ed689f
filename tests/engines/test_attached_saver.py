"""Saving without a coordinator, in one rank: what is kept, what is told, what is an error."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from keepstep.checkpoint import layout
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.lineage import Lineage
from keepstep.checkpoint.torch_image import ShardImage
from keepstep.checkpoint.torch_state import flatten
from keepstep.checkpoint.writer import claim_folder
from keepstep.config import Config
from keepstep.engines import Saver
from keepstep.engines.attached_saver import AttachedSaver
from keepstep.engines.native import NativeEngine
from keepstep.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    CheckpointNotFound,
    SaveFailed,
)
from keepstep.events import CheckpointUnusable
from keepstep.ports import PendingWrite
from keepstep.rank.checkpointer import Place
from keepstep.rank.runtime import Runtime
from keepstep.shm import Phase
from keepstep.wire.types import Version, World
from tests.checkpoint import shards
from tests.engines.fakes import FakeRuntime

_WORLD = World(rank=0, size=1, local_rank=0, local_size=1, node=0, round=1)


class _Save:
    """A save that commits when it is waited for, unless it has an error."""

    def __init__(self, commit: Callable[[], object], error: str) -> None:
        self._commit = commit
        self._error = error
        self._done = bool(error)

    def staged(self) -> bool:
        return True

    def done(self) -> bool:
        return self._done

    def wait(self, timeout_s: float) -> None:
        if self._error:
            raise SaveFailed(self._error)
        if not self._done:
            self._done = True
            self._commit()


class _Writer:
    """Writes in this process; saves of the steps in ``broken`` fail."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.broken: set[int] = set()
        self.versions: list[Version] = []
        self.polls = 0
        self.closed: list[bool] = []
        self.last_bytes = 0

    def begin(self, state: Mapping[str, object], version: Version, folder: Path) -> PendingWrite:
        image = ShardImage(flatten(state, rank=0, world=1), version, 0)
        data = bytearray(image.size)
        image.write_into(data)
        self.last_bytes = image.size
        self.versions.append(version)
        name = claim_folder(folder, version)
        shards.write(folder, version, 0, bytes(data))
        error = f"broken at {version.step}" if version.step in self.broken else ""

        def publish() -> None:
            commit(folder, name, version)
            self.place.on_commit(version, name, image.size, 0.5)

        return _Save(publish, error)

    def load(self, state: Mapping[str, object], folder: Path) -> int:
        raise NotImplementedError

    def poll(self) -> None:
        self.polls += 1

    def close(self, *, abort: bool = False) -> None:
        self.closed.append(abort)


class _Rank:
    """A rank's runtime, and the savers and writers of its rounds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints = root / "checkpoints"
        self.runtime = FakeRuntime(self.checkpoints)
        self.runtime.run_dir = root
        self.writers: list[_Writer] = []

    def saver(self, coordinated: World | None = None) -> AttachedSaver:
        runtime, world = cast(Runtime, self.runtime), coordinated or _WORLD
        return AttachedSaver(runtime, world, self.make, coordinated=coordinated is not None)

    def make(self, place: Place) -> _Writer:
        self.writers.append(_Writer(place))
        return self.writers[-1]

    def take_events(self) -> list[tuple[str, int | None]]:
        emitted, self.runtime.emitted = self.runtime.emitted, []
        return emitted


@pytest.fixture
def rank(tmp_path: Path) -> _Rank:
    return _Rank(tmp_path)


def _save(rank: _Rank, *steps: int, restored: int = 0) -> None:
    """One round that saves ``steps``."""
    saver = rank.saver()
    assert saver.load({"w": torch.zeros(2)}) == restored
    for step in steps:
        saver.save({"w": torch.full((2,), float(step))}, step).wait(1.0)
    saver.close()


def test_it_is_a_saver_and_makes_its_writer_with_the_settings_of_the_run(rank: _Rank) -> None:
    saver = rank.saver()
    assert cast(Saver, saver) is saver
    saver.poll()
    saver.save({"w": torch.ones(1)}, 1)
    (writer,) = rank.writers
    place = writer.place
    assert (place.root, place.rank, place.world) == (rank.checkpoints, 0, 1)
    assert place.keep_last == rank.runtime.config.checkpoint.keep_last
    saver.poll()
    assert writer.polls == 1
    saver.close()
    rank.saver().close()  # never used: no writer was made
    assert len(rank.writers) == 1


def test_what_was_saved_is_restored_in_the_next_round_with_events_around_both(rank: _Rank) -> None:
    saver, found = rank.saver(), torch.zeros(2)
    assert saver.load({"w": found}) == 0
    assert rank.take_events() == [], "nothing was loaded"
    saver.save({"w": torch.full((2,), 5.0)}, 5)
    saver.finish(1.0)
    assert rank.take_events() == [
        ("checkpoint.begin", 5),
        ("checkpoint.staged", 5),
        ("checkpoint.commit", 5),
    ]
    saver.close()
    saver.close()
    assert rank.writers[0].closed == [False]
    later = rank.saver()
    assert later.load({"w": found}) == 5
    later.close()
    assert found.tolist() == [5.0, 5.0]
    assert rank.take_events() == [("restore.begin", 5), ("restore.end", 5)]
    assert rank.runtime.phases == [Phase.SAVE, Phase.LOAD]


def test_events_say_how_many_bytes_were_copied_and_read(rank: _Rank) -> None:
    _save(rank, 5)
    size = rank.writers[0].last_bytes
    _save(rank, restored=5)
    numbers = {data.kind: getattr(data, "bytes", 0) for data in rank.runtime.data}
    assert numbers["checkpoint.staged"] == numbers["checkpoint.commit"] == size
    assert 0 < numbers["restore.end"] <= size


def test_each_round_is_a_term_of_the_run_and_what_a_rollback_abandons_stays_abandoned(
    rank: _Rank,
) -> None:
    _save(rank, 5, 10)
    shards.flip(rank.checkpoints / "step-00000010" / layout.shard_name(0), -1)
    _save(rank, 7, restored=5)
    shards.flip(rank.checkpoints / "step-00000010" / layout.shard_name(0), -1)  # good again
    _save(rank, restored=7)
    line = Lineage(rank.root, "demo", rank.checkpoints)
    try:
        assert line.term == 4
        assert line.pick(frozenset()) == (7, "step-00000007")
    finally:
        line.close()


def test_a_damaged_checkpoint_is_told_like_the_coordinator_does_and_never_said_to_be_restored(
    rank: _Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    _save(rank, 5, 10, 15)
    cut = rank.checkpoints / "step-00000015" / layout.MANIFEST
    cut.write_bytes(cut.read_bytes()[:100])
    shards.flip(rank.checkpoints / "step-00000010" / layout.shard_name(0), -1)
    rank.take_events()
    rank.runtime.data.clear()
    _save(rank, restored=5)
    assert rank.take_events() == [
        ("checkpoint.unusable", 15),
        ("restore.begin", 10),
        ("checkpoint.unusable", 10),
        ("restore.begin", 5),
        ("restore.end", 5),
    ]
    told = [data for data in rank.runtime.data if isinstance(data, CheckpointUnusable)]
    assert [data.folder for data in told] == ["step-00000015", "step-00000010"]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"keepstep: checkpoint {data.folder} is not usable: {data.error}" for data in told
    ]
    assert "rank-00000.safetensors" in told[1].error


def test_only_damaged_checkpoints_are_an_error(rank: _Rank) -> None:
    _save(rank, 5)
    shards.flip(rank.checkpoints / "step-00000005" / layout.shard_name(0), -1)
    saver = rank.saver()
    with pytest.raises(CheckpointNotFound):
        saver.load({"w": torch.zeros(2)})
    saver.close()


def test_checkpoints_of_another_run_or_model_are_refused(rank: _Rank) -> None:
    _save(rank, 5)
    saver = rank.saver()
    with pytest.raises(CheckpointMismatch, match="other"):
        saver.load({"other": torch.zeros(2)})
    saver.close()
    rank.runtime.start.run = "second"
    second = rank.saver()
    with pytest.raises(CheckpointMismatch, match="of run demo, not of second"):
        second.load({"w": torch.zeros(2)})
    second.close()


def test_a_save_that_fails_is_told_and_training_goes_on(
    rank: _Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = rank.saver()
    saver.save({"w": torch.ones(2)}, 1)
    rank.writers[0].broken = {2, 3}
    saver.save({"w": torch.ones(2)}, 2)
    rank.take_events()
    saver.save({"w": torch.ones(2)}, 3)
    told = [("checkpoint.fail", 2), ("checkpoint.begin", 3), ("checkpoint.staged", 3)]
    assert rank.take_events() == told
    saver.save({"w": torch.ones(2)}, 4)
    saver.finish(1.0)
    saver.close()
    assert [step for kind, step in rank.take_events() if kind == "checkpoint.fail"] == [3]
    error = capsys.readouterr().err
    assert "checkpoint of step 2 was not committed: broken at 2" in error
    assert layout.list_folders(rank.checkpoints)[-1] == "step-00000004"


def test_the_last_save_must_commit(rank: _Rank) -> None:
    saver = rank.saver()
    saver.save({"w": torch.ones(2)}, 1)
    rank.writers[0].broken = {2}
    saver.save({"w": torch.ones(2)}, 2)
    with pytest.raises(SaveFailed, match="broken at 2"):
        saver.close()
    assert rank.writers[0].closed == [True]
    saver.close()


def test_an_abort_waits_for_nothing(rank: _Rank) -> None:
    saver = rank.saver()
    pending = saver.save({"w": torch.ones(2)}, 1)
    saver.close(abort=True)
    assert not pending.done()
    assert rank.writers[0].closed == [True]


def test_under_a_coordinator_its_choice_is_loaded_and_saves_get_its_term_and_round(
    rank: _Rank,
) -> None:
    _save(rank, 5, 10)
    world = msgspec.structs.replace(_WORLD, term=7, round=3, resume=5, folder="step-00000005")
    saver = rank.saver(world)
    assert saver.load({"w": torch.zeros(2)}) == 5
    saver.save({"w": torch.ones(2)}, 10).wait(1.0)
    saver.close()
    assert rank.writers[-1].versions == [Version(run="demo", term=7, round=3, step=10, world=1)]
    assert layout.list_folders(rank.checkpoints)[-1] == "step-00000010.t7r3"
    assert [path.name for path in (rank.root / "terms").iterdir()] == ["00000001"]


def test_under_a_coordinator_a_damaged_checkpoint_is_an_error_for_it_to_answer(
    rank: _Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    _save(rank, 5, 10)
    shards.flip(rank.checkpoints / "step-00000010" / layout.shard_name(0), -1)
    rank.take_events()
    saver = rank.saver(msgspec.structs.replace(_WORLD, term=7, resume=10, folder="step-00000010"))
    with pytest.raises(CheckpointCorrupt, match=r"step-00000010 .*rank-00000"):
        saver.load({"w": torch.zeros(2)})
    saver.close()
    assert rank.take_events() == [("restore.begin", 10)], "the coordinator tells the rest"
    assert capsys.readouterr().err == ""


def test_the_native_launcher_can_have_nvrx_save_and_does_not_wait_for_what_ranks_commit(
    rank: _Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def factory(kind: str) -> Callable[[Place], _Writer]:
        asked.append(kind)
        return rank.make

    module: Any = SimpleNamespace(writer_factory=factory)
    monkeypatch.setitem(sys.modules, "keepstep.engines.nvrx.shards", module)
    config = dataclasses.replace(
        rank.runtime.config, engine=dataclasses.replace(Config().engine, checkpoint="nvrx")
    )
    engine = NativeEngine(config, cast(Runtime, rank.runtime))
    engine.saver(_WORLD).save({"w": torch.ones(2)}, 1)
    engine.saver(_WORLD).save({"w": torch.ones(2)}, 1)
    assert rank.writers[0].closed == [True], "the round before is over"
    engine.close()
    assert rank.writers[1].closed == [True]
    assert asked == ["torch", "torch"]


# --- the engine's own state, failures in a row, and what a restart leaves -------------------------


class _Learned:
    """What an engine has learned."""

    def __init__(self, longest: int = 0) -> None:
        self.longest = longest

    def state_dict(self) -> dict[str, object]:
        return {"longest": self.longest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.longest = state["longest"]


def _with(rank: _Rank, learned: _Learned | None) -> AttachedSaver:
    extra = {} if learned is None else {"limits": learned}
    return AttachedSaver(cast(Runtime, rank.runtime), _WORLD, rank.make, extra=extra)


def test_what_the_engine_has_learned_goes_with_the_checkpoint_and_nobody_else_needs_it(
    rank: _Rank,
) -> None:
    first = _with(rank, _Learned(7))
    first.save({"w": torch.ones(2)}, 5)
    first.finish(1.0)
    first.close()
    learned, found = _Learned(), torch.zeros(2)
    again = _with(rank, learned)
    assert again.load({"w": found}) == 5
    assert learned.longest == 7
    again.close()
    other = _with(rank, None)  # an engine that has no such state
    assert other.load({"w": found}) == 5
    other.save({"w": torch.ones(2)}, 6)
    other.finish(1.0)
    other.close()
    fresh = _Learned(3)
    back = _with(rank, fresh)  # a checkpoint that has none
    assert back.load({"w": found}) == 6
    assert fresh.longest == 3
    back.close()


def test_too_many_failed_saves_in_a_row_end_the_run(rank: _Rank) -> None:
    checkpoint = dataclasses.replace(rank.runtime.config.checkpoint, max_failures=1)
    rank.runtime.config = dataclasses.replace(rank.runtime.config, checkpoint=checkpoint)
    saver = rank.saver()
    saver.save({"w": torch.ones(2)}, 1).wait(1.0)
    rank.writers[0].broken = {2, 4, 5}
    for step in (2, 3):  # one that works starts the count anew
        saver.save({"w": torch.ones(2)}, step)
    saver.finish(1.0)
    for step in (4, 5):
        saver.save({"w": torch.ones(2)}, step)
    with pytest.raises(SaveFailed, match="broken at 5"):
        saver.save({"w": torch.ones(2)}, 6)
    saver.close(abort=True)


def test_without_other_ranks_a_save_that_a_restart_left_is_dropped(rank: _Rank) -> None:
    saver = rank.saver()
    pending = saver.save({"w": torch.ones(2)}, 1)
    saver.leave(1.0)
    assert not pending.done(), "there is no process group in which the ranks could agree"
    assert rank.writers[0].closed == [True]
