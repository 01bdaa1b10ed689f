"""Scripts with ``keepstep.restartable``: who is replaced, who is kept, who is blamed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.process.job import LOOP, SMALL_LIMITS, Job, finish_file

# Faults that the script does to itself, once in a run: in step 20 of the rank in its arguments.
_FAULTY = """
import ctypes, os, sys, time
import keepstep

finish, rank, mark = sys.argv[1:4]

def fault():
    FAULT

@keepstep.restartable
def main():
    step = 0
    while not os.path.exists(finish):
        keepstep.heartbeat()
        step += 1
        if step == 20 and os.environ["RANK"] == rank and not os.path.exists(mark):
            open(mark, "w").close()
            fault()
        time.sleep(0.01)
main()
"""
_EXCEPTION = "raise ValueError('a bad batch')"
_EXIT = "sys.exit(3)"
_SLEEP = "time.sleep(1000)"
# Holds the interpreter lock in a call that goes on after the signal that asks for the stack.
_LOCK = "ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)"
_SPIN = "exec('while True: pass')"


def _faulty(folder: Path, fault: str, rank: int, *, method: str = "fork", limit_s: int = 1) -> Job:
    return Job(
        folder,
        _FAULTY.replace("FAULT", fault),
        flags=[
            *SMALL_LIMITS,
            *("--set", f"heartbeat.min_limit_s={limit_s}"),
            *("--start-method", method),
        ],
        arguments=[str(finish_file(folder)), str(rank), str(folder / "mark")],
    )


def _finish(job: Job) -> None:
    finish_file(job.folder).touch()
    assert job.wait() == 0
    assert job.ending == "keepstep: every rank finished (exit code 0)"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_killed_ranks_are_replaced_one_after_the_other_and_the_others_keep_their_process(
    tmp_path: Path, method: str
) -> None:
    flags = ["--start-method", method]
    with Job(tmp_path, LOOP, nproc=3, flags=flags, arguments=[str(finish_file(tmp_path))]) as job:
        first = job.running(1, 3)
        os.kill(first[1], signal.SIGKILL)
        second = job.running(2, 3)
        os.kill(second[0], signal.SIGKILL)
        third = job.running(3, 3)
        _finish(job)
    assert second == [first[0], second[1], first[2]] and second[1] != first[1]
    assert third == [third[0], second[1], first[2]] and third[0] != first[0]
    assert job.causes() == [("killed", 1, "rank"), ("killed", 0, "rank")]
    starts = [(e.rank, e.data["incarnation"], e.data["method"]) for e in job.events("rank.start")]
    assert starts == [
        (0, 0, method),
        (1, 0, method),
        (2, 0, method),
        (1, 1, method),
        (0, 1, method),
    ]
    assert "rank 1" in next(line for line in job.err.splitlines() if "level rank" in line)


@pytest.mark.parametrize(("rank", "method"), [(0, "fork"), (1, "spawn")])
def test_after_an_exception_every_process_is_kept(tmp_path: Path, rank: int, method: str) -> None:
    with _faulty(tmp_path, _EXCEPTION, rank, method=method) as job:
        first = job.running()
        assert job.running(2) == first
        _finish(job)
    assert job.causes() == [("exception", rank, "rerun")]
    [failed] = job.data("rank.failed")
    assert failed["error"] == "ValueError: a bad batch"
    assert str(failed["location"]).endswith("script.py:8")
    assert "in fault" in str(job.data("restart.cause")[0]["stack"])
    assert job.err.count("Traceback") == 1
    assert "src/keepstep" not in job.err


@pytest.mark.parametrize(
    ("fault", "rank", "method", "limit_s", "evidence"),
    [
        pytest.param(_SLEEP, 0, "fork", 1, "makes no progress", id="sleep"),
        pytest.param(_SLEEP, 1, "spawn", 1, "makes no progress", id="sleep-spawned"),
        # A heartbeat that is less than two seconds old is no evidence, whatever the limit.
        pytest.param(_LOCK, 1, "fork", 3, "heartbeat is silent", id="lock-held"),
        pytest.param(_SPIN, 0, "fork", 1, "makes no progress", id="spin"),
    ],
)
def test_a_hung_rank_is_found_blamed_and_replaced(
    tmp_path: Path, fault: str, rank: int, method: str, limit_s: int, evidence: str
) -> None:
    with _faulty(tmp_path, fault, rank, method=method, limit_s=limit_s) as job:
        first = job.running()
        second = job.running(2)
        _finish(job)
    assert second[1 - rank] == first[1 - rank]
    assert second[rank] != first[rank]
    assert job.causes() == [("hang", rank, "rank")]
    [hung] = job.events("rank.hung")
    assert hung.rank == rank
    assert evidence in str(hung.data["evidence"])
    assert "in fault" in str(hung.data["stack"])
    assert [e.rank for e in job.events("rank.suspect")] == [rank]
    assert [e.rank for e in job.events("rank.exit") if e.data.get("by_us")] == [rank]


def test_a_rank_that_was_stopped_from_outside_is_found_and_replaced(tmp_path: Path) -> None:
    arguments = [str(finish_file(tmp_path))]
    with Job(tmp_path, LOOP, flags=SMALL_LIMITS, arguments=arguments) as job:
        first = job.running(1, step=20)
        os.kill(first[0], signal.SIGSTOP)
        second = job.running(2)
        _finish(job)
    assert second[1] == first[1]
    assert second[0] != first[0]
    assert job.causes() == [("hang", 0, "rank")]
    assert "SIGSTOP" in str(job.data("rank.hung")[0]["evidence"])


def test_a_hang_is_only_reported_where_that_is_asked_for(tmp_path: Path) -> None:
    arguments = [str(finish_file(tmp_path))]
    flags = [*SMALL_LIMITS, "--set", "heartbeat.on_hang=report"]
    with Job(tmp_path, LOOP, flags=flags, arguments=arguments) as job:
        pids = job.running(1, step=20)
        os.kill(pids[0], signal.SIGSTOP)
        job.until(lambda: job.events("rank.hung"), "the hang is reported")
        os.kill(pids[0], signal.SIGCONT)
        assert job.rank_pids() == pids
        _finish(job)
    assert job.causes() == []


def test_an_exit_in_the_middle_replaces_that_rank(tmp_path: Path) -> None:
    with _faulty(tmp_path, _EXIT, 1) as job:
        first = job.running()
        second = job.running(2)
        _finish(job)
    assert second[0] == first[0]
    assert second[1] != first[1]
    assert job.causes() == [("exit", 1, "rank")]
    assert "exit code 3" in str(job.data("restart.cause")[0]["line"])


def test_spares_that_die_are_nobodys_fault_and_a_rank_can_be_replaced_after_them(
    tmp_path: Path,
) -> None:
    arguments = [str(finish_file(tmp_path))]
    with Job(tmp_path, LOOP, arguments=arguments) as job:
        first = job.running()
        known = {*first, job.process.pid}
        names = ("coordinator", "rank.zygote", "checkpoint.writer", "checkpoint.lease_process")
        known |= {job.helper(name) for name in (*names, "agent.event_writer")}
        killed: set[int] = set()
        for _ in range(4):
            spares = job.until(lambda: set(job.pids()) - known - killed, "there is a spare")
            for pid in spares:
                os.kill(pid, signal.SIGKILL)
            killed.update(spares)
        job.until(lambda: not set(job.pids()) & killed, "the spares are gone")
        os.kill(first[0], signal.SIGKILL)
        second = job.running(2)
        _finish(job)
    assert second[1] == first[1]
    assert job.causes() == [("killed", 0, "rank")]


def test_two_ranks_killed_at_once_are_both_replaced_in_one_restart(tmp_path: Path) -> None:
    arguments = [str(finish_file(tmp_path))]
    with Job(tmp_path, LOOP, nproc=3, arguments=arguments) as job:
        first = job.running(1, 3)
        # Stopped first, so that the agent cannot see the one before the other.
        job.signal(signal.SIGSTOP)
        for rank in (0, 2):
            os.kill(first[rank], signal.SIGKILL)
        job.signal(signal.SIGCONT)
        second = job.running(2, 3)
        _finish(job)
    assert second[1] == first[1]
    assert not {second[0], second[2]} & set(first)
    assert [(cause, level) for cause, _, level in job.causes()] == [("killed", "rank")]


def test_a_second_kill_during_the_recovery_does_not_end_the_job(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
start = sys.argv[1] + "-recovery"
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
    if not os.path.exists(start):
        open(start, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
{LOOP}
"""
    arguments = [str(finish_file(tmp_path))]
    with Job(tmp_path, script, arguments=arguments) as job:
        first = job.running()
        os.kill(first[1], signal.SIGKILL)
        job.until(lambda: len(job.events("rank.exit")) == 2, "the successor is killed too")
        last = job.events("round.ready")[-1].round or 0
        job.until(lambda: len(job.events("round.ready")) == 2, "a new round begins")
        last = job.events("round.ready")[-1].round or 0
        after = job.running(last)
        _finish(job)
    assert after[0] == first[0]
    assert after[1] not in (first[1], job.data("rank.exit")[1]["pid"])
    assert {cause[0] for cause in job.causes()} == {"killed"}
    assert [data["code"] for data in job.data("rank.exit")] == [-9, -9, 0, 0]


