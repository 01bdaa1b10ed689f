"""What an engine is known not to keep, as a suite wants to be told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from keepstep.config import EngineSettings
from keepstep.policy.differences import differences
from keepstep.testing.conformance import Clause

S = TypeVar("S")


def documented(engine: EngineSettings, clauses: Sequence[Clause[S]]) -> dict[str, str]:
    """What is printed when ``engine`` is chosen, where ``clauses`` can check it."""
    names = {clause.name for clause in clauses}
    return {one.clause: one.text for one in differences(engine.parts) if one.clause in names}
