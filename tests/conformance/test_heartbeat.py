"""Every engine's heartbeat against the suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from keepstep.config import EngineSettings
from keepstep.testing.conformance import require
from keepstep.testing.conformance.heartbeat import Watched, clauses, verify
from tests.conformance import native
from tests.conformance.documented import documented
from tests.conformance.nvrx_heartbeat import COMBINED, LAUNCHER, Monitors
from tests.conformance.nvrx_heartbeat import heartbeat as nvrx_heartbeat
from tests.helpers.needs import needs

pytestmark = pytest.mark.process


@dataclass(frozen=True)
class Engine:
    """An engine's heartbeat: ``make`` gets a folder; ``differences`` as in the suite."""

    name: str
    make: Callable[[Path], AbstractContextManager[Watched]]
    differences: Mapping[str, str] = field(default_factory=dict)


CLAUSES = [clause.name for clause in clauses()]


def _keeps(engine: Engine, clause: str, folder: Path) -> None:
    differences = {name: why for name, why in engine.differences.items() if name == clause}
    require(verify(lambda: engine.make(folder), differences, only=[clause]))


@pytest.mark.parametrize("clause", CLAUSES)
def test_the_native_heartbeat_keeps_the_clause(clause: str, tmp_path: Path) -> None:
    _keeps(Engine("native", native.heartbeat), clause, tmp_path)


@pytest.fixture(scope="module")
def monitors() -> Iterator[Monitors]:
    """NVRx's rank monitors; a module's, since NVRx takes seconds to import."""
    needs("nvrx")
    made = Monitors()
    yield made
    made.close()


@pytest.mark.process
@pytest.mark.parametrize("clause", CLAUSES)
@pytest.mark.parametrize("settings", [COMBINED, LAUNCHER], ids=["in-process", "launcher-alone"])
def test_nvrxs_heartbeat_keeps_the_clause(
    settings: EngineSettings, clause: str, monitors: Monitors, tmp_path: Path
) -> None:
    engine = Engine(
        "nvrx",
        lambda folder: nvrx_heartbeat(settings, monitors, folder),
        documented(settings, clauses()),
    )
    _keeps(engine, clause, tmp_path)
