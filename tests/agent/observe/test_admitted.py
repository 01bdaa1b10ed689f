"""Which round may begin, as the ranks' events and ends show it; time is given, nothing runs."""

from __future__ import annotations

import msgspec
import pytest

from keepstep import events as ev
from tests.agent.observe.watched_rounds import FAILED, LOST, Run, config_of


def test_the_first_round_may_begin_and_the_next_one_not_before_a_failure(run: Run) -> None:
    fresh = Run(config_of())
    assert fresh.rounds.admitted == 1
    fresh.close()
    assert run.rounds.admitted == 1


def test_the_next_round_may_begin_once_everybody_is_accounted_for(run: Run) -> None:
    run.tell(1, FAILED, step=8)
    run.tell(1, ev.RankLeft())
    assert run.rounds.admitted == 0  # rank 0 may be dying, and the exception a consequence
    run.tell(0, ev.RankLeft())
    assert run.rounds.admitted == 2
    run.join(2)
    run.step(2, 1)
    assert run.causes == [("exception", 1, "rerun")]
    assert run.rounds.admitted == 2


def test_the_next_round_may_begin_at_the_latest_when_the_cause_must_be_settled(run: Run) -> None:
    run.tell(1, FAILED, step=8)
    run.pass_time(0.9)
    assert run.rounds.admitted == 0
    run.pass_time(0.2)
    assert run.rounds.admitted == 2


@pytest.mark.parametrize("code", [64, 65])
def test_nothing_may_begin_after_an_error_that_no_restart_helps_against(
    run: Run, code: int
) -> None:
    kind = "exception" if code == 64 else "checkpoint"
    run.tell(0, ev.RankFailed(failure=kind, error="x", location="", fatal=code), step=8)
    for rank in (0, 1):
        run.tell(rank, ev.RankLeft())
    run.join(2)
    run.pass_time(10.0)
    assert run.ends == [code]
    assert run.rounds.admitted == 0


@pytest.mark.parametrize(("fresh", "code"), [(False, 76), (True, 78)])
def test_nothing_may_begin_once_policy_has_had_enough(fresh: bool, code: int) -> None:
    failed = msgspec.structs.replace(FAILED, fresh=fresh)  # 78: the same in a fresh process
    made = Run(config_of(max_restarts=1))
    made.start()
    for number in (1, 2):
        made.join(number)
        made.step(number, 7)
        made.tell(1, failed, round=number, step=8)
        for rank in (0, 1):
            made.tell(rank, ev.RankLeft(), round=number)
        assert made.rounds.admitted == (2 if number == 1 else 0)
    assert made.ends == [code]
    made.close()


def test_a_rank_that_is_leaving_its_process_is_waited_for(run: Run) -> None:
    run.tell(0, LOST, step=8)
    run.tell(0, ev.RankLeft())
    assert run.rounds.admitted == 0
    run.end(1, 7)
    assert run.causes == [("exit", 1, "respawn")]
    assert run.rounds.admitted == 2


def test_a_round_that_follows_without_a_word_is_judged_when_all_have_come(run: Run) -> None:
    run.join(2, 0)
    assert run.rounds.admitted == 0
    run.join(2, 1)
    assert run.causes == [("unknown", -1, "rerun")]
    assert run.rounds.admitted == 2


def test_a_round_whose_number_is_higher_than_the_next_may_begin_too(run: Run) -> None:
    run.tell(1, FAILED, step=8)
    for rank in (0, 1):
        run.tell(rank, ev.RankLeft())
    run.join(4, 0)  # 2 and 3 came to nothing
    assert run.rounds.admitted == 4


def test_a_hang_is_a_failure_when_its_rank_has_left_the_round(run: Run) -> None:
    run.stall(5.0, 5.0)
    run.pass_time(0.5)
    assert run.data("restart.begin") == []
    run.tell(1, ev.RankLeft())
    assert run.data("restart.begin") == [{"first_kind": "hang"}]
    assert run.rounds.admitted == 2  # a hang is nobody's consequence


def test_a_failure_before_all_have_joined_again_is_another_one(run: Run) -> None:
    run.tell(1, FAILED, step=8)
    for rank in (0, 1):
        run.tell(rank, ev.RankLeft())
    run.join(2, 0)
    wrong = ev.RankFailed(failure="exception", error="UsageError: x", location="", fatal=64)
    run.tell(0, wrong, round=2)
    run.pass_time(1.1)
    assert run.causes == [("exception", 1, "rerun"), ("exception", 0, "stop")]
    assert run.ends == [64]
    assert run.rounds.admitted == 0
