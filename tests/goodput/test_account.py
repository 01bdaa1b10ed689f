from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep import events as ev
from keepstep.events import Event
from keepstep.goodput.account import CATEGORIES, Accounting, account
from keepstep.goodput.faults import faults
from tests.goodput.runlog import RunLog, four_faults, worked_example

WORKED = {
    "startup": 20.0,
    "productive": 200.0,
    "checkpoint_stall": 2.0,
    "lost_work": 50.5,
    "detect": 7.5,
    "restart": 15.0,
    "restore": 8.0,
}


def seconds(accounting: Accounting) -> dict[str, float]:
    """Categories that are not empty, in seconds."""
    return {name: ns / 1e9 for name, ns in accounting.categories_ns.items() if ns}


def adds_up(accounting: Accounting) -> bool:
    parts = accounting.categories_ns.values()
    return sum(parts) == accounting.wall_ns and min(parts) >= 0


def test_worked_example() -> None:
    result = account(worked_example().events)
    assert seconds(result) == WORKED
    assert result.wall_ns == 303_000_000_000
    assert f"{result.goodput:.1%}" == "66.0%"


def test_worked_example_without_fault_injection_is_found_by_the_exit_of_the_rank() -> None:
    log = worked_example()
    events = [event for event in log.events if event.kind != "fault.injected"]
    log.events = events
    log.add(172.5, ev.RankExit(pid=11, incarnation=1, code=-9), src="agent", rank=1)
    assert seconds(account(log.events)) == WORKED


def test_exits_that_keepstep_caused_are_no_evidence_of_the_fault() -> None:
    log = worked_example()
    log.add(172.2, ev.RankExit(pid=10, incarnation=1, code=-9, by_us=True), src="agent", rank=0)
    log.add(172.3, ev.RankExit(pid=10, incarnation=1, code=0), src="agent", rank=0)
    assert seconds(account(log.events)) == WORKED


def test_rank_events_alone_give_the_same_split_where_ranks_can_know() -> None:
    log = RunLog()
    log.ready(0.0, 1, 0, [10, 11])
    log.steps(2.0, 1, 10, 1)
    log.save(12.0, 1.0, 10, 1)
    log.steps(13.0, 11, 15, 1)
    log.inject(28.25, "exception", 1, 1, 16)
    failed = ev.RankFailed(failure="exception", error="ValueError", location="train.py:1")
    log.add(28.5, failed, src="rank", rank=1, round=1, step=16)
    log.ready(30.0, 2, 10, [10, 11])
    log.restore(30.5, 31.0, 2, 10)
    log.steps(31.0, 11, 20, 2)
    result = account(log.without("agent", "coordinator"))
    assert seconds(result) == {
        "startup": 2.0,
        "productive": 20.0,
        "checkpoint_stall": 1.0,
        "lost_work": 15.25,
        "detect": 0.25,
        "restart": 2.0,
        "restore": 0.5,
    }
    assert adds_up(result)


def test_without_the_coordinator_a_restart_begins_when_a_survivor_joins_the_next_round() -> None:
    log = RunLog()
    log.ready(0.0, 1, 0, [10, 11])
    log.steps(1.0, 1, 5, 1)
    log.inject(6.5, "kill", 1, 1, 6)
    log.add(8.0, ev.RankJoined(pid=10), src="rank", rank=0, round=2)
    log.add(9.0, ev.RankJoined(pid=12), src="rank", rank=1, round=2)
    log.steps(9.5, 6, 10, 2)
    assert seconds(account(log.events)) == {
        "startup": 1.0,
        "productive": 10.0,
        "lost_work": 0.5,
        "detect": 1.5,
        "restart": 1.5,
    }


def test_script_without_keepstep_steps_before_its_round_is_announced() -> None:
    log = RunLog()
    log.launch(0.0)
    log.steps(2.0, 1, 5, 1)
    log.add(3.0, ev.RoundReady(pids={"0": 10, "1": 11}, resume=0), round=1)
    log.end(7.0)
    assert seconds(account(log.events)) == {"startup": 2.0, "productive": 5.0}


def test_steps_alone_without_any_round_are_productive() -> None:
    log = RunLog(world=1)
    for step in (1, 2, 3):
        log.add(float(step), ev.StepEnd(s=1.0), src="rank", rank=0, step=step)
    assert seconds(account(log.events)) == {"productive": 3.0}


