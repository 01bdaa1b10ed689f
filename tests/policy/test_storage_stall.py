"""When storage is said to take nothing, and when it is said to go on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.policy.storage_stall import Stall


def test_nothing_is_said_while_nothing_is_waited_for_or_the_mark_moves() -> None:
    stall = Stall(10.0)
    assert [stall.look(None, t) for t in (0.0, 100.0, 200.0)] == ["", "", ""]
    assert [stall.look(t, t) for t in (201.0, 210.0, 219.0, 228.0)] == ["", "", "", ""]


def test_a_mark_that_stands_still_is_told_once_and_so_is_its_end() -> None:
    stall = Stall(10.0)
    looks = [(5, 0.0), (5, 9.9), (5, 10.0), (5, 30.0), (6, 42.0), (6, 43.0)]
    assert [stall.look(*look) for look in looks] == ["", "", "stalled", "", "moves", ""]
    assert stall.idle_s == 1.0


def test_an_end_of_the_waiting_is_the_end_of_the_stall() -> None:
    stall = Stall(10.0)
    assert [stall.look(5, 0.0), stall.look(5, 11.0)] == ["", "stalled"]
    assert stall.look(None, 12.0) == "moves"
    assert stall.idle_s == 12.0
    assert stall.look(5, 13.0) == ""


@given(st.lists(st.tuples(st.sampled_from([None, 1, 2]), st.floats(min_value=0.0, max_value=20.0))))
def test_news_alternate_and_a_stall_is_as_long_as_its_limit(
    looks: list[tuple[int | None, float]],
) -> None:
    stall, now, said = Stall(10.0), 0.0, []
    for mark, pause in looks:
        now += pause
        news = stall.look(mark, now)
        if news:
            said.append(news)
            assert stall.idle_s >= 10.0
    assert said == [("stalled", "moves")[index % 2] for index in range(len(said))]
