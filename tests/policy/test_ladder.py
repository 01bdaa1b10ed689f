"""The recovery ladder and the restart budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.config import RestartSettings
from keepstep.errors import ExitCode
from keepstep.policy import Attribution, Decision, Progress, Record, Report, attribute, decide

DEFAULTS = RestartSettings()
STUCK = Progress(committed=10, highest=12)


def failed(kind: str, *, step: int = 12, fresh: bool = False, rank: int = 1) -> Attribution:
    code = {"killed": -9, "oom": -9, "exit": 2}.get(kind, 0)
    report = Report(
        rank=rank,
        t=1.0,
        kind=kind,
        step=step,
        fresh=fresh,
        code=code,
        error="ValueError: bad batch" if kind == "exception" else "",
        location="train.py:7",
    )
    return attribute([report], world=4)


class Run:
    """A run that remembers its failures as the coordinator does."""

    def __init__(self, settings: RestartSettings = DEFAULTS, *, in_process: bool = True) -> None:
        self.settings = settings
        self.in_process = in_process
        self.history: list[Record] = []

    def fail(self, failure: Attribution, progress: Progress = STUCK) -> Decision:
        decision = decide(
            self.history, failure, progress, self.settings, in_process=self.in_process
        )
        if decision.level != "stop":
            self.history.append(Record.of(failure, progress))
        return decision


@pytest.mark.parametrize("kind", ["exception", "timeout", "peer_lost", "checkpoint"])
def test_a_failure_that_leaves_the_process_alive_is_rerun(kind: str) -> None:
    decision = Run().fail(failed(kind))
    assert (decision.level, decision.replace, decision.exit_code) == ("rerun", (), 0)


@pytest.mark.parametrize("kind", ["killed", "oom", "exit", "hang"])
def test_a_dead_or_hung_process_is_replaced(kind: str) -> None:
    decision = Run().fail(failed(kind))
    assert (decision.level, decision.replace) == ("rank", (1,))


def test_every_dead_rank_is_replaced_whatever_the_cause() -> None:
    reports = [
        Report(rank=0, t=1.0, kind="exception", error="ValueError"),
        Report(rank=0, t=1.1, kind="exit", code=1),
        Report(rank=3, t=9.0, kind="killed", code=-9),
    ]
    assert Run().fail(attribute(reports, world=4)).replace == (0, 3)


def test_without_keepstep_run_all_processes_are_replaced() -> None:
    assert Run(in_process=False).fail(failed("killed")).level == "respawn"


def test_an_error_that_repeats_gets_one_fresh_process_and_then_stops_the_job() -> None:
    run = Run()
    decisions = [
        run.fail(failed("exception", fresh=True)),
        run.fail(failed("exception", fresh=False)),
        run.fail(failed("exception", fresh=True)),
    ]
    assert [decision.level for decision in decisions] == ["rerun", "rank", "stop"]
    assert decisions[1].replace == (1,)
    assert decisions[2].exit_code == ExitCode.SCRIPT_FAILED
    assert "ValueError: bad batch" in decisions[2].reason
    assert "train.py:7" in decisions[2].reason


def test_a_script_that_exits_at_import_is_tried_twice() -> None:
    run = Run(in_process=False)
    nothing = Progress(committed=0, highest=0)
    assert run.fail(failed("exit", step=0, fresh=True), nothing).level == "respawn"
    decision = run.fail(failed("exit", step=0, fresh=True), nothing)
    assert (decision.level, decision.exit_code) == ("stop", ExitCode.SCRIPT_FAILED)


@pytest.mark.parametrize("kind", ["killed", "oom", "hang"])
def test_a_kill_at_the_same_step_is_not_the_scripts_error(kind: str) -> None:
    run = Run()
    for _ in range(3):
        assert run.fail(failed(kind, fresh=True)).level == "rank"


def test_the_same_error_at_another_step_is_another_failure() -> None:
    run = Run()
    run.fail(failed("exception", step=12, fresh=True))
    assert run.fail(failed("exception", step=13, fresh=True)).level == "rerun"


def test_a_rank_that_failed_only_as_a_consequence_does_not_count_as_seen() -> None:
    run = Run()
    error = Report(rank=0, t=1.1, kind="exception", error="ValueError: bad batch", step=12)
    run.fail(attribute([error, Report(rank=1, t=1.0, kind="killed", code=-9)], world=2))
    assert run.fail(attribute([error], world=2)).level == "rerun"


def test_a_save_that_cannot_work_and_a_checkpoint_of_another_model_end_the_job() -> None:
    decision = Run().fail(failed("save"))
    assert (decision.level, decision.exit_code) == ("stop", ExitCode.CHECKPOINT)
    mismatch = Report(rank=2, t=1.0, kind="checkpoint", error="another model", fatal=65)
    decision = Run().fail(attribute([mismatch], world=4))
    assert (decision.level, decision.exit_code) == ("stop", ExitCode.CHECKPOINT)
    assert "another model" in decision.reason


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_the_total_of_restarts_is_limited_even_with_progress(allowed: int) -> None:
    run = Run(RestartSettings(max_restarts=allowed))
    for count in range(allowed):
        progress = Progress(committed=0, highest=count + 1)
        assert run.fail(failed("killed", step=count + 1), progress).level == "rank"
    decision = run.fail(failed("killed", step=99), Progress(committed=0, highest=99))
    assert (decision.level, decision.exit_code) == ("stop", ExitCode.RESTARTS_EXHAUSTED)
    assert f"max_restarts is {allowed}" in decision.reason


def test_damaged_checkpoints_do_not_spend_the_budget_for_restarts_without_progress() -> None:
    run = Run(RestartSettings(max_without_progress=1))
    for _ in range(8):
        assert run.fail(failed("checkpoint")).level == "rerun"
    assert run.fail(failed("killed")).level == "rank"
    assert run.fail(failed("checkpoint")).level == "rerun"
    assert run.fail(failed("hang")).exit_code == ExitCode.RESTARTS_EXHAUSTED


def test_a_restart_too_many_without_progress_ends_the_job_with_the_numbers() -> None:
    run = Run(RestartSettings(max_without_progress=2))
    assert [run.fail(failed("killed")).level for _ in range(3)] == ["rank", "rank", "stop"]
    decision = run.fail(failed("killed"))
    assert decision.exit_code == ExitCode.RESTARTS_EXHAUSTED
    assert "2 restarts in a row brought no new step" in decision.reason


kinds = st.sampled_from(["exception", "killed", "oom", "exit", "hang", "peer_lost", "checkpoint"])
failures = st.builds(failed, kinds, step=st.integers(0, 20), fresh=st.booleans())


@given(st.lists(failures, min_size=12, max_size=12), st.integers(0, 10))
def test_failures_without_progress_end_after_a_bounded_number(
    sequence: list[Attribution], allowed: int
) -> None:
    run = Run(RestartSettings(max_without_progress=allowed))
    levels = [run.fail(failure).level for failure in sequence]
    pairs = zip(sequence, levels, strict=True)
    counted = [level for failure, level in pairs if failure.cause != "checkpoint"]
    assert len(counted) <= allowed or "stop" in counted[: allowed + 1]


@given(st.lists(st.tuples(failures, st.booleans()), max_size=30))
def test_a_job_that_makes_progress_never_ends_for_lack_of_it(
    sequence: list[tuple[Attribution, bool]],
) -> None:
    run = Run(RestartSettings(max_without_progress=1))
    committed = highest = 0
    for failure, by_commit in sequence:
        committed, highest = committed + by_commit, highest + (not by_commit)
        decision = run.fail(failure, Progress(committed=committed, highest=highest))
        assert decision.exit_code != ExitCode.RESTARTS_EXHAUSTED
        if decision.level == "stop":
            assert failure.cause in ("exception", "exit")
            assert failure.fresh


@given(st.integers(1, 20), st.integers(0, 3), st.integers(4, 10))
def test_an_error_that_always_comes_gets_exactly_one_fresh_retry(
    step: int, rank: int, allowed: int
) -> None:
    run = Run(RestartSettings(max_without_progress=allowed))
    fresh, levels = True, list[str]()
    while not levels or levels[-1] != "stop":
        decision = run.fail(failed("exception", step=step, fresh=fresh, rank=rank))
        levels.append(decision.level)
        fresh = rank in decision.replace
    assert levels == ["rerun", "rank", "stop"]
    assert decision.exit_code == ExitCode.SCRIPT_FAILED
