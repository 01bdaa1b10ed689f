from __future__ import annotations

import dataclasses
from typing import Literal

from keepstep import events
from keepstep.config import Config
from keepstep.wire.messages import (
    Abort,
    Evidence,
    Go,
    Kill,
    Replace,
)
from tests.coordinator.cluster import Cluster, config, running

SETTLE_S = Config().restart.settle_s
LIMIT = Config().restart


def hangs(report: Literal["restart", "report"]) -> Config:
    base = Config()
    return dataclasses.replace(base, heartbeat=dataclasses.replace(base.heartbeat, on_hang=report))


# --- exceptions ----------------------------------------------------------------------------------


def test_an_exception_frees_the_others_and_all_start_the_round_again_in_the_same_processes() -> (
    None
):
    job = running(3)
    job.fail(1, step=7)
    assert job.all(Abort, to=0) == [Abort(round=1, reason="rank 1 failed")]
    assert job.running == 2
    assert job.incs == [0, 0, 0]
    assert not job.all(Replace) and not job.all(Kill)
    assert (job.cause.cause, job.cause.guilty, job.cause.level) == ("exception", 1, "rerun")
    assert (job.cause.step, job.cause.consequences) == (7, [])


def test_restart_events_come_in_order_and_name_the_round_that_failed_and_the_new_one() -> None:
    job = running()
    before = len(job.events)
    job.fail(0)
    kinds = [(e.data.kind, e.round) for e in job.events[before:] if e.data.kind != "rank.joined"]
    assert kinds == [
        ("rank.failed", 1),
        ("restart.begin", 1),
        ("restart.cause", 1),
        ("round.begin", 2),
        ("round.ready", 2),
    ]
    joined = [e for e in job.events[before:] if e.data.kind == "rank.joined"]
    assert [(e.rank, e.round) for e in joined] == [(0, 2), (1, 2)]


def test_the_same_exception_gets_one_fresh_process_and_then_ends_the_job() -> None:
    job = running()
    job.fail(0)
    assert (job.cause.level, job.running) == ("rerun", 2)
    job.fail(0)
    assert (job.cause.level, job.running) == ("rank", 3)
    assert job.incs == [1, 0]
    job.fail(0, fresh=True)
    assert job.cause.level == "stop"
    assert job.end and job.end.exit_code == 78
    assert "ValueError: bad batch" in job.end.reason
    assert not job.end.graceful


def test_one_rank_that_fails_twice_in_the_same_way_is_replaced_only_once() -> None:
    job = running(1)
    job.fail(0)
    job.fail(0)
    assert job.all(Replace) == [
        Replace(rank=0, inc=0, round=3, reason=job.cause.line),
    ]
    assert job.running == 3
    assert job.incs == [1]


def test_a_join_on_its_way_does_not_bring_a_rank_back_that_is_being_replaced() -> None:
    job = running(1)
    job.fail(0)
    job.stuck = {0}  # it says that it has left the round a little later
    job.down = {0}
    job.fail(0)
    assert [order.inc for order in job.all(Replace)] == [0]
    job.join(0, inc=0)
    job.tick()
    assert len(job.goes) == 2
    assert job.rounds.members[0].state == "absent"


def test_different_exceptions_go_on_as_long_as_the_job_gets_on() -> None:
    job = running()
    for number in range(1, 12):
        job.fail(number % 2, error=f"E{number}", step=number)
        assert job.running == number + 1
    assert job.end is None


def test_exceptions_that_bring_nothing_end_the_job_when_the_budget_is_spent() -> None:
    job = running(settings=config(max_without_progress=3))
    for number in range(3):
        job.fail(0, error=f"E{number}")
        assert job.end is None
    job.fail(0, error="E last")
    assert job.end and job.end.exit_code == 76
    assert "3 restarts in a row brought no new step" in job.end.reason


def test_a_committed_checkpoint_is_progress() -> None:
    job = running(settings=config(max_without_progress=1))
    for number in range(1, 6):
        job.fail(0, error=f"E{number}")
        job.commit(job.stage(number))
    assert job.end is None


