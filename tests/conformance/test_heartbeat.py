"""Every engine's heartbeat against the suite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from keepstep.testing.conformance import require
from keepstep.testing.conformance.heartbeat import Watched, clauses, verify
from tests.conformance import native


@dataclass(frozen=True)
class Engine:
    """An engine's heartbeat: ``make`` gets a folder; ``differences`` as in the suite."""

    name: str
    make: Callable[[Path], AbstractContextManager[Watched]]
    differences: Mapping[str, str] = field(default_factory=dict)


ENGINES = [Engine("native", native.heartbeat)]


@pytest.mark.parametrize("clause", [clause.name for clause in clauses()])
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_the_heartbeat_keeps_the_clause(engine: Engine, clause: str, tmp_path: Path) -> None:
    make = functools.partial(engine.make, tmp_path)
    differences = {name: why for name, why in engine.differences.items() if name == clause}
    require(verify(make, differences, only=[clause]))
