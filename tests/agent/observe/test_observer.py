"""``keepstep run`` over another launcher: real processes, a launcher and ranks without torch."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepstep.goodput.report import build, to_json
from tests.agent.observe.watched import IN_PROCESS, LAUNCHER_ONLY, Watched
from tests.process.job import LOOP, lives, wait_until

pytestmark = pytest.mark.process


def _report(job: Watched) -> dict[str, Any]:
    """The report; it is right in itself."""
    report: dict[str, Any] = to_json(build(job.run_dir))
    assert sum(report["categories"].values()) == pytest.approx(report["wall_s"], abs=1e-6)
    assert report["engine"] == "nvrx"
    return report


def _exits(job: Watched) -> dict[tuple[int | None, object], tuple[object, bool]]:
    """By rank and incarnation: exit code, and whether somebody ended it on purpose."""
    return {
        (one.rank, one.data["incarnation"]): (one.data["code"], bool(one.data.get("by_us")))
        for one in job.events("rank.exit")
        if one.data.get("seen", True)
    }


def _readies(job: Watched) -> list[tuple[int | None, object]]:
    """Round and the step it went on from."""
    return [(one.round, one.data["resume"]) for one in job.events("round.ready")]


def _launcher(job: Watched) -> psutil.Process:
    def look() -> list[psutil.Process]:
        children = psutil.Process(job.process.pid).children(recursive=True)
        return [one for one in children if "tests.agent.observe.fake_launcher" in one.cmdline()]

    return job.until(look, "the launcher is there")[-1]


# --- the run goes well ---------------------------------------------------------------------------


def test_a_run_without_faults_ends_with_0_and_is_written_down_as_natively(tmp_path: Path) -> None:
    with Watched(tmp_path, ["20"]) as job:
        assert job.wait() == 0
        assert job.ending == "keepstep: every rank finished (exit code 0)"
        assert _readies(job) == [(1, 0)]
        assert job.steps(1) == {0: 20, 1: 20}
        starts = job.events("rank.start")
        assert {(one.rank, one.data["method"]) for one in starts} == {(0, "exec"), (1, "exec")}
        assert job.data("run.begin")[0]["engine"] == "nvrx"
        report = _report(job)
    assert report["faults"] == []
    assert report["checkpoints"]["last_step"] == 20
    assert [one["rank"] for one in report["heartbeats"]] == [0, 1]
    assert "[rank 1] rank ends with 0" in job.out
    assert "checkpoint" in job.err


def test_each_process_has_an_event_file_and_logs_of_its_own(tmp_path: Path) -> None:
    with Watched(tmp_path, ["12", "kill@7:1"]) as job:
        assert job.wait() == 0
        names = [path.name.split("-") for path in (job.run_dir / "events").glob("rank-*.jsonl")]
        assert sorted(name[1] for name in names) == ["00000", "00000", "00001", "00001"]
        pids = {f"{one.data['pid']}.jsonl" for one in job.events("rank.start")}
        assert {name[3] for name in names} == pids
        assert "rank ends with 0" in job.log(1, 1)
        assert job.log(1, 0) == ""
        sequences = [one.seq for one in job.events() if one.src == "rank" and one.rank == 1]
        assert sequences.count(1) == 2  # nothing of either process is lost


# --- faults --------------------------------------------------------------------------------------


def test_after_an_exception_the_launcher_starts_all_ranks_again(tmp_path: Path) -> None:
    with Watched(tmp_path, ["15", "exception@7:1"]) as job:
        assert job.wait() == 0
        assert job.causes() == [("exception", 1, "respawn")]
        assert _readies(job) == [(1, 0), (101, 5)]
        assert _exits(job)[1, 0] == (1, False)
        assert job.data("restart.end") == [{"resume": 5, "first_step": 6}]
        [cause] = job.data("restart.cause")
        assert cause["stack"] == "Traceback: here\n"
        [fault] = _report(job)["faults"]
    assert fault["level"] == "respawn"
    assert (fault["kind"], fault["rank"], fault["step"]) == ("exception", 1, 7)
    assert (fault["steps_lost"], fault["survivors_kept"]) == (2, False)
    assert fault["recover_s"] > 0
    line = "rank 1 (node 0) raised RuntimeError: a fault at step 7 (train.py:7); level respawn: "
    assert line in job.err
    assert "round 101: all 2 ranks train again" in job.err


def test_where_nvrx_restarts_in_the_process_the_level_is_rerun_and_nobody_is_new(
    tmp_path: Path,
) -> None:
    with Watched(tmp_path, ["15", "exception@7:1", "in_process"], flags=IN_PROCESS) as job:
        assert job.wait() == 0
        assert job.causes() == [("exception", 1, "rerun")]
        first, second = job.data("round.ready")
        assert first["pids"] == second["pids"]
        [fault] = _report(job)["faults"]
    assert (fault["level"], fault["survivors_kept"], fault["steps_lost"]) == ("rerun", True, 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_the_others_are_no_cause(tmp_path: Path, rank: int) -> None:
    with Watched(
        tmp_path, ["15", f"kill@7:{rank}", "in_process"], flags=IN_PROCESS, nproc=3
    ) as job:
        assert job.wait() == 0
        assert job.causes() == [("killed", rank, "respawn")]
        exits = _exits(job)
        assert exits.pop((rank, 0)) == (-9, False)
        others = {end for (_, inc), end in exits.items() if inc == 0}
        assert others <= {(-15, True)}
        [fault] = _report(job)["faults"]
    assert (fault["kind"], fault["cause"], fault["rank"]) == ("kill", "killed", rank)
    assert fault["detect_s"] < 1.0


def test_what_a_dead_rank_left_behind_is_ended(tmp_path: Path) -> None:
    with Watched(tmp_path, ["500", "litter@7:1"]) as job:
        job.running(101)
        litter = [int(pid) for pid in (job.run_dir / "fake" / "litter").read_text().split()]
        assert len(litter) == 2
        wait_until(lambda: not any(map(lives, litter)), "the litter is gone")
        job.until(lambda: len(job.events("rank.start")) == 4, "both new processes are known")
        assert all(map(lives, job.rank_pids()))
        job.signal(signal.SIGTERM)
        assert job.wait() == 75


def test_a_hang_is_seen_before_the_launcher_ends_it_and_named_as_the_cause(tmp_path: Path) -> None:
    with Watched(tmp_path, ["15", "hang@7:1"]) as job:
        assert job.wait() == 0
        assert job.causes() == [("hang", 1, "respawn")]
        assert {one.rank for one in job.events("rank.suspect")} == {0, 1}
        [hung] = job.events("rank.hung")
        assert (hung.rank, hung.step) == (1, 7)
        assert "in _fire" in str(hung.data["stack"])
        assert _exits(job)[1, 0] == (-9, True)
        report = _report(job)
    [fault] = report["faults"]
    assert (fault["kind"], fault["cause"], fault["rank"]) == ("hang", "hang", 1)
    [beat] = [one for one in report["heartbeats"] if one["rank"] == 1]
    assert beat["age_s"] > beat["limit_s"] / 2
    assert beat["section"] == "step"


def test_a_rank_that_was_only_slow_is_no_failure(tmp_path: Path) -> None:
    with Watched(tmp_path, ["60", "slow@7:1"]) as job:
        assert job.wait() == 0
        assert [one.rank for one in job.events("rank.hung")] == [1]
        assert job.causes() == []
        assert job.data("restart.begin") == []
        report = _report(job)
    assert [(one["kind"], one["level"]) for one in report["faults"]] == [("slow", None)]


def test_an_error_that_comes_again_in_a_fresh_process_stops_the_run(tmp_path: Path) -> None:
    with Watched(tmp_path, ["15", "exception!@7:1"]) as job:
        assert job.wait() == 78
        assert [level for _, _, level in job.causes()] == ["respawn", "stop"]
        assert "the script fails in the same way in a fresh process: rank 1" in job.ending
        assert [one["level"] for one in _report(job)["faults"]] == ["respawn", "stop"]


def test_ranks_wait_for_the_verdict_and_begin_nothing_where_the_run_is_over(
    tmp_path: Path,
) -> None:
    with Watched(
        tmp_path, ["15", "exception@3:0", "fatal!@7:1", "in_process"], flags=IN_PROCESS
    ) as (job):
        assert job.wait() == 64
        assert job.causes() == [("exception", 0, "rerun"), ("exception", 1, "stop")]
        begun = sorted(path.name for path in (job.run_dir / "fake").glob("begun-*"))
    assert begun == ["begun-1-0", "begun-1-1", "begun-2-0", "begun-2-1"]


def test_restarts_without_progress_end_the_run(tmp_path: Path) -> None:
    flags = (*LAUNCHER_ONLY, "--set", "restart.max_without_progress=2")
    with Watched(tmp_path, ["15", "kill!@7:1"], flags=flags) as job:
        assert job.wait() == 76
        assert [level for _, _, level in job.causes()] == ["respawn", "respawn", "stop"]
        assert "2 restarts in a row brought no new step" in job.ending


# --- the launcher's own end ----------------------------------------------------------------------


def test_a_launcher_that_gives_up_is_told_with_the_failure_and_its_last_lines(
    tmp_path: Path,
) -> None:
    with Watched(tmp_path, ["15", "exit@7:1"], restarts=0) as job:
        assert job.wait() == 78
        assert "rank 1 (node 0) ended with exit code 7 at step 7, and the launcher" in job.ending
        assert "[launcher] FakeLauncherError: no restart is left" in job.err


def test_a_launcher_that_fails_at_once_shows_why(tmp_path: Path) -> None:
    with Watched(tmp_path, ["15"], worker="tests.agent.observe.no_such_module") as job:
        assert job.wait() == 70
        assert "the launcher ended with exit code 1 before the job was over; see " in job.ending
        assert "No module named tests.agent.observe.no_such_module" in job.err


def test_a_killed_launcher_ends_the_run_with_a_clear_error_and_nothing_left(
    tmp_path: Path,
) -> None:
    with Watched(tmp_path, ["5000"]) as job:
        job.running()
        _launcher(job).kill()
        assert job.wait() == 70
        assert "the launcher was ended by signal 9 before the job was over; see " in job.ending


def test_a_killed_guard_is_told_in_the_same_way(tmp_path: Path) -> None:
    with Watched(tmp_path, ["5000"]) as job:
        job.running()
        psutil.Process(job.helper("agent.observe.guard")).kill()
        assert job.wait() == 70
        assert "the launcher was ended by signal 9 before the job was over; see " in job.ending


def test_when_keepstep_itself_is_killed_nothing_goes_on(tmp_path: Path) -> None:
    with Watched(tmp_path, ["5000"]) as job:
        pids = job.running()
        job.signal(signal.SIGKILL)
        job.process.wait()
        wait_until(lambda: not any(map(lives, pids)), "the ranks have ended")


def test_a_store_that_is_lost_ends_the_run(tmp_path: Path) -> None:
    with Watched(tmp_path, ["5000"]) as job:
        job.running()
        children = psutil.Process(job.process.pid).children()
        [store] = [one for one in children if "tests.agent.observe.fake_store" in one.cmdline()]
        store.kill()
        assert job.wait() == 70
        assert "the process that hosts the store was ended by signal 9" in job.ending


# --- stopping ------------------------------------------------------------------------------------


def test_on_a_signal_all_ranks_save_the_same_step_and_the_run_ends_with_75(
    tmp_path: Path,
) -> None:
    with Watched(tmp_path, ["5000"], nproc=3) as job:
        job.running(nproc=3)
        job.signal(signal.SIGTERM)
        assert job.wait() == 75
        steps = job.steps(1)
        assert len(set(steps.values())) == 1
        assert job.ending == (
            f"keepstep: stopped on SIGTERM; step {steps[0]} is committed (exit code 75)"
        )
        assert job.data("stop.notice") == [{"signal": "SIGTERM"}]
        assert _report(job)["faults"] == []


def test_a_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    with Watched(tmp_path, ["5000", "stubborn@7:1"]) as job:
        job.until(lambda: job.events("fault.injected"), "rank 1 does not listen")
        job.signal(signal.SIGINT)
        job.until(lambda: job.events("stop.notice"), "the notice is heard")
        job.signal(signal.SIGINT)
        assert job.wait() == 130
        assert "SIGINT: ended after 0 s without a checkpoint of that time" in job.ending


def test_after_the_grace_period_everything_is_ended(tmp_path: Path) -> None:
    flags = (*LAUNCHER_ONLY, "--shutdown-timeout", "0.5")
    with Watched(tmp_path, ["5000", "stubborn@7:1"], flags=flags) as job:
        job.until(lambda: job.events("fault.injected"), "rank 1 does not listen")
        job.signal(signal.SIGTERM)
        assert job.wait() == 143


# --- a script that does not use keepstep.run -----------------------------------------------------

_PLAIN = LOOP.replace("@keepstep.restartable\n", "")


def test_a_script_that_only_beats_has_rounds_and_restarts_too(tmp_path: Path) -> None:
    worker = "keepstep.rank.attached"
    with Watched(tmp_path, ["done"], worker=worker, script=_PLAIN) as job:

        def both(inc: int) -> bool:
            starts = job.events("rank.start")
            return sum(one.data["incarnation"] == inc for one in starts) == 2

        job.until(lambda: both(0) and _readies(job), "round 1 is ready")
        psutil.Process(job.rank_pids()[1]).kill()
        job.until(lambda: both(1) and job.events("restart.end"), "round 2 goes on")
        assert _readies(job) == [(1, 0), (2, 0)]
        assert job.causes() == [("killed", 1, "respawn")]
        (tmp_path / "done").touch()
        assert job.wait() == 0
        assert job.ending == "keepstep: the script ended on every rank (exit code 0)"
        [fault] = _report(job)["faults"]
    assert (fault["kind"], fault["level"], fault["recover_s"] > 0) == ("killed", "respawn", True)


def test_a_script_that_only_beats_gets_the_signal_itself(tmp_path: Path) -> None:
    worker = "keepstep.rank.attached"
    with Watched(tmp_path, ["done"], worker=worker, script=_PLAIN) as job:
        job.until(lambda: _readies(job), "round 1 is ready")
        job.signal(signal.SIGTERM)
        assert job.wait() == 75
        assert "the script ended on every rank after SIGTERM" in job.ending