def test_restarts_without_progress_end_the_job_with_76(tmp_path: Path) -> None:
    script = """
    import os, signal
    import keepstep

    @keepstep.restartable
    def main():
        for step in range(5):
            keepstep.heartbeat()
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
    main()
    """
    with Job(tmp_path, script, flags=["--set", "restart.max_without_progress=2"]) as job:
        assert job.wait() == 76
    assert job.causes() == [
        ("killed", 1, "rank"),
        ("killed", 1, "rank"),
        ("killed", 1, "stop"),
    ]
    last = job.ending
    assert "2 restarts in a row brought no new step" in last
    assert "rank 1" in last


def test_no_restart_is_made_where_none_is_allowed(tmp_path: Path) -> None:
    arguments = [str(finish_file(tmp_path))]
    with Job(tmp_path, LOOP, flags=["--max-restarts", "0"], arguments=arguments) as job:
        os.kill(job.running()[0], signal.SIGKILL)
        assert job.wait() == 76
    assert job.causes() == [("killed", 0, "stop")]


def test_an_exception_that_comes_again_in_a_fresh_process_ends_the_job_with_78(
    tmp_path: Path,
) -> None:
    script = """
    import os
    import keepstep

    @keepstep.restartable
    def main():
        for step in range(5):
            keepstep.heartbeat()
        if os.environ["RANK"] == "0":
            raise ZeroDivisionError("always")
    main()
    """
    with Job(tmp_path, script) as job:
        assert job.wait() == 78
    assert job.causes() == [
        ("exception", 0, "rerun"),
        ("exception", 0, "rank"),
        ("exception", 0, "stop"),
    ]
    assert "ZeroDivisionError: always" in job.ending


