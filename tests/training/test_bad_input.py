"""Checkpoints that belong elsewhere: one clear error, no restart loop, nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training.gated_run import Launch, tree


def checkpoints(root: Path) -> dict[str, int]:
    """Every file of checkpoints below ``root``; a note that a job was here is not one."""
    return {name: size for name, size in tree(root).items() if not name.startswith("leases/")}


def test_the_checkpoints_of_another_run_are_refused_by_name_and_stay_as_they_are(
    tmp_path: Path,
) -> None:
    (tmp_path / "other").mkdir()
    with Launch(tmp_path / "other", steps=6) as other:
        assert other.end() == 0, other.ending
    run = json.loads((other.run_dir / "run.json").read_text())["run"]
    before = checkpoints(other.checkpoints)
    flags = ["--set", f"checkpoint.dir={other.checkpoints}"]
    with Launch(tmp_path, flags=flags) as job:
        assert job.end() == 65
    assert f"holds checkpoints of run {run}" in job.ending
    assert "checkpoint.dir" in job.ending
    assert "Traceback" not in job.err
    assert job.events("step.end") == [] and job.events("round.ready") == []
    assert checkpoints(other.checkpoints) == before


@pytest.mark.parametrize(
    ("layers", "preset", "words"),
    [
        ("4", "tiny", ["12 missing", "model.blocks.3.norm_1.weight"]),
        ("2", "tiny", ["12 unexpected", "model.blocks.2.norm_1.weight"]),
        pytest.param(
            *("3", "small", ["36 missing", "model.blocks.3.norm_1.weight"]), marks=pytest.mark.full
        ),
    ],
)
def test_another_model_in_the_same_run_is_refused_naming_what_differs(
    tmp_path: Path, layers: str, preset: str, words: list[str], small_run: Launch
) -> None:
    before = checkpoints(small_run.checkpoints)
    with Launch(
        tmp_path,
        steps=12,
        environ={"LAYERS": layers},
        arguments=["--preset", preset],
        run_dir=small_run.run_dir,
    ) as job:
        assert job.end() == 65
    for word in words:
        assert word in job.ending
    assert len(job.events("round.ready")) == 1  # no second attempt
    assert [level for _, _, level in job.causes()] == ["stop"]
    assert job.events("step.end") == []
    assert "Traceback" not in job.err
    assert checkpoints(small_run.checkpoints) == before


def test_after_a_refusal_the_right_model_goes_on(tmp_path: Path, small_run: Launch) -> None:
    with Launch(tmp_path, steps=8, run_dir=small_run.run_dir) as job:
        assert job.end() == 0, job.ending
    assert job.resumes() == [6]
    assert job.commits() == [8]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """A finished run of 6 steps."""
    with Launch(tmp_path_factory.mktemp("small"), steps=6) as job:
        assert job.end() == 0, job.ending
    return job
