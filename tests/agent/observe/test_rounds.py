"""Rounds and failures as another launcher's ranks show them; time is given, nothing runs."""

from __future__ import annotations

import pytest

from keepstep import events as ev
from keepstep.shm import Phase
from keepstep.wire.messages import Evidence, Notice, Stalled
from tests.agent.observe.watched_rounds import FAILED, LOST, Run, config_of

# --- rounds --------------------------------------------------------------------------------------


def test_a_round_is_ready_when_all_have_joined_and_it_is_known_where_it_goes_on(run: Run) -> None:
    assert run.data("round.begin") == [{"reason": "the run starts"}]
    [ready], [head] = run.data("round.ready"), run.heads("round.ready")
    assert ready == {"pids": {"0": 101, "1": 102}, "resume": 6}
    assert (head["round"], head["t"]) == (1, 1000.0 + 1e6)
    assert run.state.running


def test_what_was_restored_says_where_a_round_goes_on() -> None:
    made = Run(config_of())
    made.start()
    made.join(3)
    assert made.data("round.ready") == []
    made.tell(0, ev.RestoreEnd(tier="storage", s=0.1, bytes=1), round=3, step=40)
    assert made.data("round.ready")[0]["resume"] == 40
    assert made.state.committed == 40
    assert [one.text for one in made.said if isinstance(one, Notice)] == [
        "round 3: 2 ranks, resuming after step 40"
    ]
    made.close()


def test_a_rank_in_step_1_says_that_nothing_was_restored() -> None:
    made = Run(config_of())
    made.start()
    made.join(1)
    made.boards[0].begin_step(1, made.now)
    made.pass_time(0.05)
    assert made.data("round.ready")[0]["resume"] == 0
    made.close()


def test_joins_of_a_round_that_others_never_reached_count_for_nothing(run: Run) -> None:
    run.tell(1, FAILED)
    run.join(2, 0)
    run.join(3)
    run.step(3, 6)
    assert [head["round"] for head in run.heads("round.ready")] == [1, 3]
    assert [head["round"] for head in run.heads("round.begin")] == [1, 2, 3]


# --- the level -----------------------------------------------------------------------------------


def test_where_all_processes_join_again_the_level_is_rerun(run: Run) -> None:
    run.tell(1, FAILED, step=8)
    run.tell(0, LOST, step=8)
    assert run.causes == []  # what the launcher makes of it is not known yet
    run.join(2)
    assert run.causes == [("exception", 1, "rerun")]
    run.step(2, 6)
    assert run.data("restart.end") == [{"resume": 5, "first_step": 6}]
    assert run.data("restart.begin") == [{"first_kind": "exception"}]


def test_where_the_launcher_has_to_help_out_it_is_one_restart_of_level_respawn(run: Run) -> None:
    run.tell(1, FAILED, step=8)
    run.join(2, 1)
    run.now += 0.1
    run.end(0, 1)
    assert run.causes == [("exception", 1, "respawn")]
    run.end(1, -15)
    run.start()
    run.join(3)
    run.step(3, 6)
    assert len(run.data("restart.begin")) == len(run.causes) == len(run.data("restart.end")) == 1
    assert [(d["code"], d.get("by_us", False)) for d in run.data("rank.exit")] == [
        (1, False),
        (-15, True),
    ]


def test_the_level_is_told_at_the_latest_a_second_after_the_cause_has_settled(run: Run) -> None:
    run.tell(1, FAILED, step=8)
    run.pass_time(1.9)
    assert run.causes == []
    run.pass_time(0.2)
    assert run.causes == [("exception", 1, "rerun")]


def test_without_in_process_restart_the_level_is_known_at_once() -> None:
    made = Run(config_of(restart=""))
    made.start()
    made.join(1)
    made.step(1, 7)
    made.tell(1, FAILED, step=8)
    made.end(1, 1)
    made.end(0, -15)
    assert made.causes == [("exception", 1, "respawn")]
    made.close()


# --- the cause -----------------------------------------------------------------------------------


def test_a_killed_rank_is_named_at_once_and_those_the_launcher_ends_are_not(run: Run) -> None:
    run.end(1, -9)
    assert run.causes == [("killed", 1, "respawn")]
    run.end(0, -15)
    assert len(run.causes) == 1
    assert [d.get("by_us", False) for d in run.data("rank.exit")] == [False, True]


@pytest.mark.parametrize(("after_s", "by_launcher"), [(0.5, False), (2.9, True)])
def test_a_sigkill_is_the_launcher_s_only_when_sigterm_had_its_time(
    run: Run, after_s: float, by_launcher: bool
) -> None:
    run.end(1, -9)
    run.pass_time(after_s)
    run.end(0, -9)
    assert [d.get("by_us", False) for d in run.data("rank.exit")] == [False, by_launcher]


@pytest.mark.parametrize(
    ("phase", "silent_s", "cause"),
    [
        (Phase.STEP, 2.9, "killed"),
        (Phase.STEP, 3.1, "hang"),
        (Phase.LOAD, 3.1, "killed"),  # loading has no limit that the launcher keeps
    ],
)
def test_a_rank_killed_after_a_long_silence_in_a_step_was_ended_for_it(
    run: Run, phase: Phase, silent_s: float, cause: str
) -> None:
    run.enter(1, phase)
    run.pass_time(silent_s)
    run.end(1, -9)
    assert [found for found, _, _ in run.causes] == [cause]
    assert run.causes[0][1] == 1