def test_twenty_kills_leave_the_agent_with_the_processes_and_descriptors_of_before(
    tmp_path: Path,
) -> None:
    arguments = [str(finish_file(tmp_path))]
    flags = ["--set", "restart.max_without_progress=100"]
    with Job(tmp_path, LOOP, flags=flags, arguments=arguments) as job:

        def now() -> tuple[int, int, int]:
            """Descriptors of agent and zygote, and processes."""
            agent, zygote = job.process.pid, job.helper("rank.zygote")
            return _descriptors(agent), _descriptors(zygote), len(job.pids())

        job.running(1, step=1)
        job.until(lambda: _ready_for_the_next(job), "the first spare is parked")
        first = now()
        for round in range(1, 21):
            os.kill(job.rank_pids()[round % 2], signal.SIGKILL)
            job.running(round + 1, step=1)
            job.until(lambda: _ready_for_the_next(job), f"the spare of round {round} is parked")
        job.until(
            lambda: all(count <= before for count, before in zip(now(), first, strict=True)),
            f"agent and zygote are back at {first} descriptors and processes",
        )
        assert job.listening() == []
        _finish(job)
    assert len(job.causes()) == 20


def _ready_for_the_next(job: Job) -> bool:
    """Whether there are two ranks and one spare beside agent, coordinator, zygote, writer, and the
    processes that hold the lease and write events."""
    parked = list((job.run_dir / "logs").glob("parked-*.stdout.log"))
    return len(parked) == 1 and len(job.pids()) == 9


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
