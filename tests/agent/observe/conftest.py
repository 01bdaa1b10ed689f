"""Fixtures of tests of the observer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.agent.observe.watched_rounds import Run, config_of


@pytest.fixture
def run() -> Iterator[Run]:
    """In round 1, after step 7; NVRx restarts in the processes."""
    made = Run(config_of())
    made.start()
    made.join(1)
    made.step(1, 7)
    yield made
    made.close()
