"""Damaged, full and frozen storage: an older checkpoint is taken, nothing good is lost."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from keepstep.checkpoint import layout
from keepstep.goodput.report import build, to_json
from tests.training.gated_run import Launch, flip, keepstep, tree, undisturbed


def _killed_at(tmp_path: Path, stop: int, name: str = "first") -> Launch:
    """A run of which the agent was killed in step ``stop``; the newest checkpoint is committed."""
    gate = f"step-{stop}"
    with Launch(tmp_path, name, closed=[gate]) as job:
        job.at(gate)
        job.committed_is((stop - 1) // 5 * 5)
        job.signal(signal.SIGKILL)
    job.open(gate)
    return job


def test_a_flipped_bit_and_a_manifest_cut_in_half_make_the_next_launch_take_older_ones(
    tmp_path: Path,
) -> None:
    killed = _killed_at(tmp_path, 18)
    root = killed.checkpoints
    manifest = root / "step-00000015" / layout.MANIFEST
    manifest.write_bytes(manifest.read_bytes()[: manifest.stat().st_size // 2])
    flip(root, 10, rank=1)
    # A save that was cut off, newer than all: without manifest, even whole, it is not there.
    shutil.copytree(root / "step-00000005", root / "step-00000020")
    (root / "step-00000020" / layout.MANIFEST).unlink()

    found = keepstep("checkpoint", "verify", killed.run_dir)
    assert found.returncode == 1
    assert "step-00000005: good" in found.stdout
    assert "step-00000010: BAD" in found.stdout and "rank-00001.safetensors" in found.stdout
    assert "step-00000015: BAD" in found.stdout
    listed = keepstep("checkpoint", "ls", killed.run_dir).stdout
    assert "step-00000015 is damaged and never used for a restore" in listed
    assert re.search(r"^20 +unfinished .* step-00000020$", listed, re.MULTILINE)

    with Launch(tmp_path, "second") as job:
        assert job.end() == 0, job.ending
    assert job.resumes() == [10, 5]
    assert job.refused() == ["step-00000015", "step-00000010"]
    assert job.said("step-00000015", "not usable") == 1
    assert job.said("checkpoint step-00000010 is not usable", "differ from what was committed") == 1
    assert job.said("step-00000020") == 0
    assert job.commits() == [10, 15, 20, 25, 30]
    assert job.digest == undisturbed()[0]
    assert keepstep("checkpoint", "verify", job.run_dir, "--step", "30").returncode == 0


def test_if_all_checkpoints_are_damaged_the_run_ends_with_65_and_nothing_is_deleted(
    tmp_path: Path,
) -> None:
    killed = _killed_at(tmp_path, 12)
    for step in (5, 10):
        flip(killed.checkpoints, step)
    before = tree(killed.checkpoints)
    for name in ("second", "third"):
        with Launch(tmp_path, name) as job:
            assert job.end() == 65
        # No rank has gone on from step 5 before, so step 10 is not abandoned: both are tried again.
        assert job.refused() == ["step-00000010", "step-00000005"]
        assert "Traceback" not in job.err
        assert "none of 2 checkpoints" in job.ending
        assert "Nothing was deleted" in job.ending and "checkpoint verify" in job.ending
        assert job.events("step.end") == []
        after = tree(killed.checkpoints)
        assert {name: after.get(name) for name in before} == before
        assert all(name.startswith("leases/") for name in after.keys() - before.keys())


def test_a_checkpoint_damaged_while_training_costs_exactly_one_more(tmp_path: Path) -> None:
    with Launch(tmp_path, closed=["step-17"], faults=["kill@17:1"]) as job:
        job.at("step-17")
        job.committed_is(15)
        flip(job.checkpoints, 15)
        job.open("step-17")
        assert job.end() == 0, job.ending
    assert job.resumes() == [0, 15, 10]
    assert job.refused() == ["step-00000015"]
    assert job.digest == undisturbed()[0]
    faults = to_json(build(job.run_dir))["faults"]
    assert isinstance(faults, list)
    # Steps 16 and 17 for the kill, and 11 to 15 again for the damage.
    lost = [(fault["kind"], fault["steps_lost"]) for fault in faults]
    assert lost == [("kill", 2), ("checkpoint", 5)]
    # Step 15 was saved again, beside the damaged one.
    folders = [str(data["folder"]) for data in job.data("checkpoint.commit")]
    again = [name for name in folders if name.startswith("step-00000015")]
    assert len(set(again)) == 2


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    with Launch(tmp_path, steps=17, flags=["--set", "checkpoint.keep_last=2"]) as job:
        assert job.end() == 0, job.ending
    assert job.commits() == [5, 10, 15, 17]
    assert layout.list_folders(job.checkpoints) == ["step-00000015", "step-00000017"]
    assert keepstep("checkpoint", "verify", job.run_dir).returncode == 0


def test_the_last_step_is_not_saved_if_that_is_not_wanted(tmp_path: Path) -> None:
    with Launch(tmp_path, steps=7, flags=["--set", "checkpoint.at_end=false"]) as job:
        assert job.end() == 0, job.ending
    assert job.commits() == [5]


@pytest.mark.needs("root")
def test_a_full_disk_is_told_and_ends_the_run_with_65_only_after_max_failures(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", disk], check=True)
    try:
        flags = ["--set", f"checkpoint.dir={disk}/checkpoints"]
        flags += ["--set", "checkpoint.max_failures=2"]
        with Launch(tmp_path, flags=flags) as job:
            assert job.end() == 65
        assert job.commits() == [5]
        failed = [event.step for event in job.events("checkpoint.fail")]
        assert failed == [10, 15, 20]
        assert job.said("No space left on device") >= 3
        assert "3 saves in a row failed" in job.ending and "No space left on device" in job.ending
        # Training went on: nobody was restarted, and later steps were completed.
        assert job.causes() == []
        assert {event.step for event in job.events("step.end")} >= set(range(1, 20))
        assert keepstep("checkpoint", "verify", disk / "checkpoints").returncode == 0
        subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
        with Launch(tmp_path, "second", flags=flags) as again:
            assert again.end() == 0, again.ending
        assert again.resumes() == [5]
        assert again.digest == undisturbed()[0]
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.full
@pytest.mark.needs("root", "loop_mount")
def test_training_goes_on_while_storage_is_frozen_and_all_is_committed_after(
    tmp_path: Path,
) -> None:
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    try:
        # What the script itself prints goes elsewhere: keepstep does not stand between it and that.
        flags = ["--log-dir", str(tmp_path / "logs")]
        gates = ["step-7", "step-17"]
        with Launch(tmp_path, flags=flags, closed=gates, run_dir=disk / "run") as job:
            job.at("step-7")
            job.committed_is(5)
            subprocess.run(["fsfreeze", "-f", disk], check=True)
            try:
                job.open("step-7")
                job.at("step-17")
                assert job.commits() == [5]
            finally:
                subprocess.run(["fsfreeze", "-u", disk], check=True)
            job.open("step-17")
            assert job.end() == 0, job.ending
        assert job.commits() == [5, 10, 15, 20, 25, 30]
        assert job.causes() == []
        assert sorted({event.step or 0 for event in job.events("step.end")}) == list(range(1, 31))
        assert job.digest == undisturbed()[0]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_writer_that_is_killed_in_a_save_is_replaced_and_no_save_is_lost(
    tmp_path: Path,
) -> None:
    with Launch(tmp_path, closed=["step-8", "step-12"]) as job:
        job.at("step-8")
        job.committed_is(5)
        writer = job.helper("checkpoint.writer_process")
        os.kill(writer, signal.SIGSTOP)
        job.open("step-8")
        job.at("step-12")  # step 10 is staged
        os.kill(writer, signal.SIGKILL)
        job.committed_is(10)
        job.open("step-12")
        assert job.end() == 0, job.ending
    assert job.commits() == [5, 10, 15, 20, 25, 30]
    assert job.causes() == []
    assert job.said("writer", "signal 9", "2 unfinished shards") == 1
    assert job.digest == undisturbed()[0]


def test_writers_that_end_one_after_the_other_end_the_run_with_70(tmp_path: Path) -> None:
    with Launch(tmp_path, closed=["step-2"]) as job:
        job.at("step-2")
        for number in range(1, 5):
            os.kill(job.helper("checkpoint.writer_process"), signal.SIGKILL)
            if number < 4:
                job.until(lambda: job.said("another one takes over") == number, "it is replaced")  # noqa: B023
        assert job.end() == 70
    assert "the writer process ended before the job did" in job.ending
    assert "writer.log" in job.ending
