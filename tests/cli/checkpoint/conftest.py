from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.shards import make_version, save, write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with the checkpoints 5 and 10, and 15 unfinished."""
    root = tmp_path / "checkpoints"
    for step in (5, 10):
        save(root, make_version(step, term=1, round=step))
    write(root, make_version(15), 0)
    return tmp_path
