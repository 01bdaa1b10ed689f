"""Rounds and failures as another launcher's ranks show them; time is given, nothing runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from keepstep import events as ev
from keepstep import shm
from keepstep.agent.observe.rounds import Rounds
from keepstep.agent.observe.seats import Occupant
from keepstep.agent.observe.state import State
from keepstep.config import Config
from keepstep.config.settings import EngineSettings, RestartSettings
from keepstep.events import Event, EventData
from keepstep.shm import Phase
from keepstep.wire.messages import Evidence, JobEnd, Notice, Stalled

_FAILED = ev.RankFailed(failure="exception", error="ValueError: x", location="t.py:1", fresh=True)
_LOST = ev.RankFailed(failure="peer_lost", error="closed by peer", location="")
_KILL_AFTER_S = 3.0


class _Run:
    """Ranks of a node on a clock that the test moves."""

    def __init__(self, config: Config, world: int = 2, *, decides: bool = True) -> None:
        self.now = 1000.0
        self.told: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self.state = State(world=world, config=config, decides=decides)
        self.rounds = Rounds(
            self.state, self._emit, kill_after_s=_KILL_AFTER_S, hard_s=10.0, silent_s=3.0
        )
        self.boards = []
        for _ in range(world):
            fd = shm.create()
            self.boards.append(shm.Board(fd))
            os.close(fd)
        self.who: dict[int, Occupant] = {}
        self._pids = 100
        self.said: list[Notice | JobEnd] = []
        self.rounds.begin()

    def _emit(
        self,
        data: EventData,
        *,
        step: int | None = None,
        rank: int | None = None,
        round: int | None = None,
        t: float | None = None,
    ) -> None:
        head = {"step": step, "rank": rank, "round": round, "t": t}
        self.told.append((data.kind, msgspec.to_builtins(data), head))

    def close(self) -> None:
        for board in self.boards:
            board.close()

    # --- what happens -----------------------------------------------------------------------------

    def start(self, *ranks: int) -> None:
        """New processes take the boards of these ranks (none given: of all)."""
        for rank in ranks or range(len(self.boards)):
            self._pids += 1
            inc = self.boards[rank].take(self._pids)
            self.who[rank] = Occupant(
                ticket=self._pids,
                rank=rank,
                inc=inc,
                pid=self._pids,
                board=self.boards[rank],
                file="",
                logs={},
            )
            self.rounds.started(self.who[rank], self.now)
        self._take()

    def tell(self, rank: int, data: EventData, *, round: int | None = 1, step: int = 0) -> None:
        """A rank writes an event."""
        event = Event(
            v=1,
            run="r",
            src="rank",
            node=0,
            t=self.now + 1e6,
            mono=self.now,
            seq=1,
            kind=data.kind,
            rank=rank,
            round=round,
            step=step,
            data=msgspec.to_builtins(data),
        )
        self.rounds.told(self.who[rank], event, self.now)
        self._take()

    def join(self, number: int, *ranks: int) -> None:
        """These ranks (none given: all) join a round."""
        for rank in ranks or range(len(self.boards)):
            self.boards[rank].enter_round(number, 0)
            self._note(rank, Phase.LOAD)
            pid = self.who[rank].pid
            self.tell(rank, ev.RankJoined(pid=pid), round=number)

    def step(self, number: int, step: int) -> None:
        """All ranks complete a step of round ``number``."""
        for rank in range(len(self.boards)):
            self.boards[rank].begin_step(step, self.now)
            self._note(rank, Phase.STEP)
            self.tell(rank, ev.StepEnd(s=0.1), round=number, step=step)

    def _note(self, rank: int, phase: Phase) -> None:
        who = self.who[rank]
        who.phase, who.progress, who.round = phase, self.now, who.board.round
        who.step = who.board.step

    def enter(self, rank: int, phase: Phase) -> None:
        """The observer looks at a board and sees the rank in ``phase`` now."""
        self.boards[rank].enter(phase, self.now)
        self._note(rank, phase)
        self.rounds.progress(self.now)

    def end(self, rank: int, code: int, *, seen: bool = True) -> None:
        """A process ends."""
        self.who[rank].code = code
        self.rounds.ended(self.who[rank], code, seen, self.now)
        self._take()

    def stall(self, *idle: float) -> None:
        """All ranks stand still, each for so long; rank 1 has entered fewer collectives."""
        ranks = [
            Evidence(
                rank=rank,
                inc=self.who[rank].inc,
                idle_s=seconds,
                limit_s=4.0,
                beat_age_s=0.0,
                state="S",
                phase="step",
                step=8,
                seq=10 - rank,
                seqs={"0": 10 - rank},
            )
            for rank, seconds in enumerate(idle)
        ]
        self.rounds.failures.stalled(Stalled(ranks=ranks), self.now)
        self._take()

    def pass_time(self, seconds: float) -> None:
        """Nothing happens for a while."""
        self.now += seconds
        self.rounds.progress(self.now)
        self._take()

    # --- what is said -----------------------------------------------------------------------------

    def _take(self) -> None:
        self.said += self.rounds.take()

    def data(self, kind: str) -> list[dict[str, Any]]:
        """The data of all events of ``kind``."""
        return [data for name, data, _ in self.told if name == kind]

    def heads(self, kind: str) -> list[dict[str, Any]]:
        """The heads of all events of ``kind``."""
        return [head for name, _, head in self.told if name == kind]

    @property
    def causes(self) -> list[tuple[str, int, str]]:
        """(cause, guilty, level) of each restart."""
        return [(d["cause"], d["guilty"], d["level"]) for d in self.data("restart.cause")]

    @property
    def ends(self) -> list[int]:
        """Exit codes with which the run is to end."""
        return [one.exit_code for one in self.said if isinstance(one, JobEnd)]


def _config(restart: str = "nvrx", **restarts: Any) -> Config:
    return dataclasses.replace(
        Config(),
        engine=EngineSettings(launcher="nvrx", restart="nvrx" if restart == "nvrx" else ""),
        restart=RestartSettings(settle_s=1.0, **restarts),
    )


@pytest.fixture
def run() -> Iterator[_Run]:
    """In round 1, after step 7; NVRx restarts in the processes."""
    made = _Run(_config())
    made.start()
    made.join(1)
    made.step(1, 7)
    yield made
    made.close()


# --- rounds --------------------------------------------------------------------------------------


def test_a_round_is_ready_when_all_have_joined_and_it_is_known_where_it_goes_on(run: _Run) -> None:
    assert run.data("round.begin") == [{"reason": "the run starts"}]
    [ready], [head] = run.data("round.ready"), run.heads("round.ready")
    assert ready == {"pids": {"0": 101, "1": 102}, "resume": 6}
    assert (head["round"], head["t"]) == (1, 1000.0 + 1e6)
    assert run.state.running


def test_what_was_restored_says_where_a_round_goes_on() -> None:
    made = _Run(_config())
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
    made = _Run(_config())
    made.start()
    made.join(1)
    made.boards[0].begin_step(1, made.now)
    made.pass_time(0.05)
    assert made.data("round.ready")[0]["resume"] == 0
    made.close()


def test_joins_of_a_round_that_others_never_reached_count_for_nothing(run: _Run) -> None:
    run.tell(1, _FAILED)
    run.join(2, 0)
    run.join(3)
    run.step(3, 6)
    assert [head["round"] for head in run.heads("round.ready")] == [1, 3]
    assert [head["round"] for head in run.heads("round.begin")] == [1, 2, 3]


# --- the level -----------------------------------------------------------------------------------


def test_where_all_processes_join_again_the_level_is_rerun(run: _Run) -> None:
    run.tell(1, _FAILED, step=8)
    run.tell(0, _LOST, step=8)
    assert run.causes == []  # what the launcher makes of it is not known yet
    run.join(2)
    assert run.causes == [("exception", 1, "rerun")]
    run.step(2, 6)
    assert run.data("restart.end") == [{"resume": 5, "first_step": 6}]
    assert run.data("restart.begin") == [{"first_kind": "exception"}]


def test_where_the_launcher_has_to_help_out_it_is_one_restart_of_level_respawn(run: _Run) -> None:
    run.tell(1, _FAILED, step=8)
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


def test_the_level_is_told_at_the_latest_a_second_after_the_cause_has_settled(run: _Run) -> None:
    run.tell(1, _FAILED, step=8)
    run.pass_time(1.9)
    assert run.causes == []
    run.pass_time(0.2)
    assert run.causes == [("exception", 1, "rerun")]


def test_without_in_process_restart_the_level_is_known_at_once() -> None:
    made = _Run(_config(restart=""))
    made.start()
    made.join(1)
    made.step(1, 7)
    made.tell(1, _FAILED, step=8)
    made.end(1, 1)
    made.end(0, -15)
    assert made.causes == [("exception", 1, "respawn")]
    made.close()


# --- the cause -----------------------------------------------------------------------------------


def test_a_killed_rank_is_named_at_once_and_those_the_launcher_ends_are_not(run: _Run) -> None:
    run.end(1, -9)
    assert run.causes == [("killed", 1, "respawn")]
    run.end(0, -15)
    assert len(run.causes) == 1
    assert [d.get("by_us", False) for d in run.data("rank.exit")] == [False, True]


@pytest.mark.parametrize(("after_s", "by_launcher"), [(0.5, False), (2.9, True)])
def test_a_sigkill_is_the_launcher_s_only_when_sigterm_had_its_time(
    run: _Run, after_s: float, by_launcher: bool
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
    run: _Run, phase: Phase, silent_s: float, cause: str
) -> None:
    run.enter(1, phase)
    run.pass_time(silent_s)
    run.end(1, -9)
    assert [found for found, _, _ in run.causes] == [cause]
    assert run.causes[0][1] == 1


def test_a_restart_that_nobody_explains_has_no_known_cause(run: _Run) -> None:
    run.join(2)
    assert run.causes == [("unknown", -1, "rerun")]
    assert run.data("restart.begin") == [{"first_kind": "timeout"}]


def test_processes_that_are_new_without_an_end_that_was_seen_are_a_restart_too(run: _Run) -> None:
    run.start()
    run.join(2)
    run.step(2, 1)
    assert run.causes == [("unknown", -1, "respawn")]


def test_a_checkpoint_error_that_no_restart_helps_against_ends_the_run(run: _Run) -> None:
    run.tell(0, ev.RankFailed(failure="save", error="disk full", location="", fatal=65))
    assert run.ends == [65]
    assert run.causes == [("save", 0, "stop")]


def test_an_error_before_the_script_joins_stops_the_run_when_it_comes_again() -> None:
    made = _Run(_config())
    for _ in range(2):
        made.start()
        made.tell(0, _FAILED, round=None)
        made.end(0, 1)
        made.end(1, -15)
    assert made.ends == [78]
    assert [level for _, _, level in made.causes] == ["respawn", "stop"]
    made.close()


def test_a_node_that_does_not_decide_writes_only_what_it_saw() -> None:
    made = _Run(_config(), decides=False)
    for _ in range(3):
        made.start()
        made.tell(0, _FAILED, round=None)
        made.end(0, 1)
        made.end(1, -15)
    assert made.ends == []
    assert {kind for kind, _, _ in made.told} == {"rank.start", "rank.exit"}
    made.close()


def test_a_rank_that_never_joins_ends_the_run() -> None:
    made = _Run(_config(join_limit_s=30.0))
    made.start()
    made.join(1, 0)
    made.pass_time(29.0)
    assert made.ends == []
    made.pass_time(2.0)
    assert made.ends == [78]
    made.close()


# --- hangs ---------------------------------------------------------------------------------------


def test_a_hang_becomes_a_failure_when_the_launcher_ends_the_rank(run: _Run) -> None:
    run.stall(5.0, 5.0)
    assert [head["rank"] for head in run.heads("rank.hung")] == [1]
    assert run.data("restart.begin") == []
    run.pass_time(1.0)
    run.end(1, -9)
    assert run.causes == [("hang", 1, "respawn")]
    assert run.data("rank.exit")[0]["by_us"] is True


def test_a_hang_from_which_nvrx_frees_the_rank_keeps_the_process(run: _Run) -> None:
    run.stall(5.0, 5.0)
    run.enter(1, Phase.WAIT)
    run.tell(0, _LOST, step=8)
    run.pass_time(5.0)
    assert run.causes == []  # NVRx may still end it
    run.join(2)
    assert run.causes == [("hang", 1, "rerun")]


def test_a_rank_that_goes_on_was_slow_and_not_hung(run: _Run) -> None:
    run.stall(5.0, 5.0)
    run.pass_time(1.0)
    for rank in (0, 1):
        run.enter(rank, Phase.STEP)
    run.end(0, -9)
    assert run.causes == [("killed", 0, "respawn")]
    assert run.data("rank.exit")[0].get("by_us", False) is False


def test_a_stall_without_a_guilty_rank_is_explained_by_who_waited_first(run: _Run) -> None:
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


def test_after_a_stop_notice_a_failure_ends_the_run(run: _Run) -> None:
    run.state.signal = "SIGTERM"
    run.tell(1, _FAILED, step=8)
    assert run.ends == [75]
    assert run.data("restart.begin") == []
    run.end(1, 1)
    assert run.data("rank.exit")[0]["by_us"] is True


def test_what_the_launcher_did_not_recover_from_is_the_last_failure(run: _Run) -> None:
    run.tell(1, _FAILED, step=8)
    found = run.rounds.failures.gave_up(run.now)
    assert found is not None
    assert (found.cause, found.guilty) == ("exception", 1)
    assert run.causes == [("exception", 1, "stop")]


def test_a_launcher_that_ends_without_any_failure_is_explained_by_nothing(run: _Run) -> None:
    assert run.rounds.failures.gave_up(run.now) is None
    assert run.causes == []


def test_a_hang_that_only_the_next_round_answers_began_before_it(run: _Run) -> None:
    run.stall(5.0, 5.0)
    run.join(2)  # NVRx freed the ranks so fast that none of them told a failure
    (begun,) = run.heads("restart.begin")
    ready = [head["t"] for head in run.heads("round.ready") if head["round"] == 2]
    begins = [head["t"] for head in run.heads("round.begin") if head["round"] == 2]
    assert begun["t"] is not None and begun["round"] == 1
    assert all(begun["t"] < t for t in (*begins, *ready))
    assert run.causes == [("hang", 1, "rerun")]


# --- what may begin ------------------------------------------------------------------------------


def test_the_first_round_may_begin_and_the_next_one_not_before_a_failure(run: _Run) -> None:
    fresh = _Run(_config())
    assert fresh.rounds.admitted == 1
    fresh.close()
    assert run.rounds.admitted == 1


def test_the_next_round_may_begin_once_everybody_is_accounted_for(run: _Run) -> None:
    run.tell(1, _FAILED, step=8)
    run.tell(1, ev.RankLeft())
    assert run.rounds.admitted == 0  # rank 0 may be dying, and the exception a consequence
    run.tell(0, ev.RankLeft())
    assert run.rounds.admitted == 2
    run.join(2)
    run.step(2, 1)
    assert run.causes == [("exception", 1, "rerun")]
    assert run.rounds.admitted == 2


def test_the_next_round_may_begin_at_the_latest_when_the_cause_must_be_settled(run: _Run) -> None:
    run.tell(1, _FAILED, step=8)
    run.pass_time(0.9)
    assert run.rounds.admitted == 0
    run.pass_time(0.2)
    assert run.rounds.admitted == 2


@pytest.mark.parametrize("code", [64, 65])
def test_nothing_may_begin_after_an_error_that_no_restart_helps_against(
    run: _Run, code: int
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
    failed = msgspec.structs.replace(_FAILED, fresh=fresh)  # 78: the same in a fresh process
    made = _Run(_config(max_restarts=1))
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


def test_a_rank_that_is_leaving_its_process_is_waited_for(run: _Run) -> None:
    run.tell(0, _LOST, step=8)
    run.tell(0, ev.RankLeft())
    assert run.rounds.admitted == 0
    run.end(1, 7)
    assert run.causes == [("exit", 1, "respawn")]
    assert run.rounds.admitted == 2


def test_a_round_that_follows_without_a_word_is_judged_when_all_have_come(run: _Run) -> None:
    run.join(2, 0)
    assert run.rounds.admitted == 0
    run.join(2, 1)
    assert run.causes == [("unknown", -1, "rerun")]
    assert run.rounds.admitted == 2


def test_a_round_whose_number_is_higher_than_the_next_may_begin_too(run: _Run) -> None:
    run.tell(1, _FAILED, step=8)
    for rank in (0, 1):
        run.tell(rank, ev.RankLeft())
    run.join(4, 0)  # 2 and 3 came to nothing
    assert run.rounds.admitted == 4


def test_a_hang_is_a_failure_when_its_rank_has_left_the_round(run: _Run) -> None:
    run.stall(5.0, 5.0)
    run.pass_time(0.5)
    assert run.data("restart.begin") == []
    run.tell(1, ev.RankLeft())
    assert run.data("restart.begin") == [{"first_kind": "hang"}]
    assert run.rounds.admitted == 2  # a hang is nobody's consequence


def test_a_failure_before_all_have_joined_again_is_another_one(run: _Run) -> None:
    run.tell(1, _FAILED, step=8)
    for rank in (0, 1):
        run.tell(rank, ev.RankLeft())
    run.join(2, 0)
    wrong = ev.RankFailed(failure="exception", error="UsageError: x", location="", fatal=64)
    run.tell(0, wrong, round=2)
    run.pass_time(1.1)
    assert run.causes == [("exception", 1, "rerun"), ("exception", 0, "stop")]
    assert run.ends == [64]
    assert run.rounds.admitted == 0