def test_step_that_one_rank_never_completed_is_lost_although_the_others_wrote_its_end() -> None:
    log = RunLog()
    log.launch(0.0)
    log.ready(0.0, 1, 0, [10, 11])
    log.steps(0.0, 1, 4, 1)
    log.inject(4.5, "kill", 1, 1, 5)
    log.steps(4.0, 5, 5, 1, but=1)
    log.restart(6.0, 1, step=5)
    log.ready(7.0, 2, 4, [10, 12])
    log.steps(7.0, 5, 6, 2)
    log.end(9.0)
    assert seconds(account(log.events)) == {
        "productive": 6.0,
        "lost_work": 0.5,
        "detect": 1.5,
        "restart": 1.0,
    }


def test_step_that_the_next_round_resumed_from_was_completed_though_its_end_is_missing() -> None:
    log = RunLog()
    log.launch(0.0)
    log.ready(0.0, 1, 0, [10, 11])
    log.steps(0.0, 1, 4, 1)
    log.steps(4.0, 5, 5, 1, but=1)
    log.restart(6.0, 1, step=5)
    log.ready(7.0, 2, 5, [10, 12])
    log.steps(7.0, 6, 6, 2)
    log.end(8.0)
    assert seconds(account(log.events))["productive"] == 6.0


def test_launch_killed_with_its_agent_leaves_idle_time_and_work_that_is_redone() -> None:
    log = RunLog()
    log.launch(0.0)
    log.ready(1.0, 1, 0, [10, 11])
    log.steps(1.0, 1, 10, 1)
    log.launch(20.0)
    log.ready(21.0, 1, 6, [20, 21])
    log.restore(21.0, 22.0, 1, 6)
    log.steps(22.0, 7, 10, 1)
    log.end(26.0)
    assert seconds(account(log.events)) == {
        "startup": 2.0,
        "productive": 10.0,
        "lost_work": 4.0,
        "idle": 9.0,
        "restore": 1.0,
    }


@pytest.mark.parametrize("but", [("agent",), ("agent", "coordinator")])
def test_second_launch_is_seen_from_ranks_whose_rounds_start_again(but: tuple[str, ...]) -> None:
    log = RunLog()
    log.launch(0.0)
    log.ready(1.0, 1, 0, [10, 11])
    log.steps(1.0, 1, 10, 1)
    log.launch(20.0)
    log.ready(20.0, 1, 10, [20, 21])
    log.restore(20.0, 22.0, 1, 10)
    log.steps(22.0, 11, 14, 1)
    result = seconds(account(log.without(*but)))
    assert result == {"productive": 14.0, "idle": 9.0, "restore": 2.0}


def test_section_is_its_own_category_and_a_nested_one_wins() -> None:
    log = RunLog()
    log.launch(0.0)
    log.ready(0.0, 1, 0, [10, 11])
    log.steps(0.0, 1, 1, 1, s=10.0)
    who = {"src": "rank", "rank": 0, "round": 1}
    log.add(2.0, ev.SectionBegin(name="eval"), **who)  # type: ignore[arg-type]
    log.add(3.0, ev.SectionBegin(name="plot"), **who)  # type: ignore[arg-type]
    log.add(4.0, ev.SectionEnd(name="plot", s=1.0), **who)  # type: ignore[arg-type]
    log.add(7.0, ev.SectionEnd(name="eval", s=5.0), **who)  # type: ignore[arg-type]
    log.end(10.0)
    assert seconds(account(log.events)) == {
        "productive": 5.0,
        "section:eval": 4.0,
        "section:plot": 1.0,
    }


def test_section_without_an_end_ends_with_the_last_evidence_of_its_rank() -> None:
    log = RunLog()
    log.launch(0.0)
    log.ready(0.0, 1, 0, [10, 11])
    log.steps(0.0, 1, 1, 1)
    log.add(1.0, ev.SectionBegin(name="eval"), src="rank", rank=0, round=1)
    log.inject(4.0, "kill", 0, 1, 2)
    log.restart(5.0, 1, guilty=0, step=2)
    log.end(6.0, exit_code=76)
    assert seconds(account(log.events)) == {
        "productive": 1.0,
        "section:eval": 3.0,
        "detect": 1.0,
        "restart": 1.0,
    }


def test_waiting_for_the_last_save_is_a_stall_and_the_rest_of_the_end_is_idle() -> None:
    log = RunLog()
    log.launch(0.0)
    log.ready(0.0, 1, 0, [10, 11])
    log.steps(0.0, 1, 5, 1)
    log.save(5.0, 0.5, 5, 1, save_s=2.0)
    log.end(8.0)
    assert seconds(account(log.events)) == {"productive": 5.0, "checkpoint_stall": 2.0, "idle": 1.0}


