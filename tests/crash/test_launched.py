"""``keepstep run`` whose writer or coordinator is killed at a system call of a save."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from keepstep.checkpoint import layout
from tests.crash.tracing import Point, Strace
from tests.training.gated_run import Launch, keepstep, undisturbed

pytestmark = [pytest.mark.training, pytest.mark.full, pytest.mark.needs("strace")]

_NEXT = 10
"""The step whose save is struck; the one before is committed."""


def _struck(job: Launch, module: str, point: Point, log: Path) -> Strace:
    """The helper ``module`` of a job that stands in step 8 is killed when it comes to ``point``."""
    job.at("step-8")
    job.committed_is(_NEXT - 5)
    strace = Strace(job.helper(module), log, strike=point.kill())
    job.open("step-8")
    return strace


def _is_clean(root: Path) -> bool:
    """Whether all folders are committed, and none has an unfinished file."""
    return keepstep("checkpoint", "verify", root).returncode == 0 and not [
        path
        for path in root.rglob("*")
        if layout.is_temporary_name(path.name)
        or (layout.parse_folder(path.name) and not layout.is_published(path / layout.MANIFEST))
    ]


@pytest.mark.parametrize(
    "point",
    [
        Point("mkdir", 1),
        Point("pwrite64", 1),
        Point("fsync", 1),
        Point("rename", 1),
        Point("link", 1),
        Point("link", 2),
        Point("unlink", 1),
        Point("sendto", 1),
    ],
    ids=str,
)
def test_a_writer_killed_in_a_save_costs_no_step(tmp_path: Path, point: Point) -> None:
    with Launch(tmp_path, closed=["step-8"]) as job:
        strace = _struck(job, "checkpoint.writer_process", point, tmp_path / "log")
        try:
            assert job.end() == 0, job.ending
        finally:
            strace.detach()
        assert job.said("writer", "signal 9") == 1
    assert job.commits() == [5, 10, 15, 20, 25, 30]
    assert job.causes() == []
    assert job.digest == undisturbed()[0]
    assert _is_clean(job.checkpoints)


@pytest.mark.parametrize(
    "point",
    [Point("fsync", 1), Point("link", 1), Point("unlink", 1), Point("fsync", 3)],
    ids=str,
)
def test_a_coordinator_killed_in_a_commit_leaves_the_old_step_or_the_new(
    tmp_path: Path, point: Point
) -> None:
    with Launch(tmp_path, closed=["step-8"]) as job:
        strace = _struck(job, "coordinator", point, tmp_path / "log")
        try:
            code = job.end()
        finally:
            strace.detach()
    if code:
        with Launch(tmp_path, "second") as job:
            assert job.end() == 0, job.ending
        assert job.resumes() in ([5], [10])
    assert signal.SIGKILL.name in (tmp_path / "log").read_text()
    assert job.digest == undisturbed()[0]
    assert _is_clean(job.checkpoints)