def test_a_restart_that_nobody_explains_has_no_known_cause(run: Run) -> None:
    run.join(2)
    assert run.causes == [("unknown", -1, "rerun")]
    assert run.data("restart.begin") == [{"first_kind": "timeout"}]


def test_processes_that_are_new_without_an_end_that_was_seen_are_a_restart_too(run: Run) -> None:
    run.start()
    run.join(2)
    run.step(2, 1)
    assert run.causes == [("unknown", -1, "respawn")]


def test_a_checkpoint_error_that_no_restart_helps_against_ends_the_run(run: Run) -> None:
    run.tell(0, ev.RankFailed(failure="save", error="disk full", location="", fatal=65))
    assert run.ends == [65]
    assert run.causes == [("save", 0, "stop")]


def test_an_error_before_the_script_joins_stops_the_run_when_it_comes_again() -> None:
    made = Run(config_of())
    for _ in range(2):
        made.start()
        made.tell(0, FAILED, round=None)
        made.end(0, 1)
        made.end(1, -15)
    assert made.ends == [78]
    assert [level for _, _, level in made.causes] == ["respawn", "stop"]
    made.close()


def test_a_node_that_does_not_decide_writes_only_what_it_saw() -> None:
    made = Run(config_of(), decides=False)
    for _ in range(3):
        made.start()
        made.tell(0, FAILED, round=None)
        made.end(0, 1)
        made.end(1, -15)
    assert made.ends == []
    assert {kind for kind, _, _ in made.told} == {"rank.start", "rank.exit"}
    made.close()


def test_a_rank_that_never_joins_ends_the_run() -> None:
    made = Run(config_of(join_limit_s=30.0))
    made.start()
    made.join(1, 0)
    made.pass_time(29.0)
    assert made.ends == []
    made.pass_time(2.0)
    assert made.ends == [78]
    made.close()


# --- hangs ---------------------------------------------------------------------------------------


def test_a_hang_becomes_a_failure_when_the_launcher_ends_the_rank(run: Run) -> None:
    run.stall(5.0, 5.0)
    assert [head["rank"] for head in run.heads("rank.hung")] == [1]
    assert run.data("restart.begin") == []
    run.pass_time(1.0)
    run.end(1, -9)
    assert run.causes == [("hang", 1, "respawn")]
    assert run.data("rank.exit")[0]["by_us"] is True


def test_a_hang_from_which_nvrx_frees_the_rank_keeps_the_process(run: Run) -> None:
    run.stall(5.0, 5.0)
    run.enter(1, Phase.WAIT)
    run.tell(0, LOST, step=8)
    run.pass_time(5.0)
    assert run.causes == []  # NVRx may still end it
    run.join(2)
    assert run.causes == [("hang", 1, "rerun")]


def test_a_rank_that_goes_on_was_slow_and_not_hung(run: Run) -> None:
    run.stall(5.0, 5.0)
    run.pass_time(1.0)
    for rank in (0, 1):
        run.enter(rank, Phase.STEP)
    run.end(0, -9)
    assert run.causes == [("killed", 0, "respawn")]
    assert run.data("rank.exit")[0].get("by_us", False) is False


def test_a_stall_without_a_guilty_rank_is_explained_by_who_waited_first(run: Run) -> None:
    ranks = [
        Evidence(
            rank=rank,
            inc=0,
            idle_s=idle,
            limit_s=3.0,
            beat_age_s=0.0,
            state="S",
            phase="step",
            step=8 + rank,
            seq=10,
            seqs={"a": 10 - rank, "b": 20 + rank},
        )
        for rank, idle in enumerate((5.0, 4.0))
    ]
    run.rounds.failures.stalled(Stalled(ranks=ranks), run.now)
    assert run.data("rank.hung") == []
    run.join(2)
    assert run.causes == [("timeout", 1, "rerun")]


# --- the end -------------------------------------------------------------------------------------


def test_after_a_stop_notice_a_failure_ends_the_run(run: Run) -> None:
    run.state.signal = "SIGTERM"
    run.tell(1, FAILED, step=8)
    assert run.ends == [75]
    assert run.data("restart.begin") == []
    run.end(1, 1)
    assert run.data("rank.exit")[0]["by_us"] is True


def test_what_the_launcher_did_not_recover_from_is_the_last_failure(run: Run) -> None:
    run.tell(1, FAILED, step=8)
    found = run.rounds.failures.gave_up(run.now)
    assert found is not None
    assert (found.cause, found.guilty) == ("exception", 1)
    assert run.causes == [("exception", 1, "stop")]


def test_a_launcher_that_ends_without_any_failure_is_explained_by_nothing(run: Run) -> None:
    assert run.rounds.failures.gave_up(run.now) is None
    assert run.causes == []


def test_a_hang_that_only_the_next_round_answers_began_before_it(run: Run) -> None:
    run.stall(5.0, 5.0)
    run.join(2)  # NVRx freed the ranks so fast that none of them told a failure
    (begun,) = run.heads("restart.begin")
    ready = [head["t"] for head in run.heads("round.ready") if head["round"] == 2]
    begins = [head["t"] for head in run.heads("round.begin") if head["round"] == 2]
    assert begun["t"] is not None and begun["round"] == 1
    assert all(begun["t"] < t for t in (*begins, *ready))
    assert run.causes == [("hang", 1, "rerun")]
