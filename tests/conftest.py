"""Rules for every test: its level, what it needs from the machine, and that it leaves nothing.

Must not import torch: the unit level starts in a fraction of a second.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.helpers.leaks import MARK, Snapshot
from tests.helpers.needs import PRIVILEGED, Strictness, needs

_TESTS = Path(__file__).parent
_LEVELS = ("process", "training")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long matrices (marker full)")


def pytest_configure(config: pytest.Config) -> None:
    Strictness.no_skip = os.environ.pop("KEEPSTEP_NO_SKIP", "") not in ("", "0")
    # Settings of the person who runs the tests must not change what the tests see.
    for name in [name for name in os.environ if name.startswith("KEEPSTEP_")]:
        del os.environ[name]
    os.environ[MARK] = secrets.token_hex(8)
    # A busy machine is slow at random: no deadline. In CI the examples are the same each time.
    hypothesis.settings.register_profile(
        "keepstep", deadline=None, derandomize=bool(os.environ.get("CI"))
    )
    hypothesis.settings.load_profile("keepstep")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(_TESTS).parts[0] if item.path.is_relative_to(_TESTS) else ""
        if not any(item.get_closest_marker(level) for level in _LEVELS):
            item.add_marker(folder if folder in _LEVELS else "unit")
        wanted = {name for mark in item.iter_markers("needs") for name in mark.args}
        if wanted & PRIVILEGED:
            item.add_marker("root")
    if not config.getoption("--full"):
        full = [item for item in items if item.get_closest_marker("full")]
        if full:
            config.hook.pytest_deselected(items=full)
            items[:] = [item for item in items if not item.get_closest_marker("full")]


@pytest.fixture(autouse=True)
def _machine_has_what_is_needed(request: pytest.FixtureRequest) -> None:
    for mark in request.node.iter_markers("needs"):
        needs(*mark.args)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(_machine_has_what_is_needed: None) -> Iterator[None]:
    before = Snapshot.take(os.environ[MARK])
    yield
    leaks = before.leaks_since()
    if leaks:
        pytest.fail("the test left something behind:\n  " + "\n  ".join(leaks), pytrace=False)
