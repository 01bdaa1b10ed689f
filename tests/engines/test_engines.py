"""Which engine is chosen."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

import pytest

from keepstep.config import Config, EngineSettings
from keepstep.engines import choose
from keepstep.engines.native import NativeEngine
from keepstep.engines.standalone import StandaloneEngine
from keepstep.errors import EngineUnavailable
from keepstep.rank.runtime import Runtime
from tests.engines.fakes import FakeRuntime


def test_a_plain_script_gets_the_engine_without_launcher() -> None:
    assert isinstance(choose(Config(), None), StandaloneEngine)


def test_a_rank_of_the_launcher_gets_the_native_engine(tmp_path: Path) -> None:
    runtime = cast(Runtime, FakeRuntime(tmp_path))
    assert isinstance(choose(Config(), runtime), NativeEngine)


def test_an_engine_that_is_not_there_is_refused_with_its_name() -> None:
    config = dataclasses.replace(Config(), engine=EngineSettings(name="nvrx"))
    with pytest.raises(EngineUnavailable, match='"nvrx"') as found:
        choose(config, None)
    assert found.value.exit_code == 64
