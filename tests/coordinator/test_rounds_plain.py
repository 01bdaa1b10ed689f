from __future__ import annotations

import pytest

from keepstep import events
from keepstep.config import Config
from keepstep.wire.messages import (
    Go,
    Replace,
)
from tests.coordinator.cluster import Cluster

SETTLE_S = Config().restart.settle_s
LIMIT = Config().restart


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