def test_a_limit_on_all_restarts_holds_though_the_job_gets_on() -> None:
    job = running(settings=config(max_restarts=2))
    for number in (1, 2):
        job.fail(0, error=f"E{number}", step=number)
    job.fail(0, error="E3", step=3)
    assert job.end and job.end.exit_code == 76


def test_an_error_where_a_restart_cannot_help_ends_the_job_with_its_code() -> None:
    job = running()
    job.fail(1, "checkpoint", "rank 1: weight has shape [4], stored is [5]", fatal=65)
    assert job.running == 0
    assert job.end and job.end.exit_code == 65
    assert "a restart cannot help" in job.end.reason
    assert job.rounds.state == "done"


def test_a_save_that_fails_for_good_ends_the_job() -> None:
    job = running()
    job.fail(0, "save", "SaveFailed: no space")
    assert job.end and job.end.exit_code == 65


# --- killed --------------------------------------------------------------------------------------


def test_a_killed_rank_is_replaced_and_the_others_keep_their_processes() -> None:
    job = running(3)
    job.down = {1}
    job.die(1)
    assert job.all(Replace) == [Replace(rank=1, inc=0, round=2, reason=job.cause.line)]
    assert job.running == 0 and job.all(Go)[3:] == []
    assert [p.state for p in job.processes] == ["joined", "dead", "joined"]
    job.processes[1] = dataclasses.replace(job.processes[1], inc=1, state="starting")
    job.up(1)
    assert job.running == 2
    assert job.incs == [0, 1, 0]
    assert (job.cause.cause, job.cause.guilty, job.cause.level) == ("killed", 1, "rank")


def test_memory_is_named_when_the_kernel_killed_for_it() -> None:
    job = running()
    job.die(0, oom=True)
    assert (job.cause.cause, job.running, job.incs) == ("oom", 2, [1, 0])


def test_a_process_that_ends_too_early_is_replaced_whatever_its_code() -> None:
    for code in (0, 3):
        job = running()
        job.die(1, code)
        assert job.cause.cause == "exit"
        assert f"exit code {code}" in job.cause.line
        assert (job.running, job.incs) == (2, [0, 1])


def test_the_error_that_a_kill_causes_elsewhere_is_a_consequence() -> None:
    job = running(3)
    job.stuck = {0, 2}
    job.die(1)
    job.now += 0.01
    job.stuck = set()
    job.fail(0, error="RuntimeError: lost")
    job.join(0)
    job.join(2)
    assert job.running == 2
    assert (job.cause.guilty, job.incs) == (1, [0, 1, 0])
    assert len(job.emitted(events.RestartCause)) == 1


def test_the_kill_is_blamed_though_a_peer_noticed_it_first() -> None:
    job = running(3)
    job.stuck = {0, 2}
    job.fail(0, "peer_lost", "RuntimeError: Connection closed by peer")
    assert job.emitted(events.RestartCause) == []
    job.wait(0.3)
    assert job.emitted(events.RestartCause) == []
    job.die(1)
    assert (job.cause.cause, job.cause.guilty) == ("killed", 1)
    assert job.cause.consequences == [0]
    assert job.emitted(events.RestartBegin) == [events.RestartBegin(first_kind="peer_lost")]
    job.stuck = set()
    job.join(0)
    job.join(2)
    assert (job.running, job.incs) == (2, [0, 1, 0])


def test_a_lost_peer_without_a_cause_is_nobody_s_fault_after_a_while() -> None:
    job = running(3)
    job.stuck = {1, 2}
    job.fail(0, "peer_lost", "RuntimeError: Connection closed by peer")
    job.wait(SETTLE_S + 0.1)
    assert (job.cause.cause, job.cause.guilty, job.cause.level) == ("unknown", -1, "rerun")
    job.join(1)
    job.join(2)
    assert job.running == 2


