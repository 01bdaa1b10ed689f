"""Every engine's restarter against the suite, in whole runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from keepstep.config import EngineSettings
from keepstep.testing.conformance import Result, require
from keepstep.testing.conformance.restarter import Runs, clauses, verify
from tests.conformance.documented import documented
from tests.helpers.needs import needs

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Engine:
    """An engine's restarter: ``flags`` choose it; ``differences`` as in the suite."""

    name: str
    flags: Sequence[str] = ()
    differences: Mapping[str, str] = field(default_factory=dict)


_SHORT = ("--set", "nvrx.soft_limit_s=3")
_NVRX = Engine(
    "nvrx",
    ("--engine", "nvrx", *_SHORT),
    documented(EngineSettings(name="nvrx"), clauses()),
)
_LAUNCHER = Engine(
    "nvrx-launcher",
    ("--set", "engine.launcher=nvrx", *_SHORT),
    documented(EngineSettings(launcher="nvrx"), clauses()),
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(Engine("native"), id="native"),
        pytest.param(_NVRX, id=_NVRX.name),
        pytest.param(_LAUNCHER, id=_LAUNCHER.name, marks=pytest.mark.full),
    ],
)
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """What became of each clause; a run serves several of them."""
    engine: Engine = request.param
    if engine.name != "native":
        needs("nvrx")
    runs = Runs(engine.flags, tmp_path_factory.mktemp(engine.name))
    return {one.name: one for one in verify(runs, engine.differences)}


@pytest.mark.parametrize("clause", [clause.name for clause in clauses()])
def test_the_restarter_keeps_the_clause(results: dict[str, Result], clause: str) -> None:
    require([results[clause]])
