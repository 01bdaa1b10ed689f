from __future__ import annotations

from keepstep import events as ev
from keepstep.goodput.faults import Fault, faults
from tests.goodput.runlog import RunLog, four_faults, worked_example


def only(log: RunLog) -> Fault:
    (fault,) = faults(log.events)
    return fault


def two_rounds() -> RunLog:
    """Rank 1 of 3 dies in step 6 at 5.5, known at 6; all complete step 5 again at 9."""
    log = RunLog(world=3)
    log.launch(0.0)
    log.ready(0.0, 1, 0, [10, 11, 12])
    log.steps(0.0, 1, 5, 1)
    log.ready(7.0, 2, 4, [10, 21, 12])
    log.steps(8.0, 5, 7, 2)
    log.end(12.0)
    return log


def test_injected_fault_is_matched_with_the_restart_that_answered_it() -> None:
    fault = only(worked_example())
    assert (fault.kind, fault.rank, fault.step, fault.level) == ("kill", 1, 151, "rank")
    assert (fault.detect_s, fault.recover_s, fault.steps_lost) == (7.5, 31.5, 51)
    assert fault.survivors_kept is True
    assert fault.injected and fault.cause == "killed"


def test_four_faults_are_listed_in_order() -> None:
    listed = faults(four_faults().events)
    assert [fault.kind for fault in listed] == ["exception", "desync", "kill", "hang"]
    assert [fault.rank for fault in listed] == [1, 0, 1, 0]
    assert [fault.level for fault in listed] == ["kept", "kept", "rank", "rank"]
    assert [fault.steps_lost for fault in listed] == [1, 1, 1, 1]
    assert [fault.survivors_kept for fault in listed] == [True] * 4


def test_real_fault_is_named_by_its_cause_and_timed_from_when_it_was_known() -> None:
    log = two_rounds()
    log.restart(6.0, 1, step=6)
    fault = only(log)
    assert (fault.kind, fault.rank, fault.injected) == ("killed", 1, False)
    assert (fault.detect_s, fault.recover_s, fault.steps_lost) == (None, 3.0, 2)
    assert fault.line == "rank 1 killed in step 6; replaced"


def test_real_fault_that_left_an_exit_is_timed_from_the_exit() -> None:
    log = two_rounds()
    log.add(5.5, ev.RankExit(pid=11, incarnation=1, code=-9), src="agent", rank=1)
    log.restart(6.0, 1, step=6)
    assert only(log).recover_s == 3.5
    assert only(log).detect_s is None


def test_survivor_with_another_pid_was_not_kept() -> None:
    log = two_rounds()
    log.restart(6.0, 1, guilty=2, step=6)
    assert only(log).survivors_kept is False


def test_nobody_is_blamed_by_guess() -> None:
    log = two_rounds()
    log.restart(6.0, 1, cause="unknown", guilty=-1, step=6)
    fault = only(log)
    assert (fault.kind, fault.rank, fault.survivors_kept) == ("unknown", None, False)


def test_fault_of_an_unblamed_rank_is_matched_if_its_rank_did_not_go_on() -> None:
    log = two_rounds()
    log.inject(5.5, "desync", 1, 1, 6)
    log.restart(6.0, 1, cause="timeout", guilty=-1, step=6)
    fault = only(log)
    assert (fault.kind, fault.rank, fault.cause) == ("desync", 1, "timeout")
    assert fault.survivors_kept is True


def test_fault_that_had_no_effect_is_listed_as_never_detected() -> None:
    log = two_rounds()
    log.inject(1.5, "oom", 2, 1, 2)
    log.restart(6.0, 1, cause="unknown", guilty=-1, step=6)
    lost = ev.RankFailed(failure="peer_lost", error="closed", location="train.py:1")
    log.add(6.0, lost, rank=2, round=1)
    missed, found = faults(log.events)
    assert (missed.kind, missed.rank, missed.step, missed.level) == ("oom", 2, 2, None)
    assert (missed.cause, missed.recover_s, missed.steps_lost) == (None, None, None)
    assert (found.kind, found.injected) == ("unknown", False)


def test_blaming_another_rank_does_not_hide_the_injected_fault() -> None:
    log = two_rounds()
    log.inject(5.5, "kill", 2, 1, 6)
    log.restart(6.0, 1, guilty=1, step=6)
    listed = faults(log.events)
    assert [(fault.kind, fault.rank, fault.level) for fault in listed] == [
        ("kill", 2, None),
        ("killed", 1, "rank"),
    ]


def test_two_faults_during_one_recovery_are_two_entries() -> None:
    log = RunLog(world=3)
    log.launch(0.0)
    log.ready(0.0, 1, 0, [10, 11, 12])
    log.steps(0.0, 1, 5, 1)
    log.inject(5.5, "kill", 1, 1, 6)
    log.restart(6.0, 1, step=6)
    log.inject(6.5, "hang", 2, 1, 6)
    log.restart(7.0, 2, cause="hang", guilty=2, step=6)
    log.ready(8.0, 3, 5, [10, 21, 22])
    log.steps(8.0, 6, 7, 3)
    log.end(10.0)
    first, second = faults(log.events)
    assert (first.kind, first.rank, first.detect_s, first.recover_s) == ("kill", 1, 0.5, 3.5)
    assert (second.kind, second.rank, second.detect_s, second.recover_s) == ("hang", 2, 0.5, 2.5)
    assert (first.survivors_kept, second.survivors_kept) == (True, True)
    assert (first.steps_lost, second.steps_lost) == (1, 1)


