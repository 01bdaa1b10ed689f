"""Who failed first: order of evidence against order of events."""

from __future__ import annotations

import signal
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.policy import Attribution, Report, attribute, settled
from keepstep.policy.attribution import KINDS


def killed(rank: int, t: float, code: int = -9) -> Report:
    return Report(rank=rank, t=t, kind="killed", code=code, step=12, phase="step")


def raised(rank: int, t: float, error: str = "ValueError: bad batch") -> Report:
    return Report(rank=rank, t=t, kind="exception", error=error, location="train.py:7", step=12)


def lost(rank: int, t: float) -> Report:
    return Report(rank=rank, t=t, kind="peer_lost", error="Connection closed by peer", step=12)


def waited(rank: int, t: float = 1.0, **seqs: int) -> Report:
    return Report(rank=rank, t=t, kind="timeout", step=12, seqs=seqs)


def find(*reports: Report, world: int = 4) -> Attribution:
    return attribute(reports, world=world)


def test_an_unknown_kind_of_failure_is_refused() -> None:
    with pytest.raises(ValueError, match="not 'tired'"):
        Report(rank=0, t=1.0, kind="tired")


def test_the_first_exception_is_the_cause_and_the_second_a_consequence() -> None:
    found = find(raised(2, 1.5), raised(1, 1.0, "KeyError: 'x'"))
    assert (found.cause, found.guilty, found.consequences) == ("exception", 1, (2,))
    assert found.line == "rank 1 (node 0) raised KeyError: 'x' at step 12 (train.py:7)"


@pytest.mark.parametrize("symptom", [lost(0, 0.5), waited(0, 0.5)])
def test_a_definite_failure_beats_an_earlier_symptom(symptom: Report) -> None:
    found = find(symptom, raised(1, 1.0))
    assert (found.guilty, found.consequences) == (1, (0,))


@pytest.mark.parametrize("lead_s", [-0.05, 0.0, 0.05])
@pytest.mark.parametrize("kind", ["exception", "exit"])
def test_the_killed_rank_is_blamed_though_its_death_is_seen_after_the_other_failed(
    kind: str, lead_s: float
) -> None:
    follower = Report(rank=0, t=1.0 - lead_s, kind=kind, code=1, step=12)
    found = find(follower, killed(1, 1.0), world=2)
    assert (found.cause, found.guilty, found.consequences) == ("killed", 1, (0,))
    assert found.line == "rank 1 (node 0) was killed by signal 9 at step 12 (last phase: step)"


def test_an_exception_well_before_a_kill_is_a_cause_of_its_own() -> None:
    assert find(raised(0, 1.0), killed(1, 2.5)).guilty == 0


def test_a_lost_peer_before_the_exception_tells_of_a_death_seen_much_later() -> None:
    found = find(lost(2, 0.99), raised(0, 1.0), killed(1, 6.0))
    assert (found.guilty, found.consequences) == (1, (0, 2))


def test_an_exit_closes_sockets_itself_so_a_lost_peer_before_it_proves_nothing() -> None:
    exited = Report(rank=0, t=1.0, kind="exit", code=3, step=12)
    assert find(lost(2, 0.99), exited, killed(1, 6.0)).guilty == 0


def test_a_rank_aborted_by_its_own_library_follows_the_one_that_was_killed() -> None:
    found = find(killed(0, 0.9, -signal.SIGABRT), killed(1, 1.0))
    assert (found.guilty, found.dead, found.consequences) == (1, (0, 1), (0,))


def test_a_rank_that_raised_and_was_killed_afterwards_failed_by_its_exception() -> None:
    found = find(raised(1, 1.0), killed(1, 1.1), lost(0, 1.05))
    assert (found.cause, found.guilty, found.dead) == ("exception", 1, (1,))


def test_two_ranks_killed_apart_are_no_consequence_of_each_other() -> None:
    found = find(killed(1, 1.0), killed(2, 1.3), lost(0, 1.0))
    assert (found.guilty, found.dead, found.consequences) == (1, (1, 2), (0,))


def test_all_ranks_that_raise_the_same_are_named_and_one_fresh_one_is_enough() -> None:
    first = raised(0, 1.0, "ValueError: tensor at 0x7f01")
    second = Report(
        rank=1,
        t=1.1,
        kind="exception",
        error="\nValueError: tensor at 0x7f99\n  more",
        location="train.py:7",
        step=12,
        fresh=True,
    )
    found = find(first, second)
    assert (found.guilty, found.same, found.fresh) == (0, (0, 1), True)


