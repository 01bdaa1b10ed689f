from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from keepstep.coordinator.saves import Asked, Ready, Saves, Settled
from keepstep.wire.types import Version

LIMIT_S = 60.0
WORLD = 3


def version(step: int = 5, round: int = 1, term: int = 1, run: str = "demo") -> Version:
    return Version(run=run, term=term, round=round, step=step, world=WORLD)


def saves() -> Saves:
    return Saves(WORLD, LIMIT_S)


def stage(state: Saves, which: Version, ranks: int = WORLD, now: float = 0.0) -> None:
    for rank in range(ranks):
        state.staged(rank, which, now)


def persist(state: Saves, which: Version, ranks: int = WORLD) -> Ready | None:
    """The shards of the first ``ranks`` ranks are durable; the last answer."""
    answers = [state.durable(rank, which, "folder", 10, 1.0) for rank in range(ranks)]
    assert not any(answers[:-1])
    return answers[-1]


def test_a_version_is_ready_when_the_last_shard_is_durable() -> None:
    state = saves()
    stage(state, version())
    assert persist(state, version(), 2) is None
    assert state.committed == 0
    ready = state.durable(2, version(), "folder", 10, 1.0)
    assert ready is not None
    assert (ready.version, ready.folder) == (version(), "folder")
    assert state.committed == 0


def test_a_committed_version_says_how_large_it_is_and_how_long_it_took() -> None:
    state = saves()
    stage(state, version(), now=100.0)
    persist(state, version())
    assert state.commit_done(version(), 102.5) == Settled(5, "", 30, 2.5, "folder")
    assert state.committed == 5
    assert not state.pending(5)
    assert state.commit_done(version(), 103.0) is None


def test_a_shard_told_twice_does_not_stand_for_another_rank_s() -> None:
    state = saves()
    stage(state, version())
    for _ in range(5):
        assert state.durable(0, version(), "folder", 10, 1.0) is None


def test_a_version_is_handed_to_the_committer_only_once() -> None:
    state = saves()
    stage(state, version())
    assert persist(state, version())
    assert state.durable(0, version(), "folder", 10, 1.0) is None


@pytest.mark.parametrize(
    "other", [version(round=2), version(term=2), version(step=6), version(run="other")]
)
def test_shards_of_different_versions_do_not_make_one_save(other: Version) -> None:
    state = saves()
    stage(state, version())
    stage(state, other)
    assert persist(state, version(), 2) is None
    assert state.durable(2, other, "other", 10, 1.0) is None


def test_several_saves_can_be_in_flight_and_finish_in_any_order() -> None:
    state = saves()
    stage(state, version(5))
    stage(state, version(6))
    assert persist(state, version(6))
    state.commit_done(version(6), 1.0)
    assert persist(state, version(5))
    state.commit_done(version(5), 2.0)
    assert state.committed == 6


def test_what_is_ready_names_the_folders_of_unfinished_saves() -> None:
    state = saves()
    stage(state, version(5))
    stage(state, version(10))
    ready = persist(state, version(5))
    assert ready is not None
    assert {"step-00000005", "step-00000010"} <= ready.in_flight


# --- failing -------------------------------------------------------------------------------------


def test_a_save_fails_once_and_later_shards_of_it_do_not_count() -> None:
    state = saves()
    stage(state, version())
    assert state.failed(version(), "no space") == Settled(5, "no space")
    assert state.failed(version(), "no space") is None
    assert persist(state, version()) is None
    assert state.failed_in_a_row == 1
    assert not state.pending(5)


def test_failures_in_a_row_end_with_a_save_that_works() -> None:
    state = saves()
    for step in (1, 2, 3):
        stage(state, version(step))
        state.failed(version(step), "no space")
    assert state.failed_in_a_row == 3
    stage(state, version(4))
    state.commit_done(version(4), 1.0)
    assert state.failed_in_a_row == 0


def test_a_save_that_takes_too_long_is_given_up_once() -> None:
    state = saves()
    stage(state, version(5), ranks=1, now=100.0)
    stage(state, version(6), now=130.0)
    assert state.late(100.0 + LIMIT_S) == []
    (settled,) = state.late(100.1 + LIMIT_S)
    assert (settled.step, settled.error) == (5, "not durable on all 3 ranks after 60 s")
    assert state.late(100.2 + LIMIT_S) == []
    assert state.pending(6)


# --- restarts ------------------------------------------------------------------------------------


def test_only_what_every_rank_has_staged_can_finish_without_them() -> None:
    state = saves()
    assert not state.will_finish()
    stage(state, version(), ranks=2)
    assert not state.will_finish()
    state.staged(2, version(), 0.0)
    assert state.will_finish()
    persist(state, version())
    assert state.will_finish()
    state.commit_done(version(), 1.0)
    assert not state.will_finish()