def test_second_cause_without_its_own_begin_is_an_entry_too() -> None:
    log = two_rounds()
    log.restart(6.0, 1, guilty=1, step=6)
    data = ev.RestartCause(
        cause="hang", guilty=2, step=6, level="rank", reason="", line="", consequences=[]
    )
    log.add(6.5, data, round=1)
    assert [(fault.kind, fault.rank) for fault in faults(log.events)] == [
        ("killed", 1),
        ("hang", 2),
    ]


def test_fault_injected_into_a_rank_that_failed_as_a_consequence_shares_the_restart() -> None:
    log = two_rounds()
    log.inject(5.4, "kill", 1, 1, 6)
    log.inject(5.5, "kill", 2, 1, 6)
    log.restart(6.0, 1, step=6, consequences=(2,))
    listed = faults(log.events)
    assert [(fault.rank, fault.level) for fault in listed] == [(1, "rank"), (2, "rank")]
    assert listed[1].detect_s == 0.5


def test_fault_found_after_the_decision_is_an_entry_of_the_same_restart() -> None:
    log = two_rounds()
    log.inject(5.4, "exception", 1, 1, 6)
    log.restart(5.5, 1, cause="exception", step=6, level="kept")
    log.inject(5.75, "kill", 2, 1, 6)
    log.add(6.0, ev.RankExit(pid=12, incarnation=1, code=-9), src="agent", rank=2)
    first, second = faults(log.events)
    assert (first.kind, first.rank, first.level, first.cause) == (
        "exception",
        1,
        "kept",
        "exception",
    )
    assert (second.kind, second.rank, second.level, second.cause) == ("kill", 2, "rank", "killed")
    assert (second.detect_s, second.recover_s) == (0.25, 3.25)
    assert second.line == ""


def test_real_fault_is_not_hidden_by_an_injected_one_that_shares_its_restart() -> None:
    log = two_rounds()
    log.inject(5.5, "kill", 2, 1, 6)
    log.restart(6.0, 1, guilty=1, step=6, consequences=(2,))
    assert [(fault.kind, fault.injected) for fault in faults(log.events)] == [
        ("kill", True),
        ("killed", False),
    ]


def test_recovery_lasts_until_a_round_in_which_all_ranks_step() -> None:
    log = RunLog()
    log.launch(0.0)
    log.ready(0.0, 1, 0, [10, 11])
    log.steps(0.0, 1, 5, 1)
    log.restart(6.0, 1, step=6)
    log.ready(7.0, 2, 5, [10, 12])
    log.steps(7.0, 6, 6, 2, but=1)
    log.restart(9.0, 2, step=6)
    log.ready(10.0, 3, 5, [10, 13])
    log.steps(10.0, 6, 6, 3)
    assert [fault.recover_s for fault in faults(log.events)] == [5.0, 2.0]


def test_job_that_gave_up_has_no_recovery() -> None:
    log = RunLog()
    log.launch(0.0)
    log.ready(0.0, 1, 0, [10, 11])
    log.steps(0.0, 1, 5, 1)
    log.restart(6.0, 1, step=6, level="stop")
    log.end(7.0, exit_code=78)
    fault = only(log)
    assert (fault.level, fault.recover_s, fault.steps_lost) == ("stop", None, None)
    assert fault.survivors_kept is None


def test_steps_lost_by_a_job_that_gave_up_show_when_it_is_started_again() -> None:
    log = RunLog()
    log.launch(0.0)
    log.ready(0.0, 1, 0, [10, 11])
    log.steps(0.0, 1, 5, 1)
    log.restart(6.0, 1, step=6, level="stop")
    log.end(7.0, exit_code=76)
    log.launch(20.0)
    log.ready(21.0, 1, 2, [10, 11])
    log.steps(21.0, 3, 6, 1)
    fault = only(log)
    assert (fault.steps_lost, fault.recover_s) == (4, None)


def test_restart_whose_cause_was_never_written_is_listed_by_its_first_evidence() -> None:
    log = two_rounds()
    log.add(6.0, ev.RestartBegin(first_kind="peer_lost"), round=1)
    fault = only(log)
    assert (fault.kind, fault.level, fault.step, fault.steps_lost) == ("peer_lost", None, 6, 2)


def test_fault_of_an_earlier_launch_does_not_explain_a_later_restart() -> None:
    log = RunLog()
    log.launch(0.0)
    log.ready(0.0, 1, 0, [10, 11])
    log.steps(0.0, 1, 2, 1)
    log.inject(2.5, "kill", 1, 1, 3)
    log.launch(10.0)
    log.ready(10.0, 1, 2, [20, 21])
    log.steps(10.0, 3, 4, 1)
    log.restart(13.0, 1, step=5)
    assert [(fault.kind, fault.level) for fault in faults(log.events)] == [
        ("kill", None),
        ("killed", "rank"),
    ]
