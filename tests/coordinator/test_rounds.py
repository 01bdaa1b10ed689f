from __future__ import annotations

import pytest

from keepstep import events
from keepstep.config import Config
from keepstep.errors import CheckpointNotFound
from keepstep.wire.messages import (
    Finish,
    Go,
    Join,
    Notice,
    RankDown,
    Returned,
    StopAt,
)
from tests.coordinator.cluster import Cluster, running

SETTLE_S = Config().restart.settle_s
LIMIT = Config().restart


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


def test_a_round_that_cannot_be_written_down_ends_the_job_before_anything_is_committed() -> None:
    job = running(checkpoints=[(5, "old")])
    job.fail(0)
    job.storage.full = OSError(28, "No space left on device")
    assert not job.rounds.loaded()
    job.pump()
    assert job.end and (job.end.exit_code, job.end.graceful) == (65, False)
    assert "round 2 cannot be written down: storage failed" in job.end.reason


def test_newer_checkpoints_are_abandoned_only_when_all_ranks_have_loaded_an_older_one() -> None:
    job = running(checkpoints=[(5, "old"), (8, "newer"), (9, "newest")])
    job.fail(0, "checkpoint", "CheckpointCorrupt: a")
    job.fail(0, "checkpoint", "CheckpointCorrupt: b")
    assert job.goes[3][0][1].folder == "old"
    assert job.storage.resumes == {}
    job.step(0, 6)
    assert job.storage.resumes == {}
    job.step(1, 6)
    assert job.storage.resumes == {3: 5}


def test_what_a_round_resumes_from_is_written_down_before_it_commits_anything() -> None:
    job = running(checkpoints=[(5, "old")])
    version = job.stage(8)
    assert job.storage.resumes == {}
    job.commit(version)
    job.fail(0)
    job.commit(job.stage(9))
    job.step(0, 10)
    job.step(1, 10)
    assert job.storage.resumes == {1: 5, 2: 8}


def test_a_round_can_resume_from_another_runs_checkpoint_without_a_step() -> None:
    job = running(checkpoints=[(0, "/elsewhere/dcp")])
    assert (job.goes[1][0][1].resume, job.goes[1][0][1].folder) == (0, "/elsewhere/dcp")
    said = [one.text for one in job.sent if isinstance(one, Notice)]
    assert "round 1: 2 ranks, resuming after step 0 from /elsewhere/dcp" in said


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
