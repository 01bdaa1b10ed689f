from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest

from keepstep import events
from keepstep.config import Config
from keepstep.errors import CheckpointNotFound
from keepstep.wire.messages import (
    Abort,
    Evidence,
    Finish,
    Go,
    Join,
    Kill,
    RankDown,
    Replace,
    Returned,
    StopAt,
)
from tests.coordinator.cluster import Cluster, config

SETTLE_S = Config().restart.settle_s
LIMIT = Config().restart


def running(world: int = 2, settings: Config | None = None, **more: Any) -> Cluster:
    job = Cluster(world, settings, **more).start()
    assert job.running == 1
    return job


def hangs(report: Literal["restart", "report"]) -> Config:
    base = Config()
    return dataclasses.replace(base, heartbeat=dataclasses.replace(base.heartbeat, on_hang=report))


# --- forming -------------------------------------------------------------------------------------


def test_the_first_round_begins_when_all_ranks_have_joined() -> None:
    job = Cluster(3)
    job.up(0)
    job.up(2)
    assert job.all(Go) == []
    job.up(1)
    assert job.all(Go) == [Go(term=1, round=1, resume=0, folder="")] * 3
    assert job.running == 1
    assert [type(e.data) for e in job.events] == [
        events.RoundBegin,
        *[events.RankJoined] * 3,
        events.RoundReady,
    ]
    assert job.emitted(events.RoundReady)[0].pids == {"0": 1001, "1": 1002, "2": 1003}


def test_a_run_that_is_continued_resumes_from_its_newest_checkpoint() -> None:
    job = running(checkpoints=[(5, "a"), (10, "b")])
    assert job.all(Go)[0] == Go(term=1, round=1, resume=10, folder="b")
    assert job.emitted(events.RoundReady)[0].resume == 10
    assert job.notices("go") == ["round 1: 2 ranks, resuming after step 10"]


def test_a_round_that_is_not_the_first_ends_its_restart_with_the_first_step_of_all() -> None:
    job = running()
    job.step(0)
    job.step(1)
    assert job.emitted(events.RestartEnd) == []
    job.fail(0)
    assert job.running == 2
    job.step(0, 6)
    assert job.emitted(events.RestartEnd) == []
    job.step(1, 6)
    job.step(1, 7)
    assert job.emitted(events.RestartEnd) == [events.RestartEnd(resume=0, first_step=1)]
    assert job.notices("ready") == ["round 2: all 2 ranks train again"]


def test_a_process_that_never_reaches_keepstep_run_ends_the_job() -> None:
    job = Cluster()
    job.deaf = {1}
    job.start()
    job.wait(LIMIT.join_limit_s - 1)
    assert job.end is None
    job.wait(2)
    assert job.end and job.end.exit_code == 78
    assert "rank 1 did not reach keepstep.run" in job.end.reason


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


# --- checkpoints ---------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_refused_and_the_older_one_taken() -> None:
    job = running(checkpoints=[(5, "old"), (10, "new")])
    job.fail(1, "checkpoint", "CheckpointCorrupt: weight differs", step=10)
    assert job.running == 2
    assert job.goes[2][0][1] == Go(term=1, round=2, resume=5, folder="old")
    assert job.emitted(events.CheckpointUnusable) == [
        events.CheckpointUnusable(folder="new", error="CheckpointCorrupt: weight differs")
    ]
    job.fail(0)
    assert job.goes[3][0][1].resume == 5


def test_a_checkpoint_that_every_rank_refuses_is_refused_once() -> None:
    job = running(checkpoints=[(5, "old"), (10, "new")])
    job.stuck = {0, 1}
    job.fail(0, "checkpoint", "CheckpointCorrupt: weight differs")
    job.fail(1, "checkpoint", "CheckpointCorrupt: weight differs")
    job.join(0)
    job.join(1)
    assert job.goes[2][0][1].folder == "old"
    assert len(job.emitted(events.CheckpointUnusable)) == 1


def test_when_nothing_can_be_resumed_from_the_job_ends_and_says_why() -> None:
    job = running(checkpoints=[(5, "old")])
    job.storage.error = CheckpointNotFound("none of 1 checkpoints can be used")
    job.fail(0, "checkpoint", "CheckpointCorrupt: a")
    assert list(job.goes) == [1]
    assert job.end and (job.end.exit_code, job.end.graceful) == (65, False)
    assert "none of 1 checkpoints can be used" in job.end.reason