def test_the_single_rank_that_entered_fewer_collectives_is_guilty_of_a_timeout() -> None:
    found = attribute(
        [waited(0, dp=42), waited(2, dp=42)],
        world=3,
        seqs={1: {"dp": 41}},
    )
    assert (found.cause, found.guilty, found.consequences) == ("timeout", 1, (0, 2))
    assert "rank 1 had entered 41 collectives of group dp, the others 42" in found.line


def test_a_rank_that_lags_only_because_it_waits_in_another_group_is_not_blamed() -> None:
    found = find(
        waited(0, dp=42), waited(1, dp=41, tp=8), Report(rank=2, t=1.0, kind="timeout"), world=3
    )
    assert found.guilty == -1
    found = attribute([waited(0, dp=42), waited(1, dp=41, tp=8)], world=3, seqs={2: {"tp": 7}})
    assert found.guilty == 2


@pytest.mark.parametrize(
    ("reports", "world"),
    [
        ((waited(0, dp=42), waited(1, dp=42)), 2),
        ((waited(0, dp=42), waited(1, dp=41)), 3),
        ((waited(0, dp=42), waited(1, dp=41), waited(2, dp=41)), 3),
        ((lost(0, 1.0), lost(1, 1.1)), 2),
        ((), 2),
    ],
    ids=["nobody lags", "one rank is silent", "two lag", "only lost peers", "no report"],
)
def test_nobody_is_blamed_by_guess(reports: tuple[Report, ...], world: int) -> None:
    found = attribute(reports, world=world)
    assert (found.cause, found.guilty, found.consequences) == ("unknown", -1, ())
    assert "cause unknown" in found.line


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (Report(rank=1, t=0, kind="oom", code=-9, step=3), "for lack of memory at step 3"),
        (Report(rank=1, t=0, kind="exit", code=3, step=3), "exit code 3 at step 3"),
        (Report(rank=1, t=0, kind="hang", step=3, error="asleep"), "hangs at step 3: asleep"),
        (Report(rank=1, t=0, kind="checkpoint", error="cut"), "the checkpoint at step 0: cut"),
        (Report(rank=1, t=0, kind="save", error="full", step=3), "cannot save at step 3: full"),
    ],
)
def test_the_line_says_what_happened_to_whom(report: Report, text: str) -> None:
    line = find(report).line
    assert line.startswith("rank 1 (node 0) ")
    assert line.endswith(text)


reports_of_4 = st.lists(
    st.builds(
        Report,
        rank=st.integers(0, 3),
        t=st.floats(0, 3),
        kind=st.sampled_from(sorted(KINDS)),
        code=st.sampled_from([-9, -6, 1]),
        seqs=st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 3)),
    ),
    max_size=6,
    unique_by=lambda report: (report.rank, report.kind),
)


@given(reports_of_4, st.randoms())
def test_the_order_in_which_reports_arrive_does_not_matter(
    reports: list[Report], random: Random
) -> None:
    one_each = list({report.rank: report for report in reports}.values())
    shuffled = random.sample(one_each, len(one_each))
    assert attribute(shuffled, world=4) == attribute(one_each, world=4)


@given(reports_of_4)
def test_the_guilty_rank_is_never_its_own_consequence_and_every_dead_one_is_named(
    reports: list[Report],
) -> None:
    found = attribute(reports, world=4)
    assert found.guilty not in found.consequences
    gone = {r.rank for r in reports if r.kind in ("killed", "oom", "exit", "hang")}
    assert set(found.dead) == gone
    assert (found.guilty == -1) == (found.cause == "unknown")


def test_a_kill_settles_the_cause_at_once() -> None:
    assert settled([killed(1, 1.0)], 4, set(), now=1.0, first_t=1.0, settle_s=1.0)


@pytest.mark.parametrize("report", [lost(0, 1.0), raised(0, 1.0), killed(0, 1.0, -6)])
def test_what_can_be_a_consequence_waits_for_the_other_ranks_or_the_time(report: Report) -> None:
    def at(now: float, accounted: set[int]) -> bool:
        return settled([report], 3, accounted, now=now, first_t=1.0, settle_s=1.0)

    assert not at(1.9, {0, 1})
    assert at(1.1, {1, 2})
    assert at(2.0, set())


def test_a_rank_that_times_out_late_is_not_blamed_for_the_one_that_skipped() -> None:
    def report(rank: int, t: float, **seqs: int) -> Report:
        return Report(rank=rank, t=t, kind="timeout", step=7, seqs=seqs)

    held = [report(0, 1.0, dp=133, check=1), report(1, 1.001, dp=133, check=1)]
    late = report(2, 1.05, dp=133, check=1)
    skipped = report(3, 1.01, dp=134, check=0)
    assert attribute([*held, late, skipped], world=4).guilty == 3
