"""Whose fault a stall is."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.policy import blame
from keepstep.wire.messages import Evidence


def seen(
    rank: int,
    *,
    idle_s: float = 31.0,
    beat_age_s: float = 0.1,
    state: str = "S",
    seq: int = 40,
    limit_s: float = 30.0,
    **seqs: int,
) -> Evidence:
    return Evidence(
        rank=rank,
        inc=0,
        idle_s=idle_s,
        limit_s=limit_s,
        beat_age_s=beat_age_s,
        state=state,
        phase="step",
        step=12,
        seq=seq,
        seqs=seqs,
    )


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_stopped_process_is_guilty_before_any_other_rule(state: str) -> None:
    found = blame([seen(0, seq=39), seen(1, state=state, beat_age_s=31.0), seen(2)])
    assert (found.guilty, found.cause) == ((1,), "hang")
    assert "is stopped (SIGSTOP)" in found.reason


def test_a_process_stopped_only_now_did_not_cause_the_stall() -> None:
    assert blame([seen(0, seq=39), seen(1, state="t", idle_s=0.2)]).guilty == (0,)


def test_a_silent_heartbeat_is_guilty_before_the_count_of_collectives() -> None:
    found = blame([seen(0, seq=39), seen(1, beat_age_s=16.0)])
    assert found.guilty == (1,)
    assert "interpreter lock" in found.reason


@pytest.mark.parametrize(
    "healthy",
    [
        seen(1, beat_age_s=14.0),
        seen(1, beat_age_s=29.0, state="D"),
        seen(1, beat_age_s=1.9, limit_s=1.0),
        seen(1, beat_age_s=-1.0),
    ],
    ids=["younger than half the limit", "waits for a device", "under 2 s", "has none"],
)
def test_a_heartbeat_that_proves_nothing_is_not_blamed(healthy: Evidence) -> None:
    assert blame([seen(0), healthy]).guilty == ()


def test_the_one_rank_that_stalls_while_the_others_move_is_guilty() -> None:
    found = blame([seen(0, idle_s=1.0), seen(1, seq=99), seen(2, idle_s=0.0)])
    assert found.guilty == (1,)
    assert "while the others do" in found.reason


def test_a_rank_just_below_its_limit_does_not_count_as_moving() -> None:
    assert blame([seen(0, idle_s=30.01), seen(1, idle_s=29.99)]).guilty == ()


def test_of_the_stalled_ranks_those_behind_in_collectives_are_guilty() -> None:
    found = blame([seen(0), seen(1, seq=39), seen(2), seen(3, idle_s=0.5, seq=70)])
    assert found.guilty == (1,)
    assert "39 collectives entered" in found.reason


def test_a_rank_behind_in_one_group_and_ahead_in_none_is_guilty_whatever_the_sums() -> None:
    found = blame([seen(0, seq=50, dp=40, tp=10), seen(1, seq=51, dp=39, tp=12)])
    assert found.guilty == ()  # each waits for the other
    found = blame([seen(0, seq=60, dp=40), seen(1, seq=90, dp=39), seen(2, seq=60, dp=40)])
    assert found.guilty == (1,)


def test_a_rank_that_skipped_a_collective_of_one_group_and_waits_in_another_is_not_blamed() -> None:
    waiting = [seen(rank, dp=133, check=1) for rank in (1, 2, 3)]
    assert blame([seen(0, dp=134, check=0), *waiting]).guilty == ()


def test_two_ranks_that_stall_alike_while_the_rest_moves_are_both_guilty() -> None:
    assert blame([seen(0), seen(1), seen(2, idle_s=0.1)]).guilty == (0, 1)


def test_nobody_is_blamed_when_all_look_alike() -> None:
    found = blame([seen(0), seen(1)])
    assert (found.guilty, found.cause) == ((), "unknown")
    assert blame([seen(0, state="T"), seen(1, state="T")]).guilty == ()


def test_the_only_rank_of_a_job_can_be_guilty() -> None:
    assert blame([seen(0)]).guilty == (0,)


evidence_of_4 = st.lists(
    st.builds(
        seen,
        st.integers(0, 3),
        idle_s=st.floats(0, 100),
        beat_age_s=st.floats(0, 100),
        state=st.sampled_from("RSDT"),
        seq=st.integers(0, 3),
    ),
    min_size=2,
    max_size=4,
    unique_by=lambda one: one.rank,
)


@given(evidence_of_4, st.randoms())
def test_at_least_one_rank_is_never_guilty_and_order_does_not_matter(
    evidence: list[Evidence], random: Random
) -> None:
    found = blame(evidence)
    assert len(found.guilty) < len(evidence)
    assert (found.cause == "unknown") == (not found.guilty)
    assert blame(random.sample(evidence, len(evidence))).guilty == found.guilty