def test_a_round_that_cannot_be_written_down_does_not_begin() -> None:
    job = running(checkpoints=[(5, "old")])
    job.storage.full = OSError(28, "No space left on device")
    job.fail(0)
    assert list(job.goes) == [1]
    assert job.end and (job.end.exit_code, job.end.graceful) == (65, False)
    assert "round 2 cannot begin: storage failed" in job.end.reason


def test_storage_is_told_what_each_round_resumes_from_before_any_rank_goes() -> None:
    job = running(checkpoints=[(5, "old")])
    job.commit(job.stage(8))
    job.fail(0)
    assert job.storage.resumes == {1: 5, 2: 8}


def test_a_restart_waits_for_a_save_that_needs_no_rank_any_more() -> None:
    job = running()
    version = job.stage(4)
    job.die(1)
    assert list(job.goes) == [1]
    job.commit(version)
    assert job.goes[2][0][1].resume == 4


def test_a_restart_does_not_wait_long_for_such_a_save() -> None:
    job = running()
    job.stage(4)
    job.die(1)
    job.wait(LIMIT.save_wait_s - 0.5)
    assert list(job.goes) == [1]
    job.wait(1)
    assert job.goes[2][0][1].resume == 0
    assert not job.saves.pending(4)  # closed: it is newer than what the round resumes from


def test_a_restart_does_not_wait_for_a_save_that_a_rank_never_staged() -> None:
    job = running()
    job.stage(4, [0])
    job.die(1)
    assert job.running == 2


# --- the end -------------------------------------------------------------------------------------


def test_the_job_is_over_when_every_rank_has_returned() -> None:
    job = running()
    job.finish(0)
    assert job.end is None
    job.finish(1)
    assert job.all(Finish) == [Finish(exit_code=0)] * 2
    assert job.end and (job.end.exit_code, job.end.graceful) == (0, True)
    job.die(0, 0)
    job.tick()


def test_the_end_waits_for_the_last_save() -> None:
    job = running()
    version = job.stage(30)
    job.finish(0, saving=30)
    job.finish(1, saving=30)
    assert job.end is None
    job.commit(version)
    assert job.end and job.end.exit_code == 0


def test_a_last_save_that_failed_is_not_success() -> None:
    job = running()
    version = job.stage(30)
    job.finish(0, saving=30)
    job.finish(1, saving=30)
    job.saves.failed(version, "no space left")
    job.tick()
    assert job.all(Finish) == [Finish(exit_code=65)] * 2
    assert job.end and job.end.exit_code == 65
    assert "the last save (step 30) did not commit" in job.end.reason


def test_a_last_save_that_failed_is_not_made_good_by_a_damaged_one_of_the_same_step() -> None:
    job = running(checkpoints=[(5, "old"), (30, "damaged")])
    job.fail(0, "checkpoint", "CheckpointCorrupt: a", step=30)
    assert job.goes[2][0][1].resume == 5
    version = job.stage(30)
    job.finish(0, saving=30)
    job.finish(1, saving=30)
    job.saves.failed(version, "no space left")
    job.tick()
    assert job.end and job.end.exit_code == 65


def test_ranks_that_have_returned_come_back_when_another_fails() -> None:
    job = running(3)
    job.finish(0)
    job.finish(2)
    job.fail(1)
    assert job.running == 2
    assert job.incs == [0, 0, 0]
    for rank in range(3):
        job.finish(rank)
    assert job.end and job.end.exit_code == 0


def test_a_return_that_crosses_the_abort_does_not_count() -> None:
    job = running()
    job.stuck = {0}
    job.fail(1)
    job.finish(0)
    assert job.end is None and job.running == 0
    job.join(0)
    assert job.running == 2


def test_a_job_that_is_over_stays_over() -> None:
    job = running()
    job.fail(0, fatal=70)
    assert job.end
    before = len(job.sent)
    job.rounds.fail(65, "later")
    job.fail(1)
    job.join(1)
    job.die(0)
    job.stop()
    job.stall(job.evidence(1))
    job.step(1)
    job.wait(1000)
    assert len(job.sent) == before


