from __future__ import annotations

import time

from keepstep.clock import SYSTEM, Clock


def test_wall_time_is_seconds_since_the_epoch() -> None:
    before = time.time()
    assert before <= SYSTEM.wall() <= time.time()


def test_the_monotonic_clock_is_the_one_that_all_processes_of_a_machine_share() -> None:
    before = time.clock_gettime(time.CLOCK_MONOTONIC)
    assert before <= SYSTEM.mono() <= time.clock_gettime(time.CLOCK_MONOTONIC)


def test_sleep_returns_after_at_least_the_time_asked_for() -> None:
    before = SYSTEM.mono()
    SYSTEM.sleep(0.001)
    assert SYSTEM.mono() - before >= 0.001


def test_the_system_clock_is_a_clock() -> None:
    clock: Clock = SYSTEM
    assert clock.mono() <= clock.mono()