def test_an_optimizer_that_is_held_back_by_a_copy_is_a_stall() -> None:
    log = RunLog()
    log.launch(0.0)
    log.ready(0.0, 1, 0, [10, 11])
    log.steps(0.0, 1, 5, 1)
    log.save(5.0, 0.5, 5, 1, save_s=2.0)
    copied = ev.CheckpointCopied(
        mode="overlap", reason="measuring", copy_s=1.25, waited_s=0.25, bytes=500
    )
    for rank in range(2):
        log.add(6.25, copied, src="rank", rank=rank, round=1, step=5)
    log.steps(5.5, 6, 7, 1)
    log.end(7.5)
    assert seconds(account(log.events)) == {"productive": 6.75, "checkpoint_stall": 0.75}


def test_fault_before_the_first_round_is_not_productive_time() -> None:
    log = RunLog()
    log.launch(0.0)
    log.add(2.0, ev.RankExit(pid=11, incarnation=1, code=1), src="agent", rank=1)
    log.restart(3.0, 1, cause="exit")
    log.ready(5.0, 2, 0, [10, 12])
    log.steps(6.0, 1, 4, 2)
    log.end(10.0)
    assert seconds(account(log.events)) == {
        "startup": 2.0,
        "detect": 1.0,
        "restart": 3.0,
        "productive": 4.0,
    }


def test_hang_is_dated_back_to_the_last_progress_of_the_rank() -> None:
    log = RunLog()
    log.launch(0.0)
    log.ready(0.0, 1, 0, [10, 11])
    log.steps(0.0, 1, 5, 1)
    hung = ev.RankHung(idle_s=30.0, limit_s=30.0, phase="STEP", evidence="idle")
    log.add(35.0, hung, src="agent", rank=1)
    log.restart(35.0, 1, cause="hang", step=6)
    log.ready(36.0, 2, 5, [10, 12])
    log.steps(36.0, 6, 6, 2)
    log.end(37.0)
    assert seconds(account(log.events)) == {"productive": 6.0, "detect": 30.0, "restart": 1.0}


def test_second_fault_during_recovery_stays_recovery() -> None:
    log = worked_example()
    log.inject(185.0, "kill", 0, 1, 151)
    log.restart(190.0, 1, guilty=0, step=151)
    assert seconds(account(log.events)) == WORKED


def test_second_fault_while_loading_is_detected_anew() -> None:
    log = RunLog()
    log.launch(0.0)
    log.ready(0.0, 1, 0, [10, 11])
    log.steps(0.0, 1, 4, 1)
    log.restart(4.0, 1, step=5)
    log.ready(5.0, 2, 4, [10, 12])
    log.add(5.0, ev.RestoreBegin(tier="storage"), src="rank", rank=0, round=2, step=4)
    log.inject(6.0, "kill", 0, 2, 5)
    log.restart(8.0, 2, guilty=0, step=5)
    log.ready(9.0, 3, 4, [13, 12])
    log.steps(9.0, 5, 5, 3)
    log.end(10.0)
    assert seconds(account(log.events)) == {
        "productive": 5.0,
        "restart": 2.0,
        "restore": 1.0,
        "detect": 2.0,
    }


def test_no_events_give_an_empty_split() -> None:
    result = account([])
    assert result.wall_ns == 0 and result.goodput == 0.0
    assert set(result.categories_ns) == set(CATEGORIES)


def test_event_whose_data_does_not_fit_its_kind_is_evidence_of_time_only() -> None:
    log = worked_example()
    for event in log.events:
        if event.kind == "restart.cause":
            event.data = {"cause": 7}
    log.events.append(Event(v=1, run="r", src="x", node=0, t=0.0, mono=0.0, seq=1, kind="new.kind"))
    result = account(log.events)
    assert adds_up(result) and result.end_ns - result.begin_ns > 10**18


# --- random runs ---------------------------------------------------------------------------------

short = st.integers(0, 3000).map(lambda ms: ms / 1000)


