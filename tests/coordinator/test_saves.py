from __future__ import annotations

import pytest

from keepstep.coordinator.saves import Ready, Saves, Settled
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
