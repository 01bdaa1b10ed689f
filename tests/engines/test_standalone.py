"""The engine of a script without launcher."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch

import keepstep
from keepstep import linux
from keepstep.checkpoint import layout
from keepstep.config import (
    CheckpointSettings,
    Config,
    EngineSettings,
    NvrxSettings,
    RunSettings,
)
from keepstep.engines.standalone import StandaloneEngine
from keepstep.errors import SaveFailed
from keepstep.ports import ShardWriter
from keepstep.rank.checkpointer import Place, WriterFactory, native_writer
from keepstep.wire.types import World


def _config(**checkpoint: object) -> Config:
    return dataclasses.replace(Config(), checkpoint=CheckpointSettings(**checkpoint))  # type: ignore[arg-type]


def _children() -> list[psutil.Process]:
    """Child processes but for Python's resource tracker, which an earlier test may have started."""
    return [one for one in psutil.Process().children() if not linux.is_tracker(one.pid)]


def _world() -> World:
    return World(rank=0, size=1, local_rank=0, local_size=1, node=0, round=1)


def test_the_attempt_is_called_once_in_a_world_of_one() -> None:
    engine = StandaloneEngine(Config())
    world = engine.restarter(lambda: 0).run(lambda world: world)
    engine.close()
    assert (world.rank, world.size, world.round) == (0, 1, 1)
    assert engine.exit_code == 0
    assert not torch.distributed.is_initialized()


def test_an_exception_comes_out_as_it_is_and_nothing_is_tried_again() -> None:
    calls: list[World] = []

    def attempt(world: World) -> None:
        calls.append(world)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        StandaloneEngine(Config()).restarter(lambda: 0).run(attempt)
    assert len(calls) == 1
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("config", "where"),
    [
        (Config(), "runs/plain/checkpoints"),
        (dataclasses.replace(Config(), run=RunSettings(dir="mine")), "mine/checkpoints"),
        (_config(dir="elsewhere"), "elsewhere"),
    ],
)
def test_checkpoints_lie_where_the_settings_say(
    config: Config, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = StandaloneEngine(config)
    saver = engine.saver(_world())
    assert saver.load({"w": torch.ones(2)}) == 0
    saver.save({"w": torch.ones(2)}, 1)
    engine.close()
    assert layout.list_folders(tmp_path / where) == ["step-00000001"]


def test_closing_waits_for_the_last_save_and_ends_the_writer(tmp_path: Path) -> None:
    engine = StandaloneEngine(_config(dir=str(tmp_path), keep_last=2))
    saver = engine.saver(_world())
    for step in (1, 2):
        saver.save({"w": torch.full((2,), float(step))}, step).wait(30.0)
    saver.save({"w": torch.full((2,), 3.0)}, 3)
    engine.close()
    engine.close()
    assert not _children()
    found = torch.zeros(2)
    again = StandaloneEngine(_config(dir=str(tmp_path)))
    assert again.saver(_world()).load({"w": found}) == 3
    again.close()
    assert found.tolist() == [3.0, 3.0]
    assert layout.list_folders(tmp_path) == ["step-00000002", "step-00000003"]


def test_the_part_that_saves_can_be_nvrxs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Place]] = []

    def factory(kind: str) -> WriterFactory:
        def make(place: Place) -> ShardWriter:
            asked.append((kind, place))
            return native_writer(place)

        return make

    module = "keepstep.engines.nvrx.shards"
    monkeypatch.setitem(sys.modules, module, cast(Any, SimpleNamespace(writer_factory=factory)))
    config = dataclasses.replace(
        _config(dir=str(tmp_path)),
        engine=EngineSettings(checkpoint="nvrx"),
        nvrx=NvrxSettings(checkpoint="dcp"),
    )
    engine = StandaloneEngine(config)
    engine.saver(_world()).save({"w": torch.ones(2)}, 1)
    engine.close()
    with keepstep.Checkpointer(tmp_path, engine="nvrx") as checkpointer:
        checkpointer.async_save({"w": torch.ones(2)}, 2)
    assert [(kind, place.root) for kind, place in asked] == [("dcp", tmp_path), ("torch", tmp_path)]


def test_finishing_waits_for_all_saves_and_leaves_the_saver_usable(tmp_path: Path) -> None:
    engine = StandaloneEngine(_config(dir=str(tmp_path)))
    saver = engine.saver(_world())
    pending = saver.save({"w": torch.ones(2)}, 1)
    saver.poll()
    saver.finish(30.0)
    assert pending.done()
    saver.save({"w": torch.ones(2)}, 2)
    engine.close()
    assert layout.list_folders(tmp_path) == ["step-00000001", "step-00000002"]


def _break(folder: Path) -> None:
    """Make every write into ``folder`` fail."""
    for name in os.listdir(folder):
        (folder / name).rename(folder.parent / name)
    folder.rmdir()
    folder.write_text("in the way")


def test_a_last_save_that_fails_is_told_and_the_writer_is_ended_all_the_same(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "saved"
    engine = StandaloneEngine(_config(dir=str(folder)))
    saver = engine.saver(_world())
    saver.save({"w": torch.ones(2)}, 1).wait(30.0)
    _break(folder)
    saver.save({"w": torch.ones(2)}, 2)
    with pytest.raises(SaveFailed, match="step 2"):
        engine.close()
    assert not _children()


def test_the_scripts_own_error_is_shown_rather_than_that_of_a_save(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    engine = StandaloneEngine(_config(dir=str(folder)))
    saver = engine.saver(_world())
    saver.save({"w": torch.ones(2)}, 1).wait(30.0)
    _break(folder)
    saver.save({"w": torch.ones(2)}, 2)
    with pytest.raises(KeyError, match="mine"):
        try:
            raise KeyError("mine")
        finally:
            engine.close()
    assert not _children()