def test_failing_from_outside_ends_the_job() -> None:
    job = running()
    job.rounds.fail(65, "4 saves in a row failed")
    job.pump()
    assert job.end and (job.end.exit_code, job.end.graceful) == (65, False)


# --- stopping on notice --------------------------------------------------------------------------


def test_a_stop_is_agreed_on_and_the_job_ends_after_its_save() -> None:
    job = running()
    job.stop(live=5)
    assert job.all(StopAt) == [StopAt(step=7, final=False)] * 2
    job.ack(0, step=7, live=5)
    assert len(job.all(StopAt)) == 2
    job.ack(1, step=7, live=7)
    assert job.all(StopAt)[2:] == [StopAt(step=7, final=True)] * 2
    assert job.notices("stop") == ["stopping after step 7"]
    version = job.stage(7)
    job.finish(0, saving=7)
    job.finish(1, saving=7)
    job.commit(version)
    assert job.end and (job.end.exit_code, job.end.graceful) == (75, True)
    assert job.end.reason == "stopped on SIGTERM; step 7 is committed"


def test_a_rank_that_had_passed_the_step_makes_a_later_one() -> None:
    job = running()
    job.stop(live=5)
    job.ack(0, step=7, live=6)
    job.ack(1, step=7, live=8)
    assert job.all(StopAt)[2:] == [StopAt(step=12, final=False)] * 2
    job.ack(0, step=7, live=7)  # an answer to the old question
    job.ack(0, step=12, live=9)
    assert not any(stop.final for stop in job.all(StopAt))
    job.ack(1, step=12, live=9)
    assert job.all(StopAt)[-1] == StopAt(step=12, final=True)


def test_a_second_request_changes_nothing() -> None:
    job = running()
    job.stop()
    before = len(job.sent)
    job.stop(live=9)
    assert len(job.sent) == before


def test_an_answer_of_a_process_that_is_gone_does_not_count() -> None:
    job = running()
    job.die(0)
    assert (job.running, job.incs) == (2, [1, 0])
    job.stop(live=5)
    job.ack(0, step=7, live=5, inc=0)
    job.ack(1, step=7, live=5)
    assert not any(stop.final for stop in job.all(StopAt))
    job.ack(0, step=7, live=5)
    assert job.all(StopAt)[-1].final


def test_a_stop_during_a_restart_ends_the_job_at_once() -> None:
    job = running(checkpoints=[(4, "a")])
    job.stuck = {1}
    job.fail(0)
    job.stop()
    assert job.end and (job.end.exit_code, job.end.graceful) == (75, False)
    assert "during a restart; newest committed step 4" in job.end.reason


def test_a_failure_after_a_stop_request_ends_the_job() -> None:
    job = running(checkpoints=[(4, "a")])
    job.stop()
    job.die(1)
    assert job.end and job.end.exit_code == 75
    assert "after a failure; newest committed step 4" in job.end.reason


def test_a_stop_while_the_first_round_forms_ends_the_job_before_it_trains() -> None:
    job = Cluster()
    job.up(0)
    job.stop()
    assert job.end and job.end.exit_code == 75
    job = Cluster()
    job.deaf = {0, 1}
    job.start()
    job.stop()  # nobody has joined: it may be a script that does not use keepstep.run
    assert job.end is None
    job.join(0)
    job.join(1)
    assert job.goes == {}
    assert job.end and job.end.exit_code == 75


# --- messages that come too late -----------------------------------------------------------------


def test_messages_of_old_incarnations_are_ignored() -> None:
    job = running()
    job.die(1)
    assert (job.running, job.incs) == (2, [0, 1])
    before = (len(job.sent), len(job.events))
    rounds, now = job.rounds, job.now
    rounds.join(1, Join(inc=0, after_round=1), now)
    rounds.returned(1, Returned(inc=0, round=1, step=30, saving=0), now)
    rounds.rank_down(RankDown(rank=1, inc=0, code=-9, oom=False, by_us=False, step=5, t=now), now)
    job.fail(1, inc=0)
    job.tick()
    assert (len(job.sent), len(job.events)) == before
    assert job.running == 2


@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_messages_about_ranks_that_do_not_exist_are_ignored(rank: int) -> None:
    job = running()
    before = len(job.sent)
    job.rounds.join(rank, Join(inc=0, after_round=1), job.now)
    job.rounds.rank_down(
        RankDown(rank=rank, inc=0, code=-9, oom=False, by_us=False, step=5, t=job.now), job.now
    )
    job.pump()
    assert len(job.sent) == before