def test_with_nobody_to_blame_the_step_is_that_of_the_rank_that_was_furthest_behind() -> None:
    job = running(3)
    job.stuck = {0, 1, 2}
    job.fail(0, "peer_lost", "RuntimeError: Connection closed by peer", step=8)
    for rank, step in ((0, 8), (1, 7), (2, 8)):
        job.join(rank, step=step)
    assert (job.cause.cause, job.cause.step) == ("unknown", 7)


def test_a_rank_that_fails_after_the_decision_only_follows() -> None:
    job = running(3)
    job.stuck = {2}
    job.die(1)
    job.fail(2, "peer_lost", "RuntimeError: Connection closed by peer")
    job.join(2)
    assert job.running == 2
    assert len(job.emitted(events.RestartCause)) == len(job.emitted(events.RestartBegin)) == 1


def test_a_rank_that_dies_after_the_decision_is_replaced_too() -> None:
    job = running(3)
    job.stuck = {2}
    job.die(1)
    job.die(2)
    assert (job.running, job.incs) == (2, [0, 1, 1])
    assert len(job.emitted(events.RestartCause)) == 1


def test_two_ranks_killed_together_are_both_replaced() -> None:
    job = running(4)
    job.stuck = {0, 1, 2, 3}
    job.die(1)
    job.die(2)
    job.join(0)
    job.join(3)
    assert (job.running, job.incs) == (2, [0, 1, 1, 0])


def test_a_rank_that_tells_of_its_exception_and_then_ends_is_one_failure() -> None:
    job = running()
    job.stuck = {0, 1}
    job.fail(0, step=9)
    job.die(0, 1)
    job.join(1)
    assert job.running == 2
    assert (job.cause.cause, job.cause.guilty) == ("exception", 0)
    assert job.incs == [1, 0]
    assert len(job.emitted(events.RestartCause)) == 1


# --- a second failure while the next round forms -------------------------------------------------


def test_a_new_process_that_dies_at_import_costs_budget_each_time() -> None:
    job = running(settings=config(max_without_progress=4))
    job.deaf = {1}
    job.die(1)
    for number in range(1, 4):
        assert job.end is None
        assert job.incs == [0, number]
        job.die(1, -11, step=0)
    job.die(1, -11, step=0)
    assert job.end and job.end.exit_code == 76
    assert len(job.emitted(events.RestartCause)) == 5


def test_a_new_process_that_ends_with_an_error_each_time_ends_the_job_as_the_script_s_fault() -> (
    None
):
    job = running()
    job.deaf = {1}
    job.die(1)
    job.die(1, 1, step=0)
    job.wait(SETTLE_S + 0.1)
    assert (job.end, job.incs) == (None, [0, 2])
    job.die(1, 1, step=0)
    job.wait(SETTLE_S + 0.1)
    assert job.end and job.end.exit_code == 78


def test_a_new_process_that_dies_at_import_is_counted_also_after_an_exception_of_its_rank() -> None:
    job = running()
    job.fail(1)
    job.deaf = {1}
    job.fail(1)
    assert job.incs == [0, 1]
    for _ in range(20):
        if job.end is None:
            job.die(1, 1, step=0)
            job.wait(SETTLE_S + 0.1)
    assert job.end and job.end.exit_code == 78
    assert job.incs[1] <= 3


def test_a_rank_killed_while_the_next_round_forms_is_a_failure_of_its_own() -> None:
    job = running(3)
    job.deaf = {1}
    job.die(1)
    job.die(2)
    assert [cause.guilty for cause in job.emitted(events.RestartCause)] == [1, 2]
    assert job.incs == [0, 1, 1]
    job.join(1)
    assert job.running == 2


# --- ranks that do not leave ---------------------------------------------------------------------


def test_a_rank_that_never_leaves_the_aborted_round_is_ended_and_replaced() -> None:
    job = running()
    job.stuck = {1}
    job.fail(0)
    job.wait(LIMIT.abort_limit_s - 1)
    assert job.all(Kill) == []
    job.wait(2)
    assert [(kill.rank, kill.inc) for kill in job.all(Kill)] == [(1, 0)]
    assert "rank 1 did not leave the aborted round within" in job.notices("fail")[0]
    assert (job.running, job.incs) == (2, [0, 1])
    assert job.cause.guilty == 0


