"""Scripts that know nothing of keepstep: environment, arguments, output, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.job import Job

_TELL = """
import json, os, sys
names = ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME"
    " ROLE_RANK ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT"
    " TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE"
    " KEEPSTEP_RUN_ID KEEPSTEP_RUN_DIR OMP_NUM_THREADS FROM_OUTSIDE").split()
told = {name: os.environ.get(name) for name in names}
print(json.dumps({**told, "argv": sys.argv, "name": __name__, "path": sys.path[0]}))
print("half a line", end="")
print("complaint", file=sys.stderr)
"""


def _told(job: Job, rank: int) -> dict[str, object]:
    return dict(json.loads(job.log(rank).splitlines()[0]))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_get_torchruns_environment_and_their_arguments(tmp_path: Path, method: str) -> None:
    with Job(
        tmp_path,
        _TELL,
        flags=["--start-method", method, "--max-restarts", "4", "--rdzv-id", "seven"],
        arguments=["-x", "--nproc-per-node", "9", "--", "two words"],
        environ={"FROM_OUTSIDE": "kept"},
    ) as job:
        assert job.wait() == 0
    told = [_told(job, rank) for rank in (0, 1)]
    for rank in (0, 1):
        assert (
            told[rank].items()
            >= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "ROLE_NAME": "default",
                "ROLE_RANK": str(rank),
                "ROLE_WORLD_SIZE": "2",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "4",
                "TORCHELASTIC_RUN_ID": "seven",
                "TORCHELASTIC_USE_AGENT_STORE": "False",
                "KEEPSTEP_RUN_ID": "seven",
                "KEEPSTEP_RUN_DIR": str(job.run_dir),
                "OMP_NUM_THREADS": "1",
                "FROM_OUTSIDE": "kept",
                "name": "__main__",
                "path": str(tmp_path),
            }.items()
        )
        assert told[rank]["argv"] == [
            "script.py",
            "-x",
            "--nproc-per-node",
            "9",
            "--",
            "two words",
        ]
    assert told[0]["MASTER_ADDR"]
    assert int(str(told[0]["MASTER_PORT"])) > 0
    assert told[0]["MASTER_PORT"] == told[1]["MASTER_PORT"]


def test_output_reaches_the_terminal_by_line_with_its_rank_and_stays_in_the_logs(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, _TELL) as job:
        assert job.wait() == 0
    plain = [line for line in job.out.splitlines() if "RANK" not in line]
    assert sorted(plain) == ["[rank 0] half a line", "[rank 1] half a line"]
    assert job.out.count('"RANK": "0"') == 1
    assert {line for line in job.err.splitlines() if line.startswith("[")} == {
        "[rank 0] complaint",
        "[rank 1] complaint",
    }
    assert "keepstep:" not in job.out
    assert "\x1b" not in job.err
    for rank in (0, 1):
        assert job.log(rank).endswith("half a line")
        assert job.log(rank, stream="stderr") == "complaint\n"
    assert {path.name for path in (job.run_dir / "logs").glob("*.log")} == {
        "rank-00000-000.stdout.log",
        "rank-00000-000.stderr.log",
        "rank-00001-000.stdout.log",
        "rank-00001-000.stderr.log",
        "coordinator.log",
        "lease.log",
        "writer.log",
        "zygote.log",
    }


def test_redirected_streams_and_filtered_ranks_stay_off_the_terminal(tmp_path: Path) -> None:
    with Job(
        tmp_path,
        _TELL,
        nproc=3,
        flags=["--redirects", "0:1,1:2", "--local-ranks-filter", "0,1", "--log-dir", "own"],
    ) as job:
        assert job.wait() == 0
    assert [line for line in job.err.splitlines() if "complaint" in line] == ["[rank 0] complaint"]
    assert "[rank 1] half a line" in job.out
    assert "[rank 0]" not in job.out
    assert "[rank 2]" not in job.out + job.err
    logs = [path for path in (tmp_path / "own").rglob("*.std*.log") if path.stat().st_size]
    assert len(logs) == 6


def test_a_module_runs_as_with_python_m(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tell.py").write_text(_TELL)
    with Job(tmp_path, flags=["-m"], arguments=["pack.tell", "one"], nproc=1) as job:
        assert job.wait() == 0
    told = _told(job, 0)
    assert told["argv"] == [str(package / "tell.py"), "one"]
    assert told["name"] == "__main__"
    assert "half a line" in job.out.splitlines()  # a job of one rank has no prefix


def test_a_program_needs_no_python_and_its_exit_code_counts(tmp_path: Path) -> None:
    with Job(
        tmp_path,
        flags=["--no-python"],
        arguments=["/bin/sh", "-c", 'echo "$RANK of $WORLD_SIZE: $0 $1"', "first", "second arg"],
    ) as job:
        assert job.wait() == 0
    assert sorted(job.out.splitlines()) == [
        "[rank 0] 0 of 2: first second arg",
        "[rank 1] 1 of 2: first second arg",
    ]


def test_a_program_has_no_heartbeat_and_is_never_called_hung(tmp_path: Path) -> None:
    flags = ["--no-python", "--set", "heartbeat.start_limit_s=1"]
    flags += ["--set", "heartbeat.min_limit_s=1"]
    command = 'test "$TORCHELASTIC_RESTART_COUNT" = 1 || exit 9; sleep 2.5; exit 0'
    with Job(tmp_path, flags=flags, arguments=["/bin/sh", "-c", command]) as job:
        assert job.wait() == 0
    assert [cause for cause, _, _ in job.causes()] == ["exit"]
    assert job.events("rank.suspect", "rank.hung") == []


def test_a_program_that_fails_each_time_ends_the_job_with_78(tmp_path: Path) -> None:
    with Job(tmp_path, flags=["--no-python"], arguments=["/bin/sh", "-c", "exit 9"]) as job:
        assert job.wait() == 78
    codes = {data["code"] for data in job.data("rank.exit") if not data.get("by_us")}
    assert codes == {9}


def test_a_script_that_fails_at_start_is_tried_once_more_in_fresh_processes_then_given_up(
    tmp_path: Path,
) -> None:
    script = """
    import os
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "1":
        raise KeyError("no such column")
    import time
    time.sleep(60)
    """
    with Job(tmp_path, script) as job:
        assert job.wait() == 78
    assert [cause[0::2] for cause in job.causes()] == [
        ("exception", "respawn"),
        ("exception", "stop"),
    ]
    assert [cause[1] for cause in job.causes()] == [1, 1]
    attempts = [job.log(0, number).split()[1:] for number in (0, 1)]
    assert [number for number, _ in attempts] == ["0", "1"]
    assert attempts[0][1] != attempts[1][1]  # a stale store cannot be met
    last = job.ending
    assert last.startswith("keepstep: the script fails in the same way in a fresh process: ")
    assert "no such column" in last
    assert "script.py:5" in last
    assert last.endswith("(exit code 78)")
    # Each attempt's own traceback, and nothing of keepstep's insides.
    assert job.err.count("Traceback (most recent call last):") == 2
    assert "src/keepstep" not in job.err
    assert "runpy" not in job.err


def test_an_exit_code_of_the_script_is_a_failure_that_names_the_code(tmp_path: Path) -> None:
    script = """
    import os, sys, time
    if os.environ["RANK"] == "0":
        sys.exit(3)
    time.sleep(60)
    """
    with Job(tmp_path, script) as job:
        assert job.wait() == 78
    assert job.causes() == [("exit", 0, "respawn"), ("exit", 0, "stop")]
    assert "exit code 3" in job.ending
    assert "Traceback" not in job.err


def test_a_killed_rank_of_a_plain_script_replaces_all_processes_and_the_job_goes_on(
    tmp_path: Path,
) -> None:
    script = """
    import os, signal, time
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(60)
    """
    with Job(tmp_path, script) as job:
        assert job.wait() == 0
    assert job.causes() == [("killed", 1, "respawn")]
    pids = [data["pid"] for data in job.data("rank.start")]
    assert len(set(pids)) == 4
    assert [data["code"] for data in job.data("rank.exit") if data.get("by_us")] == [-9]
    assert {path.name[5:14] for path in (job.run_dir / "logs").glob("rank-*")} == {
        "00000-000",
        "00001-000",
        "00000-001",
        "00001-001",
    }


def test_ranks_that_ended_well_are_started_again_with_the_others_after_a_failure(
    tmp_path: Path,
) -> None:
    script = """
    import os, sys, time
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("attempt", attempt, flush=True)
    if os.environ["RANK"] == "1" and attempt == "0":
        while not os.path.exists("rank-0-ended"):
            time.sleep(0.01)
        time.sleep(0.2)
        sys.exit(5)
    if os.environ["RANK"] == "0":
        open("rank-0-ended", "w").close()
    """
    with Job(tmp_path, script) as job:
        assert job.wait() == 0
    assert job.causes() == [("exit", 1, "respawn")]
    assert [job.log(rank, 1) for rank in (0, 1)] == ["attempt 1\n", "attempt 1\n"]
