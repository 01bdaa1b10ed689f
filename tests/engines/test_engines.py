"""Which engine is chosen."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import cast

import pytest

from keepstep import shm
from keepstep.config import Config, EngineSettings
from keepstep.engines import choose
from keepstep.engines.native import NativeEngine
from keepstep.engines.standalone import StandaloneEngine
from keepstep.rank.runtime import Runtime
from tests.engines.fakes import FakeRuntime
from tests.rank.starts import start


def test_a_plain_script_gets_the_engine_without_launcher() -> None:
    assert isinstance(choose(Config(), None), StandaloneEngine)


def test_a_rank_of_the_launcher_gets_the_native_engine(tmp_path: Path) -> None:
    runtime = cast(Runtime, FakeRuntime(tmp_path))
    assert isinstance(choose(Config(), runtime), NativeEngine)


@pytest.mark.parametrize(
    "settings",
    [EngineSettings(name="nvrx"), EngineSettings(restart="nvrx", launcher="nvrx")],
)
def test_who_restarts_decides_which_engine_a_rank_gets(
    settings: EngineSettings, tmp_path: Path
) -> None:
    config = dataclasses.replace(Config(), engine=settings)
    fd = shm.create()
    board = shm.Board(fd)
    os.close(fd)
    runtime = Runtime(start(tmp_path), config, None, board)  # type: ignore[arg-type]
    engine = choose(config, runtime)
    engine.close()
    board.close()
    assert type(engine).__name__ == "NvrxEngine"
    assert isinstance(choose(config, None), StandaloneEngine), "nobody restarts a plain script"


def test_a_rank_can_save_with_nvrx_and_restart_natively(tmp_path: Path) -> None:
    config = dataclasses.replace(Config(), engine=EngineSettings(checkpoint="nvrx"))
    assert isinstance(choose(config, cast(Runtime, FakeRuntime(tmp_path))), NativeEngine)