def test_a_rank_that_leaves_just_when_it_is_ended_is_not_counted_on() -> None:
    job = Cluster(2, automatic=False)
    for rank in (0, 1):
        job.up(rank)
        job.join(rank)
    for rank, _, body in job.inbox:
        job.read(rank, body)
    job.fail(0)
    job.join(0)
    job.wait(LIMIT.abort_limit_s + 1)
    (kill,) = [order for order in job.orders if isinstance(order, Kill)]
    job.join(1, inc=0)  # sent before the agent acted
    assert list(job.goes) == [1]
    job.obey(kill)
    job.tick()
    assert list(job.goes) == [1]
    (replace,) = [order for order in job.orders if isinstance(order, Replace)]
    assert (replace.rank, replace.inc) == (1, 0)
    job.obey(replace)
    job.join(1)
    assert [inc for inc, _ in job.goes[2].values()] == [0, 1]


# --- hangs ---------------------------------------------------------------------------------------


def test_a_hung_rank_is_ended_and_replaced() -> None:
    job = running(3)
    job.stall(job.evidence(0), job.evidence(1, seq=90, phase="step", stack="loop"), job.evidence(2))
    assert (job.running, job.incs) == (2, [0, 1, 0])
    assert (job.cause.cause, job.cause.guilty, job.cause.level) == ("hang", 1, "rank")
    assert job.cause.stack == "loop"
    (hung,) = job.emitted(events.RankHung)
    assert (hung.idle_s, hung.phase, hung.stack) == (40.0, "step", "loop")


def test_a_stopped_rank_that_dies_late_is_replaced_once() -> None:
    job = Cluster(2, automatic=False)
    for rank in (0, 1):
        job.up(rank)
        job.join(rank)
    for rank, _, body in job.inbox:
        job.read(rank, body)
    job.stall(job.evidence(0), job.evidence(1, state="T"))
    assert [type(order) for order in job.orders] == [Kill, Replace]
    for order in list(job.orders):
        job.obey(order)
    job.join(0)
    job.join(1)
    assert job.goes[2].keys() == {0, 1}
    assert len(job.all(Replace)) == 1


def test_two_hung_ranks_are_both_replaced() -> None:
    job = running(4)
    job.stall(*(job.evidence(rank, seq=90 if rank in (1, 2) else 100) for rank in range(4)))
    assert (job.running, job.incs) == (2, [0, 1, 1, 0])
    assert len(job.all(Replace)) == 2
    assert len(job.emitted(events.RestartCause)) == 1


def test_a_stall_with_nobody_to_blame_restarts_the_round_and_names_nobody() -> None:
    job = running(3)
    job.stall(*(job.evidence(rank) for rank in range(3)))
    job.wait(SETTLE_S + 0.1)
    assert (job.running, job.incs) == (2, [0, 0, 0])
    assert (job.cause.cause, job.cause.guilty) == ("unknown", -1)
    assert job.emitted(events.RankHung) == []


def test_with_report_only_a_hang_is_written_down_and_nothing_is_done() -> None:
    job = running(2, hangs("report"))
    job.stall(job.evidence(0), job.evidence(1, seq=90))
    assert job.running == 1
    assert not job.all(Kill) and not job.all(Replace) and not job.all(Abort)
    assert len(job.emitted(events.RankHung)) == 1
    assert "rank 1 entered fewer collectives" in job.notices("fail")[0]


def test_a_stall_of_old_processes_or_of_a_round_that_is_over_does_not_count() -> None:
    job = running()
    old: list[Evidence] = [job.evidence(0), job.evidence(1, seq=90)]
    job.die(0)
    job.die(1)
    assert (job.running, job.incs) == (3, [1, 1])
    job.stall(*old)
    assert (job.running, job.incs) == (3, [1, 1])
    job.stuck = {0}
    job.fail(1)
    job.stall(job.evidence(0, state="T"), job.evidence(1))
    assert job.all(Kill) == []
