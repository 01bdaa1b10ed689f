"""A run on storage whose rated speed is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.gated_run import Launch

pytestmark = pytest.mark.training


def test_the_first_save_says_how_long_saves_take_and_that_they_come_too_often(
    tmp_path: Path,
) -> None:
    with Launch(tmp_path, steps=20, flags=["--set", "checkpoint.rated_mb_s=0.001"]) as job:
        assert job.end() == 0, job.ending
    (rated,) = job.data("storage.rated")
    assert rated["mb_s"] == 0.001
    nbytes = rated["bytes"]
    assert isinstance(nbytes, int) and nbytes > 10**6
    assert rated["save_s"] == pytest.approx(nbytes / 1000, rel=1e-3)
    assert job.said("a checkpoint of", "at the rated 0.001 MB/s", "checkpoint.rated_mb_s") == 1
    assert job.said("warning: a checkpoint is due every 5 steps") == 1
