from __future__ import annotations

import pytest

from keepstep.clock import Clock
from keepstep.testing import FakeClock


def test_time_stands_still_until_it_is_told_to_move() -> None:
    clock = FakeClock(wall=50.0, mono=7.0)
    assert (clock.wall(), clock.mono()) == (50.0, 7.0)
    assert (clock.wall(), clock.mono()) == (50.0, 7.0)
    clock.advance(2.5)
    assert (clock.wall(), clock.mono()) == (52.5, 9.5)


def test_a_sleep_moves_both_clocks_and_is_noted() -> None:
    clock = FakeClock(wall=50.0, mono=7.0)
    clock.sleep(3.0)
    clock.sleep(-1.0)
    assert (clock.wall(), clock.mono()) == (53.0, 10.0)
    assert clock.slept == [3.0, -1.0]


def test_the_wall_clock_may_jump_back_but_time_does_not() -> None:
    clock = FakeClock(wall=50.0, mono=7.0)
    clock.set_wall(10.0)
    assert (clock.wall(), clock.mono()) == (10.0, 7.0)
    with pytest.raises(ValueError, match="does not go back by 1"):
        clock.advance(-1)


def test_the_fake_clock_is_a_clock() -> None:
    clock: Clock = FakeClock()
    clock.sleep(0)
    assert clock.mono() == 1000.0
