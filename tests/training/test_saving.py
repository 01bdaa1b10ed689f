"""Saves that storage holds up, that outlive every rank, that find no memory; what goes between
ranks for one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import keepstep
from keepstep.checkpoint import catalog
from keepstep.faults.cgroup import Limited
from keepstep.goodput.report import build
from tests.process.job import wait_until
from tests.training.gated_run import Launch, undisturbed

HERE = Path(__file__).parent
LIMIT_S = 100
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SKIPPING = ("--set", "checkpoint.when_busy=skip")


def _environ() -> dict[str, str]:
    source = str(Path(keepstep.__file__).parents[1])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def test_a_save_that_is_due_while_both_slots_are_in_use_is_skipped_by_all_ranks_and_shown(
    tmp_path: Path,
) -> None:
    with Launch(tmp_path, closed=["step-8", "step-22"], flags=SKIPPING) as job:
        job.at("step-8")
        job.committed_is(5)
        writer = job.helper("checkpoint.writer_process")
        os.kill(writer, signal.SIGSTOP)
        job.open("step-8")
        job.at("step-22")  # steps 10 and 15 are staged, 20 found no slot
        os.kill(writer, signal.SIGCONT)
        for step in (10, 15):  # written at the same time, and committed in any order
            job.committed_is(step)
        job.open("step-22")
        assert job.end() == 0, job.ending
    assert sorted(job.commits()) == [5, 10, 15, 25, 30]
    (skip,) = job.events("checkpoint.skip")
    assert (skip.step, skip.src) == (20, "coordinator")
    assert "2 saves are still being written, the oldest (step 10)" in str(skip.data["reason"])
    assert job.said("checkpoint of step 20 was skipped", "2 saves") == 1
    assert job.digest == undisturbed()[0]
    checkpoints = build(job.run_dir).checkpoints
    assert (checkpoints.committed, checkpoints.skipped, checkpoints.failed) == (5, 1, 0)
    staging = job.events("checkpoint.memory")
    assert sorted(event.rank or 0 for event in staging) == [0, 1]
    assert job.said("staging of saves", "2 ranks", "were available") == 1


def test_a_restart_in_between_forgets_what_was_answered_and_all_ranks_go_on_alike(
    tmp_path: Path,
) -> None:
    faults = ["kill@22:1"]
    with Launch(tmp_path, closed=["step-8", "step-22"], flags=SKIPPING, faults=faults) as job:
        job.at("step-8")
        job.committed_is(5)
        writer = job.helper("checkpoint.writer_process")
        os.kill(writer, signal.SIGSTOP)
        job.open("step-8")
        job.at("step-22")
        os.kill(writer, signal.SIGCONT)
        for step in (10, 15):  # written at the same time, and committed in any order
            job.committed_is(step)
        job.open("step-22")
        assert job.end() == 0, job.ending
    assert job.resumes() == [0, 15]
    assert sorted(job.commits()) == [5, 10, 15, 20, 25, 30], "step 20 is saved this time"
    assert [event.step for event in job.events("checkpoint.skip")] == [20]
    assert job.digest == undisturbed()[0]


def test_a_save_in_flight_is_committed_after_every_rank_was_killed(tmp_path: Path) -> None:
    flags = ["--set", "restart.save_wait_s=60"]
    with Launch(tmp_path, closed=["step-8", "step-12"], flags=flags) as job:
        job.at("step-8")
        job.committed_is(5)
        writer = job.helper("checkpoint.writer_process")
        os.kill(writer, signal.SIGSTOP)
        job.open("step-8")
        job.at("step-12")  # step 10 is staged
        (ready,) = job.data("round.ready")
        pids = ready["pids"]
        assert isinstance(pids, dict) and len(pids) == 2
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        job.until(lambda: len(job.events("rank.exit")) >= 2, "both are gone")
        os.kill(writer, signal.SIGCONT)
        job.open("step-12")
        assert job.end() == 0, job.ending
    assert job.resumes() == [0, 10]
    assert job.commits() == [5, 10, 15, 20, 25, 30]
    assert job.digest == undisturbed()[0]


def test_without_launcher_too_a_save_in_flight_is_committed_after_every_rank_was_killed(
    tmp_path: Path,
) -> None:
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run(
            [sys.executable, *TORCHRUN, HERE / "killed_saves.py", tmp_path],
            stdout=out,
            stderr=out,
            timeout=LIMIT_S,
            env=_environ(),
        )
    assert done.returncode != 0
    said = (tmp_path / "out").read_text()
    assert "Signal 9 (SIGKILL)" in said, said
    writers = [psutil.Process(int((tmp_path / f"writer-{rank}").read_text())) for rank in (0, 1)]
    saved = tmp_path / "saved"
    assert [info.step for info in catalog.committed(saved)] == [1]
    for writer in writers:
        writer.resume()
    for writer in writers:
        writer.wait(LIMIT_S)
    assert [info.step for info in catalog.committed(saved)] == [2, 1]


def test_no_collective_of_a_save_carries_tensor_data(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *TORCHRUN, HERE / "recorded_saves.py", tmp_path / "saved"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=_environ(),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(text) for text in re.findall(r"recorded (\{.*\})", done.stdout)]
    assert len(found) == 2
    for seen in found:
        assert max(size for _, size in seen["train"]) > 10_000, "the recorder sees tensors"
        assert 0 < len(seen["save"]) < 60
        assert max(size for _, size in seen["save"]) < 700, seen["save"]
        assert "close" not in seen, "nobody may have to wait for others there"


# --- memory ---------------------------------------------------------------------------------------

_LARGE = """
import time, torch, keepstep

def main(job):
    job.track(weights=torch.ones(100 << 20))  # 400 MiB
    for step in job.steps(2000):
        print("step", step, flush=True)
        time.sleep(0.01)

keepstep.run(main, settings={"checkpoint.every_steps": 2000})
"""


@contextlib.contextmanager
def _limited(limit_bytes: int) -> Iterator[Limited]:
    group = Limited(f"keepstep-test-{os.getpid()}", limit_bytes)
    group.create()
    try:
        yield group
    finally:
        wait_until(group.remove, "the memory cgroup is empty")


@pytest.mark.needs("root", "cgroup_memory")
def test_a_memory_limit_too_small_for_a_copy_is_an_error_in_numbers_and_no_kill(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(_LARGE))
    entry = "import sys; from keepstep.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", entry, "run", "--nproc-per-node", "1"]
    command += ["--run-dir", str(tmp_path / "run"), "script.py"]
    with _limited(900 << 20) as group:
        procs = group.path / "cgroup.procs"
        done = subprocess.run(
            ["sh", "-c", f'echo $$ > "{procs}" && exec "$@"', "sh", *command],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            cwd=tmp_path,
            env=_environ(),
        )
        assert group.oom_kills() == 0
    assert done.returncode == 64, done.stderr[-3000:]
    needs = r"saving needs 4(19|20)\.\d MB of memory for a copy of each rank's shard"
    assert re.search(needs, done.stderr)
    assert "limit 943.7 MB" in done.stderr and group.path.name in done.stderr
    assert "raise the container's memory limit" in done.stderr.lower()
    assert "a restart cannot help" in done.stderr
    steps = re.findall(r"step (\d+)", done.stdout)
    assert steps.count("1") == 1 and int(steps[-1]) < 2000, "found soon after the first step"