@st.composite
def plausible_runs(draw: st.DrawFn) -> RunLog:
    """Launches, rounds, saves, sections and faults in a plausible order; any end may be missing."""
    log = RunLog(world=draw(st.integers(1, 3)))
    t, step, saved, pid = 0.0, 0, 0, 100
    for _ in range(draw(st.integers(1, 3))):
        log.launch(t)
        step = saved
        for number in range(1, 1 + draw(st.integers(0, 3))):
            t += draw(short)
            pids = list(range(pid, pid + log.world))
            pid += log.world
            log.ready(t, number, step, pids, announced=draw(st.booleans()))
            if draw(st.booleans()):
                stop = t + draw(short)
                log.restore(t, stop, number, step)
                t = stop
            count, s = draw(st.integers(0, 4)), draw(short)
            if count:
                t = log.steps(t, step + 1, step + count, number, s=s)
                step += count
            if draw(st.booleans()):
                stall = draw(short)
                log.save(t, stall, step, number, save_s=stall + draw(short))
                saved, t = step, t + stall
            if draw(st.booleans()):
                log.add(t, ev.SectionBegin(name="eval"), src="rank", rank=0, round=number)
                t += draw(short)
                if draw(st.booleans()):
                    done = ev.SectionEnd(name="eval", s=0.0)
                    log.add(t, done, src="rank", rank=0, round=number)
            rank = draw(st.integers(0, log.world - 1))
            if draw(st.booleans()):
                log.inject(t + draw(short), "kill", rank, number, step + 1)
            t += draw(short)
            if draw(st.booleans()):
                guilty = draw(st.integers(-1, log.world - 1))
                log.restart(t, number, guilty=guilty, step=step + 1, found_at=t + draw(short))
            step = draw(st.sampled_from(sorted({0, saved, max(saved, step - 1), step})))
        t += draw(short)
        if draw(st.booleans()):
            log.end(t, draw(st.sampled_from([0, 70, 75, 76])))
        t += draw(short)
    return log


@settings(max_examples=150, deadline=None)
@given(plausible_runs(), st.randoms(use_true_random=False), st.data())
def test_every_instant_is_in_exactly_one_category(
    log: RunLog, chance: random.Random, data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from([(), ("agent",), ("coordinator",), ("agent", "coordinator")]))
    events = log.without(*lost)
    events.sort(key=lambda event: event.t)
    events = events[: data.draw(st.integers(0, len(events)))]
    dropped = data.draw(st.sampled_from([0.0, 0.0, 0.2]))
    events = [event for event in events if chance.random() >= dropped]
    result = account(events)
    assert adds_up(result)
    if events:
        first = min(event.t for event in events)
        last = max(event.t for event in events)
        assert result.wall_ns >= round((last - first) * 1e9) - 2000
    fired = sum(event.kind == "fault.injected" for event in events)
    assert sum(fault.injected for fault in faults(events)) == fired


@settings(max_examples=50, deadline=None)
@given(plausible_runs(), st.randoms(use_true_random=False))
def test_the_order_of_files_and_lines_does_not_matter(log: RunLog, chance: random.Random) -> None:
    mixed = list(log.events)
    chance.shuffle(mixed)
    assert account(mixed) == account(log.events)
    assert faults(mixed) == faults(log.events)


numbers = st.none() | st.integers(0, 4)
values: st.SearchStrategy[object] = st.one_of(
    st.none(), st.integers(-5, 5), st.floats(-5, 5), st.text(max_size=3), st.just([])
)


@st.composite
def any_events(draw: st.DrawFn) -> Event:
    kind = draw(st.sampled_from([*ev.KINDS, "not.known"]))
    fields = getattr(ev.KINDS.get(kind), "__struct_fields__", ())
    good = {"s": 1.0, "name": "eval", "pid": 3, "pids": {"0": 1, "x": 2}, "resume": 1, "fault": "k"}
    data = {name: draw(values) if draw(st.booleans()) else good.get(name, 1) for name in fields}
    return Event(
        v=1,
        run="r",
        src=draw(st.sampled_from(["rank", "agent", "coordinator"])),
        node=draw(st.integers(0, 1)),
        t=draw(st.integers(0, 20)) / 2,
        mono=0.0,
        seq=draw(st.integers(0, 50)),
        kind=kind,
        rank=draw(numbers),
        world=draw(numbers),
        round=draw(numbers),
        step=draw(numbers),
        data=data,
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(any_events(), max_size=25))
def test_events_without_any_sense_still_add_up(events: list[Event]) -> None:
    assert adds_up(account(events))
    faults(events)


def test_four_faults_add_up() -> None:
    result = account(four_faults().events)
    assert adds_up(result)
    assert result.categories_ns["productive"] == 10_000_000_000


def test_ranks_of_another_launcher_that_never_join_work_in_the_round_that_was_announced() -> None:
    log = RunLog()
    log.launch(0.0)
    for number, pids, t in ((1, [10, 11], 0.0), (2, [12, 13], 10.0)):
        ready = ev.RoundReady(pids={str(rank): pid for rank, pid in enumerate(pids)}, resume=0)
        log.add(t + 2.0, ready, round=number)
        log.steps(t + 2.0, 1, 6, 0)
        if number == 1:
            log.restart(t + 8.0, 1)
    log.end(18.0)
    assert seconds(account(log.events)) == {
        "startup": 2.0,
        "lost_work": 6.0,
        "restart": 4.0,
        "productive": 6.0,
    }
