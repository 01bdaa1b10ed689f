from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.coordinator.stopping import StopVote
from keepstep.wire.messages import StopAck, StopAt


def ack(step: int, live: int) -> StopAck:
    return StopAck(inc=0, step=step, live=live)


def test_the_step_named_is_ahead_of_the_live_one() -> None:
    vote = StopVote(2, "SIGTERM")
    assert vote.signal == "SIGTERM"
    assert vote.ask(10) == StopAt(step=12, final=False)


def test_it_is_final_when_all_have_answered_and_nobody_has_passed_it() -> None:
    vote = StopVote(3, "SIGTERM")
    vote.ask(10)
    assert vote.answered(0, ack(12, 10)) is None
    assert vote.answered(0, ack(12, 11)) is None
    assert vote.answered(2, ack(12, 12)) is None
    assert vote.answered(1, ack(12, 9)) == StopAt(step=12, final=True)
    assert vote.answered(1, ack(12, 12)) is None


def test_a_rank_that_has_passed_it_makes_a_later_one_further_ahead() -> None:
    vote = StopVote(2, "SIGTERM")
    vote.ask(10)
    vote.answered(0, ack(12, 11))
    assert vote.answered(1, ack(12, 13)) == StopAt(step=17, final=False)
    vote.answered(0, ack(17, 16))
    assert vote.answered(1, ack(17, 18)) == StopAt(step=26, final=False)


def test_answers_to_an_older_question_or_to_none_do_not_count() -> None:
    vote = StopVote(1, "SIGTERM")
    assert vote.answered(0, ack(0, 0)) is None
    vote.ask(10)
    vote.ask(20)
    assert vote.answered(0, ack(12, 10)) is None
    assert vote.answered(0, ack(24, 21)) == StopAt(step=24, final=True)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 100), st.data())
def test_ranks_at_different_speeds_always_agree_on_a_step_that_none_has_passed(
    speeds: list[int], start: int, data: st.DataObject
) -> None:
    live = [start + data.draw(st.integers(0, 1)) for _ in speeds]
    vote = StopVote(len(speeds), "SIGTERM")
    asked = vote.ask(start)
    for _ in range(20):
        told: StopAt | None = None
        for rank in data.draw(st.permutations(range(len(speeds)))):
            live[rank] += speeds[rank]  # trains on until the question comes
            told = vote.answered(rank, ack(asked.step, live[rank])) or told
        assert told is not None
        if told.final:
            assert told.step == asked.step
            assert told.step >= max(live)
            return
        assert told.step > asked.step
        asked = told
    raise AssertionError("no agreement in 20 questions")
