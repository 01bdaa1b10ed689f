"""Learned time limits: no false alarms, bounded waits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.policy import Learned, LearnedLimits, Watch, late

FLOOR, BOUND = 30.0, 1800.0


def learned(*seconds: float) -> Learned:
    known = Learned()
    for one in seconds:
        known.add(one)
    return known


def test_with_fewer_than_three_samples_the_bound_holds() -> None:
    known = learned(1.0, 1.0)
    assert known.kill_after(FLOOR, BOUND) == BOUND
    assert known.suspect_after(FLOOR, BOUND) == BOUND
    known.add(1.0)
    assert known.kill_after(FLOOR, BOUND) == FLOOR


def test_a_suspect_is_named_after_three_times_the_longest_and_a_second() -> None:
    assert learned(1.0, 2.0, 1.0).suspect_after(FLOOR, BOUND) == pytest.approx(7.0)


def test_an_outlier_is_forgotten_after_the_window() -> None:
    known = learned(100.0, *[1.0] * 255)
    assert known.kill_after(FLOOR, BOUND) > 300.0
    known.add(1.0)
    assert known.kill_after(FLOOR, BOUND) == FLOOR


@pytest.mark.parametrize("typical_s", [0.05, 1.0, 10.0, 60.0])
def test_slow_first_steps_long_saves_and_rare_outliers_raise_no_false_alarm(
    typical_s: float,
) -> None:
    draw = random.Random(7)
    limits = LearnedLimits()

    def turn(phase: str, seconds: float, *, first: bool = False) -> float:
        now = limits.of(phase, floor_s=FLOOR, bound_s=BOUND, first=first)
        assert seconds < now.kill_s
        limits.add(phase, seconds, first=first)
        return now.kill_s

    for count in range(2000):
        if count % 500 == 0:
            turn("step", 25 * typical_s, first=True)  # a new process compiles
        slow = count > 5 and draw.random() < 0.01
        turn("step", typical_s * draw.uniform(0.9, 1.1) * (9.0 if slow else 1.0))
        if count % 100 == 99:
            turn("save", 20 * typical_s)
    assert limits.of("step", floor_s=FLOOR, bound_s=BOUND).kill_s < max(2 * FLOOR, 60 * typical_s)


def test_steps_of_a_second_with_outliers_of_six_find_a_hang_within_a_minute() -> None:
    draw = random.Random(3)
    known = Learned()
    for _ in range(2000):
        seconds = 6.0 if draw.random() < 0.05 else 1.0
        assert seconds < known.kill_after(FLOOR, BOUND)
        known.add(seconds)
    assert known.kill_after(FLOOR, BOUND) < 60.0


def test_the_first_step_of_a_process_is_learned_apart() -> None:
    limits = LearnedLimits()
    for _ in range(3):
        limits.add("step", 1.0)
    assert limits.of("step", floor_s=FLOOR, bound_s=BOUND).kill_s == FLOOR
    assert limits.of("step", floor_s=FLOOR, bound_s=BOUND, first=True).kill_s == BOUND
    limits.add("step", 500.0, first=True)
    assert limits.of("step", floor_s=FLOOR, bound_s=BOUND).kill_s == FLOOR


def test_sections_learn_under_their_own_names() -> None:
    limits = LearnedLimits()
    for _ in range(3):
        limits.add("section", 200.0, label="eval")
    known = limits.of("section", label="eval", floor_s=FLOOR, bound_s=3600.0)
    assert known.kill_s == pytest.approx(2400.0)
    assert limits.of("section", label="export", floor_s=FLOOR, bound_s=3600.0).kill_s == 3600.0


durations = st.lists(st.floats(0, 5000), max_size=300)


@given(durations, st.floats(0, 3000), st.floats(0, 3000))
def test_the_kill_limit_keeps_to_its_bounds(
    seconds: list[float], floor_s: float, bound_s: float
) -> None:
    known = learned(*seconds)
    suspect, kill = known.limits(floor_s, bound_s)
    longest = max(seconds[-256:], default=0.0)
    assert kill >= floor_s
    assert kill >= suspect
    assert kill >= longest
    assert kill <= max(floor_s, bound_s, longest)
    assert (known.suspect_after(floor_s, bound_s), known.kill_after(floor_s, bound_s)) == (
        suspect,
        kill,
    )


def test_a_watcher_on_time_forgives_nothing_and_a_late_one_what_it_missed() -> None:
    assert late(10.0, 10.1, 0.1) == 0.0
    assert late(10.0, 10.2, 0.1) == 0.0
    assert late(10.0, 15.0, 0.1) == pytest.approx(4.9)


def test_idle_time_leaves_out_what_the_watcher_missed() -> None:
    watch = Watch(0.5)
    assert [watch.tick(now) for now in (0.0, 0.5, 10.5, 11.0)] == [0.0, 0.0, 9.5, 0.0]
    assert watch.idle(0.2, 11.0) == pytest.approx(1.3)
    assert watch.idle(10.6, 11.0) == pytest.approx(0.4)


@given(st.lists(st.floats(0, 50), min_size=1, max_size=40), st.floats(0, 500))
def test_idle_time_is_never_negative_and_never_above_the_time_passed(
    pauses: list[float], since: float
) -> None:
    watch, now = Watch(1.0), 0.0
    for pause in pauses:
        now += pause
        watch.tick(now)
    assert 0.0 <= watch.idle(since, now) <= max(0.0, now - since)
