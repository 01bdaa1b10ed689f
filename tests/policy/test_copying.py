"""Which way of copying is taken, by what saves were seen to cost."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.policy.copying import AGAIN_AFTER, AGAIN_MOST, MINIMUM, WARM_UP, CopyPolicy, Mode

STEP_S = 0.5


class Training:
    """Steps of ``STEP_S``, with saves that cost what ``cost`` says."""

    def __init__(self, cost: dict[Mode, float], policy: CopyPolicy | None = None) -> None:
        self.cost = cost
        self.policy = policy or CopyPolicy()
        self.now = 0.0
        self.modes: list[Mode] = []

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.now += STEP_S
            self.policy.step(self.now)

    def save(self, waited_s: float = 0.0) -> Mode:
        mode = self.policy.choose().mode
        self.now += self.cost[mode] + waited_s
        self.policy.began(mode, excluded_s=waited_s)
        self.modes.append(mode)
        return mode


costs = st.integers(0, 2000).map(lambda ms: ms / 1000)


@given(overlap=costs, blocking=costs, every=st.integers(1, 4))
def test_after_the_first_saves_the_cheaper_way_is_taken(
    overlap: float, blocking: float, every: int
) -> None:
    training = Training({"overlap": overlap, "blocking": blocking})
    training.steps(3 * MINIMUM)
    known = WARM_UP + 2 * MINIMUM
    for _ in range(known + AGAIN_AFTER):
        training.save()
        training.steps(every)
    cheaper = "overlap" if overlap <= blocking + 1e-9 else "blocking"
    if abs(overlap - blocking) > 1e-9:
        assert set(training.modes[known:]) == {cheaper}


def test_the_first_saves_take_turns_and_overlap_is_first() -> None:
    training = Training({"overlap": 0.1, "blocking": 0.2})
    training.steps(5)
    for _ in range(WARM_UP + 2 * MINIMUM):
        training.save()
        training.steps(2)
    assert training.modes == ["overlap"] * WARM_UP + ["overlap", "blocking"] * MINIMUM


def test_saves_that_are_slow_because_all_is_new_do_not_count() -> None:
    training = Training({"overlap": 9.0, "blocking": 9.0})
    training.steps(5)
    for _ in range(WARM_UP):
        training.save()
        training.steps(2)
    training.cost = {"overlap": 0.1, "blocking": 0.2}
    for _ in range(2 * MINIMUM + 1):
        training.save()
        training.steps(2)
    assert training.modes[-1] == "overlap"


def test_the_choice_follows_a_change_of_the_costs() -> None:
    training = Training({"overlap": 0.1, "blocking": 0.2})
    training.steps(5)
    for _ in range(3 * AGAIN_AFTER):
        training.save()
        training.steps(2)
    before = len(training.modes)
    training.cost = {"overlap": 0.3, "blocking": 0.2}
    for _ in range(8 * AGAIN_AFTER):
        training.save()
        training.steps(2)
    assert [training.modes[before - 1], training.modes[-1]] == ["overlap", "blocking"]


def test_a_wrong_choice_is_found_out_soon() -> None:
    training = Training({"overlap": 0.3, "blocking": 0.2})
    training.steps(5)
    for _ in range(WARM_UP + 2 * MINIMUM + 1):
        training.save()
        training.steps(2)
    training.cost["overlap"] = 0.1  # it only seemed to be dear
    for _ in range(AGAIN_AFTER + MINIMUM):
        training.save()
        training.steps(2)
    assert training.save() == "overlap"


def test_the_other_way_is_measured_again_but_more_and_more_rarely() -> None:
    training = Training({"overlap": 0.1, "blocking": 0.2})
    training.steps(5)
    known = WARM_UP + 2 * MINIMUM
    for _ in range(known + 4 * AGAIN_MOST):
        training.save()
        training.steps(2)
    late = Counter(training.modes[known:])
    rounds = 8  # after 10, 20, 40, 80, 160, 320, 320 and 320 saves
    assert late["blocking"] in (MINIMUM * (rounds - 1), MINIMUM * rounds)


def test_waiting_for_a_slot_is_no_cost_of_copying() -> None:
    training = Training({"overlap": 0.1, "blocking": 0.2})
    training.steps(5)
    for _ in range(20):
        waits = training.policy.choose().mode == "overlap"
        waits = training.policy.choose().mode == "overlap"
        training.save(waited_s=9.0 if waits else 0.0)
        training.steps(2)
    assert training.modes[-1] == "overlap"


def test_a_pause_and_two_saves_between_two_steps_are_not_measured() -> None:
    policy = CopyPolicy()
    training = Training({"overlap": 0.1, "blocking": 0.2}, policy)
    training.steps(5)
    assert policy.step_s == pytest.approx(STEP_S)
    training.save()
    training.save()
    training.steps(1)
    training.save()
    training.now += 100.0
    policy.pause()
    training.steps(1)
    assert policy.choose().reason == f"measuring, 1 of {MINIMUM}"
    assert policy.step_s == pytest.approx(STEP_S)


def test_where_every_step_saves_whole_steps_are_compared() -> None:
    training = Training({"overlap": 0.3, "blocking": 0.2})
    training.steps(1)
    for _ in range(WARM_UP + 2 * MINIMUM + 1):
        training.save()
        training.steps(1)
    choice = training.policy.choose()
    assert choice.mode == "blocking"
    assert choice.reason == "a step with a save takes 800 ms with overlap and 700 blocking"
    assert training.policy.step_s == 0.0


def test_costs_are_told() -> None:
    training = Training({"overlap": 0.03, "blocking": 0.084})
    training.steps(5)
    for _ in range(WARM_UP + 2 * MINIMUM):
        training.save()
        training.steps(2)
    reason = training.policy.choose().reason
    assert reason == "a save costs 30 ms with overlap and 84 blocking"


@pytest.mark.parametrize("wanted", ["overlap", "blocking"])
def test_what_was_asked_for_is_done(wanted: Mode) -> None:
    training = Training({"overlap": 0.2, "blocking": 0.1}, CopyPolicy(wanted))
    training.steps(5)
    for _ in range(20):
        training.save()
        training.steps(2)
    assert set(training.modes) == {wanted}
    assert training.policy.choose().reason == f"checkpoint.copy is {wanted}"


@pytest.mark.parametrize("wanted", ["auto", "overlap", "blocking"])
def test_what_is_forbidden_is_never_chosen_again(wanted: Mode) -> None:
    training = Training({"overlap": 0.1, "blocking": 0.2}, CopyPolicy(wanted))
    training.steps(5)
    training.policy.forbid_overlap("model.0.weight was changed")
    training.policy.forbid_overlap("something later")
    for _ in range(4 * AGAIN_AFTER):
        training.save()
        training.steps(2)
    assert set(training.modes) == {"blocking"}
    assert training.policy.choose().reason == "model.0.weight was changed"


def test_a_gpu_that_copies_by_itself_is_not_measured_and_still_can_be_forbidden() -> None:
    policy = CopyPolicy()
    assert policy.choose(beside=True).mode == "overlap"
    assert CopyPolicy("blocking").choose(beside=True).mode == "blocking"
    policy.forbid_overlap("model.0.weight was changed")
    assert policy.choose(beside=True).mode == "blocking"


@given(
    st.lists(
        st.sampled_from(["step", "save", "pause", "slow"]),
        max_size=200,
    ),
    st.floats(0, 10),
)
def test_any_order_of_events_gives_a_choice(events: list[str], waited_s: float) -> None:
    training = Training({"overlap": 0.1, "blocking": 0.2})
    for event in events:
        if event == "step":
            training.steps(1)
        elif event == "save":
            training.save(waited_s)
        elif event == "slow":
            training.now += 30.0
        else:
            training.policy.pause()
    choice = training.policy.choose()
    assert choice.mode in ("overlap", "blocking")
    assert choice.reason
    assert all(mode in ("overlap", "blocking") for mode in training.modes)
    first = [key for key, _ in itertools.groupby(training.modes)][:1]
    assert first in ([], ["overlap"])
