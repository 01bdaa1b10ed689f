"""Bad input: one clear line, the right exit code, nothing of ours in it, nothing made."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.job import LOOP, Job, finish_file

_FINE = 'print("ran")\n'


def _assert_refused(job: Job, code: int, *words: str) -> None:
    """One error line with these words; no rank ran, no traceback, no process."""
    assert job.wait() == code
    lines = job.err.splitlines()
    assert len(lines) == 1, job.err
    assert lines[0].startswith("keepstep: error: ")
    for word in words:
        assert word in lines[0]
    assert job.out == ""
    assert not any((job.run_dir / "logs").glob("rank-*"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--nproc-pre-node", "2"], ["--nproc-pre-node", "--nproc-per-node"]),
        (["--set", "heartbeat.min_limits_s=3"], ["heartbeat.min_limits_s", "min_limit_s"]),
        (["--set", "run.grace_s=soon"], ["run.grace_s", "soon"]),
        (["--nnodes", "2"], ["node"]),
        (["--nproc-per-node", "0"], ["--nproc-per-node", "0"]),
        (["--nproc-per-node", "many"], ["--nproc-per-node", "many"]),
        (["--fault", "kill@x:0"], ["kill@x:0"]),
        (["--fault", "kill@3:7"], ["kill@3:7"]),
        (["--start-method", "forkserver"], ["forkserver"]),
        (["--config", "absent.toml"], ["absent.toml"]),
    ],
)
def test_a_flag_or_setting_that_is_wrong_is_refused_with_64(
    tmp_path: Path, flags: list[str], words: list[str]
) -> None:
    with Job(tmp_path, _FINE, flags=flags) as job:
        _assert_refused(job, 64, *words)
    assert not job.run_dir.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.py"], ["absent.py", "does not exist"]),
        (["-m", "absent.module"], ["absent.module"]),
        (["--no-python", "absent-program"], ["absent-program"]),
        ([], ["no script"]),
    ],
)
def test_a_script_that_does_not_exist_is_refused_with_64(
    tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    with Job(tmp_path, arguments=arguments) as job:
        _assert_refused(job, 64, *words)
    assert not job.run_dir.exists()


def test_a_script_with_a_syntax_error_is_refused_with_78(tmp_path: Path) -> None:
    with Job(tmp_path, "def broken(:\n    pass\n") as job:
        _assert_refused(job, 78, "syntax error", "script.py, line 1")
    assert not job.run_dir.exists()


def test_a_port_in_use_is_refused_with_64(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        flags = ["--master-addr", "127.0.0.1", "--master-port", port]
        with Job(tmp_path, _FINE, flags=flags) as job:
            _assert_refused(job, 64, port)
    assert not job.run_dir.exists()


def test_a_checkpoint_folder_with_a_file_in_its_way_is_refused_with_65(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with Job(tmp_path, _FINE, flags=["--set", "checkpoint.dir=taken"]) as job:
        _assert_refused(job, 65, "checkpoints cannot be written", str(tmp_path / "taken"))
    assert (tmp_path / "taken").read_text() == "mine"


@contextlib.contextmanager
def _read_only(folder: Path) -> Iterator[None]:
    """A folder mounted read-only on itself: rights do not stop root."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.needs("root")
def test_a_checkpoint_folder_that_is_read_only_is_refused_with_65(tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    folder.mkdir()
    job = Job(tmp_path, _FINE, flags=["--set", "checkpoint.dir=storage"])
    with _read_only(folder), job:
        _assert_refused(job, 65, str(folder), "Read-only file system")


def test_the_folder_of_another_run_is_refused_with_64_and_stays_as_it_was(tmp_path: Path) -> None:
    with Job(tmp_path, _FINE, flags=["--rdzv-id", "first"]) as job:
        assert job.wait() == 0
    before = {path: path.stat().st_mtime_ns for path in job.run_dir.rglob("*")}
    with Job(tmp_path, _FINE, flags=["--rdzv-id", "second"]) as job:
        assert job.wait() == 64
        assert "first" in job.err and "second" in job.err
        assert len(job.err.splitlines()) == 1
    assert {path: path.stat().st_mtime_ns for path in job.run_dir.rglob("*")} == before


def test_a_second_agent_on_a_run_folder_in_use_is_refused_and_the_first_is_not_disturbed(
    tmp_path: Path,
) -> None:
    finish = str(finish_file(tmp_path))
    with Job(tmp_path, LOOP, arguments=[finish]) as first:
        pids = first.running()
        files = {path for path in first.run_dir.rglob("*") if path.suffix in (".log", ".jsonl")}
        second = Job(tmp_path / "second", LOOP, arguments=[finish], run_dir=first.run_dir)
        with second:
            assert second.wait() == 64
            assert len(second.err.splitlines()) == 1
            assert "another keepstep run uses the run folder" in second.err
        after = {path for path in first.run_dir.rglob("*") if path.suffix in (".log", ".jsonl")}
        assert after == files
        assert first.rank_pids() == pids
        finish_file(tmp_path).touch()
        assert first.wait() == 0
    assert first.causes() == []


def test_bad_flags_are_told_before_anything_is_started_even_with_many_mistakes(
    tmp_path: Path,
) -> None:
    flags = ["--set", "run.grace_s=-1", "--set", "checkpoint.keep_last=0"]
    with Job(tmp_path, _FINE, flags=flags) as job:
        assert job.wait() == 64
    assert "run.grace_s" in job.err and "checkpoint.keep_last" in job.err
    assert "Traceback" not in job.err
    assert not job.run_dir.exists()
    assert sorted(os.listdir(tmp_path)) == ["err", "out", "script.py"]


def test_a_module_to_preload_that_does_not_exist_is_refused_with_64(tmp_path: Path) -> None:
    with Job(tmp_path, _FINE, flags=["--set", "rank.preload=no_such_module"]) as job:
        assert job.wait() == 64
    assert "preloading failed: No module named 'no_such_module'; set rank.preload" in job.ending
    assert "Traceback" not in job.err
    assert job.out == ""


def test_an_interpreter_that_cannot_start_ranks_ends_the_job_with_70_instead_of_a_loop(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'keepstep.rank.bootstrap' in sys.orig_argv:\n"
        "    sys.stderr.write('no such device\\n')\n"
        "    os._exit(9)\n"
    )
    flags = ["--start-method", "spawn"]
    with Job(tmp_path, _FINE, flags=flags, environ={"PYTHONPATH": str(tmp_path)}) as job:
        assert job.wait() == 70
    assert "parked processes end before they are used; see " in job.ending
    assert str(job.run_dir / "logs" / "parked-*.stderr.log") in job.ending
    said = [path.read_text() for path in (job.run_dir / "logs").glob("parked-*.stderr.log")]
    assert set(said) == {"no such device\n"}
