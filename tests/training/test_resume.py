"""A run that is launched again in the same folder goes on where it was, to the same weights."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.training.gated_run import Launch, flip, tree, undisturbed


def test_a_run_whose_agent_is_killed_goes_on_to_the_undisturbed_weights_twice_in_a_row(
    tmp_path: Path,
) -> None:
    for name, resume, stop in (("first", 0, 8), ("second", 5, 22)):
        with Launch(tmp_path, name, closed=[f"step-{stop}"]) as job:
            job.at(f"step-{stop}")
            job.committed_is(stop // 5 * 5)
            job.signal(signal.SIGKILL)
        # Leaving the block asserts that no process and no shared memory is left.
        assert job.resumes() == [resume]
        job.open(f"step-{stop}")
    with Launch(tmp_path, "third") as job:
        assert job.end() == 0, job.ending
    assert job.resumes() == [20]
    assert job.commits() == [25, 30]
    assert (job.digest, job.record()) == undisturbed()


def test_more_steps_go_on_from_the_end_and_as_many_steps_do_nothing(tmp_path: Path) -> None:
    with Launch(tmp_path, "first", steps=7) as job:
        assert job.end() == 0, job.ending
    assert job.commits() == [5, 7]
    with Launch(tmp_path, "again", steps=7) as again:
        assert again.end() == 0, again.ending
    assert again.resumes() == [7]
    assert again.commits() == [] and again.events("step.end") == []
    assert again.digest == job.digest
    with Launch(tmp_path, "longer", steps=12) as longer:
        assert longer.end() == 0, longer.ending
    assert longer.resumes() == [7]
    assert longer.commits() == [10, 12]
    assert sorted({event.step or 0 for event in longer.events("step.end")}) == [8, 9, 10, 11, 12]


def test_data_rates_and_random_numbers_of_each_step_are_the_same_after_faults(
    tmp_path: Path,
) -> None:
    with Launch(tmp_path, faults=["kill@8:1", "exception@13:0", "exit@21:0"]) as job:
        assert job.end() == 0, job.ending
    assert job.resumes() == [0, 5, 10, 20]
    assert (job.digest, job.record()) == undisturbed()


def test_another_run_starts_from_the_newest_good_checkpoint_of_this_one(tmp_path: Path) -> None:
    with Launch(tmp_path, "first", steps=12) as first:
        assert first.end() == 0, first.ending
    flip(first.checkpoints, 12)
    before = tree(first.run_dir)
    flags = ["--set", f"checkpoint.resume_from={first.run_dir}"]
    run_dir = tmp_path / "another"
    with Launch(tmp_path, "second", steps=17, flags=flags, run_dir=run_dir) as job:
        assert job.end() == 0, job.ending
    # The newest is damaged, which a rank finds while it loads: the next round takes an older one.
    assert job.resumes() == [12, 10]
    assert job.refused() == [str(first.checkpoints / "step-00000012")]
    assert job.said("resuming after step 10 from", str(first.checkpoints / "step-00000010")) == 1
    assert job.commits() == [15, 17]
    assert sorted({event.step or 0 for event in job.events("step.end")}) == list(range(11, 18))
    assert tree(first.run_dir) == before
    with Launch(tmp_path, "third", steps=18, flags=flags, run_dir=run_dir) as own:
        assert own.end() == 0, own.ending
    assert own.resumes() == [17]