def test_a_restart_drops_what_is_newer_than_its_step() -> None:
    state = saves()
    for step in (4, 5, 6, 7):
        stage(state, version(step))
    assert state.resume(5, 2) == [6, 7]
    assert [step for step in range(10) if state.pending(step)] == [4, 5]
    assert state.committed == 5


def test_late_shards_of_a_closed_version_are_dropped() -> None:
    state = saves()
    stage(state, version(6), ranks=2)
    state.resume(5, 2)
    state.staged(2, version(6), 1.0)
    assert not state.pending(6)
    assert persist(state, version(6)) is None
    assert state.failed(version(6), "late") is None
    assert state.failed_in_a_row == 0
    assert state.late(1000.0) == []


def test_the_new_round_may_save_the_same_step_again() -> None:
    state = saves()
    stage(state, version(6), ranks=2)
    state.resume(5, 2)
    stage(state, version(6, round=2))
    state.staged(2, version(6), 1.0)
    ready = persist(state, version(6, round=2))
    assert ready is not None and ready.version.round == 2


def test_an_older_step_that_the_old_round_staged_can_still_finish() -> None:
    state = saves()
    stage(state, version(4))
    state.resume(5, 2)
    assert persist(state, version(4))
    state.commit_done(version(4), 1.0)
    assert state.committed == 5


def test_a_closed_version_whose_commit_was_under_way_is_not_the_newest() -> None:
    state = saves()
    stage(state, version(6))
    assert persist(state, version(6))
    state.resume(5, 2)
    assert state.commit_done(version(6), 1.0) is None
    assert state.committed == 5


def test_a_save_that_was_given_up_but_commits_after_all_counts() -> None:
    state = saves()
    stage(state, version(6))
    assert persist(state, version(6))
    assert state.late(LIMIT_S + 1)
    assert state.commit_done(version(6), LIMIT_S + 2) is None
    assert state.committed == 6
    assert state.failed_in_a_row == 0


def test_a_resume_from_an_older_step_takes_the_newest_one_back() -> None:
    state = saves()
    state.resume(10, 1)
    assert state.committed == 10
    state.resume(5, 2)
    assert state.committed == 5


# --- parts of a failed save that come late -------------------------------------------------------


def test_a_rank_that_stages_a_failed_save_late_neither_reopens_it_nor_fails_it_again() -> None:
    state = saves()
    stage(state, version(), ranks=1)
    assert state.failed(version(), "disk full") == Settled(5, "disk full")
    for rank in (1, 2):
        assert state.staged(rank, version(), 1.0) == "disk full"
        assert state.durable(rank, version(), "folder", 10, 1.0) is None
        assert state.failed(version(), "disk full") is None
    assert not state.pending(5)
    assert state.failed_in_a_row == 1


def test_the_same_step_may_be_saved_again_after_all_have_staged_the_failed_save() -> None:
    state = saves()
    stage(state, version(), ranks=2)
    assert state.failed(version(), "disk full")
    assert state.staged(2, version(), 1.0) == "disk full"
    assert [state.staged(rank, version(), 2.0) for rank in range(WORLD)] == [""] * WORLD
    assert state.pending(5)
    assert persist(state, version())


# --- skipping ------------------------------------------------------------------------------------


def test_a_due_save_begins_while_fewer_are_open_than_slots_and_all_ranks_hear_the_same() -> None:
    state = saves()
    assert state.ask(0, 1, 5, 0.0) == Asked("", True)
    assert state.ask(1, 1, 5, 0.1) == Asked("", False)
    stage(state, version(5), now=1.0)
    assert state.ask(2, 1, 10, 2.0) == Asked("", True)
    stage(state, version(10), now=3.0)
    refused = state.ask(0, 1, 15, 4.5)
    assert refused == Asked("2 saves are still being written, the oldest (step 5) for 3.5 s", True)
    persist(state, version(5))
    state.commit_done(version(5), 5.0)
    # The answer was given once: a rank that asks later gets it too.
    assert state.ask(1, 1, 15, 6.0) == Asked(refused.reason, False)
    assert state.ask(2, 1, 15, 6.0) == Asked(refused.reason, False)
    assert state.ask(0, 1, 20, 7.0) == Asked("", True)


def test_a_save_that_may_begin_counts_before_anybody_has_staged_it() -> None:
    state = saves()
    assert state.ask(0, 1, 1, 0.0) == Asked("", True)
    assert state.ask(0, 1, 2, 1.0) == Asked("", True)
    third = state.ask(0, 1, 3, 2.0)
    assert third is not None and "2 saves" in third.reason