def test_a_return_from_an_older_round_does_not_count() -> None:
    job = running()
    job.fail(0)
    job.rounds.returned(0, Returned(inc=0, round=1, step=3, saving=0), job.now)
    job.finish(1)
    assert job.end is None


# --- scripts that do not use keepstep.run --------------------------------------------------------


def plain(world: int = 2, settings: Config | None = None) -> Cluster:
    return Cluster(world, settings, adopted=False).start()


def test_plain_scripts_that_all_end_well_are_a_finished_job() -> None:
    job = plain()
    job.die(0, 0)
    assert job.end is None
    job.die(1, 0)
    assert job.end and (job.end.exit_code, job.end.graceful) == (0, True)
    assert job.all(Go) == []


def test_a_plain_script_that_steps_is_in_its_first_round() -> None:
    job = plain()
    job.step(0)
    assert [ready.resume for ready in job.emitted(events.RoundReady)] == [0]
    job.step(1)
    assert len(job.emitted(events.RoundReady)) == 1


@pytest.mark.parametrize("stepped", [False, True])
def test_when_one_plain_script_dies_all_are_replaced_and_the_second_round_runs(
    stepped: bool,
) -> None:
    job = plain(3)
    if stepped:
        job.step(0)
    job.die(1)
    assert (job.cause.cause, job.cause.level) == ("killed", "respawn")
    assert job.incs == [1, 1, 1]
    assert sorted(order.rank for order in job.all(Replace)) == [0, 1, 2]
    ready = job.emitted(events.RoundReady)[-1]
    assert ready.pids == {str(rank): process.pid for rank, process in enumerate(job.processes)}
    assert job.events[-1].round == 2
    for rank in range(3):
        job.die(rank, 0)
    assert job.end and job.end.exit_code == 0


def test_a_plain_script_that_ended_well_is_started_again_with_the_others() -> None:
    job = plain()
    job.die(0, 0)
    job.die(1, -9)
    assert job.incs == [1, 1]


def test_a_plain_script_that_failed_is_not_forgotten_when_the_others_end_well() -> None:
    job = plain()
    job.die(1, 3)
    job.die(0, 0)
    job.wait(SETTLE_S + 0.1)
    assert job.end is None
    assert (job.cause.cause, job.cause.guilty) == ("exit", 1)
    assert job.incs == [1, 1]


def test_a_plain_script_that_fails_in_the_same_way_again_ends_the_job() -> None:
    job = plain()
    job.die(1, 3)
    job.wait(SETTLE_S + 0.1)
    assert job.end is None
    job.die(1, 3)
    job.wait(SETTLE_S + 0.1)
    assert job.end and job.end.exit_code == 78


@pytest.mark.parametrize("stepped", [False, True])
def test_plain_scripts_end_in_their_own_way_after_a_stop(stepped: bool) -> None:
    job = plain()
    if stepped:
        job.step(0)
    job.stop()
    assert job.end is None
    job.die(0, -15)
    assert job.end is None
    job.die(1, 0)
    assert job.end and (job.end.exit_code, job.end.graceful) == (75, True)
    assert "after SIGTERM" in job.end.reason


def test_a_hung_plain_script_is_ended_and_all_are_replaced() -> None:
    job = plain()
    job.step(0)
    job.stall(job.evidence(0, seq=0), job.evidence(1, state="T", seq=0))
    assert (job.cause.cause, job.cause.level, job.incs) == ("hang", "respawn", [1, 1])


def test_a_script_that_steps_before_it_calls_keepstep_run_gets_its_round() -> None:
    job = Cluster()
    job.deaf = {0, 1}
    job.start()
    job.step(0)
    job.step(1)
    job.join(0)
    job.join(1)
    assert job.running > 0


def test_a_rank_that_ended_well_before_the_others_joined_is_not_waited_for_for_ever() -> None:
    job = Cluster()
    job.deaf = {0, 1}
    job.start()
    job.die(0, 0)
    job.deaf = set()
    job.join(1)
    assert (job.cause.cause, job.cause.guilty, job.cause.level) == ("exit", 0, "rank")
    assert (job.running, job.incs) == (1, [1, 0])