def test_another_round_gets_no_answer_and_a_restart_forgets_the_old_ones() -> None:
    state = saves()
    state.ask(0, 1, 5, 0.0)
    stage(state, version(4), now=0.0)
    refused = state.ask(0, 1, 6, 1.0)
    assert refused is not None and refused.reason
    persist(state, version(4))
    state.commit_done(version(4), 1.0)
    state.resume(4, 2)
    assert state.ask(1, 1, 6, 2.0) is None
    assert state.ask(1, 2, 6, 2.0) == Asked("", True)


def test_the_rank_with_the_fewest_slots_counts() -> None:
    state = Saves(WORLD, LIMIT_S, slots=2)
    state.limit_slots(1)
    state.limit_slots(2)
    state.ask(0, 1, 5, 0.0)
    stage(state, version(5))
    refused = state.ask(0, 1, 10, 1.0)
    assert refused is not None and refused.reason.startswith("1 save is")


def test_a_save_that_was_given_up_holds_its_slots_until_the_writer_is_done_with_them() -> None:
    state = Saves(WORLD, LIMIT_S, slots=1)
    stage(state, version(5))
    assert state.late(LIMIT_S + 1)
    refused = state.ask(0, 1, 10, LIMIT_S + 2)
    assert refused is not None and "step 5" in refused.reason
    for rank in range(WORLD):
        assert state.ask(0, 1, 11 + rank, LIMIT_S + 3) != Asked("", True)
        state.shard_over(rank, version(5))
    assert state.ask(0, 1, 20, LIMIT_S + 4) == Asked("", True)


def test_answers_are_not_kept_for_ever() -> None:
    state = saves()
    for step in range(1, 1000):
        for rank in range(WORLD):
            state.ask(rank, 1, step, float(step))
    assert len(state._asked) < 50


class _Job(RuleBasedStateMachine):
    """Ranks that ask, stage, finish and restart in any order; every answer is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Saves(WORLD, LIMIT_S, slots=2)
        self.now = 0.0
        self.round = 1
        self.told: dict[tuple[int, int], str] = {}
        self.asked: dict[int, int] = dict.fromkeys(range(WORLD), 0)
        self.open: dict[Version, set[int]] = {}
        """Versions begun, and the ranks whose shards are being written."""
        self.unfinished: set[Version] = set()
        self.over: set[Version] = set()

    def _next(self) -> float:
        self.now += 1.0
        return self.now

    @rule(rank=st.integers(0, WORLD - 1))
    def ask(self, rank: int) -> None:
        step = self.asked[rank] + 1
        used = {v for v, ranks in self.open.items() if ranks} | self.unfinished
        admitted = {
            step
            for (round, step), reason in self.told.items()
            if round == self.round and not reason and version(step, self.round) not in self.open
        }
        answer = self.state.ask(rank, self.round, step, self._next())
        assert answer is not None
        assert answer.first == ((self.round, step) not in self.told)
        assert self.told.setdefault((self.round, step), answer.reason) == answer.reason
        if answer.first:
            assert bool(answer.reason) == (len(used) + len(admitted) >= 2)
        self.asked[rank] = step
        if not answer.reason:
            which = version(step, self.round)
            self.state.staged(rank, which, self._next())
            self.open.setdefault(which, set()).add(rank)
            self.unfinished |= {which} - self.over

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        shards = [(v, rank) for v, ranks in self.open.items() for rank in ranks]
        if not shards:
            return
        which, rank = data.draw(st.sampled_from(shards))
        self.open[which].discard(rank)
        if data.draw(st.booleans()):
            if self.state.durable(rank, which, "folder", 10, self._next()):
                self.state.commit_done(which, self._next())
                self._settled(which)
        else:
            self.state.shard_over(rank, which)
            self.state.failed(which, "no space")
            self._settled(which)

    def _settled(self, which: Version) -> None:
        self.unfinished.discard(which)
        self.over.add(which)

    @rule()
    def restart(self) -> None:
        self.round += 1
        self.asked = dict.fromkeys(range(WORLD), self.state.committed)
        self.unfinished = {v for v in self.unfinished if v.step <= self.state.committed}
        self.state.resume(self.state.committed, self.round)

    @rule(rank=st.integers(0, WORLD - 1), step=st.integers(1, 9))
    def ask_from_an_older_round(self, rank: int, step: int) -> None:
        assert self.state.ask(rank, self.round - 1, step, self._next()) is None


TestSkipping = _Job.TestCase
