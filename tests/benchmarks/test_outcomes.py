"""How a fault ended, told from marks that are invented here."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks import outcomes
from benchmarks.harness import Watched
from benchmarks.outcomes import Mark, Outcome
from keepstep import events
from keepstep.events import Event, EventData

DIGEST = "5a" * 32
LINES = [(1.0, "[rank0] begin"), (9.0, f"[rank0] weights digest: {DIGEST}")]


def ended(code: int | None = 0, late: bool = False, at: float = 20.0) -> Watched:
    return Watched(lines=LINES, code=code, late=late, ended=at)


def attempt(name: str, t: float, step: int, pids: list[int], completed: list[float]) -> list[Mark]:
    """All ranks resume at ``t`` from ``step``; those of ``completed`` complete the next step."""
    world = len(pids)
    marks = [Mark(t, "resumed", rank, world, pid, name, step) for rank, pid in enumerate(pids)]
    marks += [
        Mark(when, "step", rank, world, pids[rank], name, step + 1)
        for rank, when in enumerate(completed)
    ]
    return marks


def fault(t: float, rank: int, step: int = 8, name: str = "0") -> Mark:
    return Mark(t, "fault", rank, 2, 0, name, step)


def judge(*parts: list[Mark] | Mark) -> Outcome:
    marks = [mark for part in parts for mark in (part if isinstance(part, list) else [part])]
    return outcomes.judge(marks, ended())


def test_recovery_ends_with_the_last_rank_and_counts_the_step_that_was_cut_off() -> None:
    before = attempt("0", 1.0, 0, [11, 12], [1.1, 1.1])
    after = attempt("1", 14.0, 5, [11, 13], [14.5, 14.25])
    outcome = judge(before, fault(10.0, 1), Mark(11.5, "found"), Mark(10.5, "found"), after)
    assert outcome == Outcome(
        fired=True,
        found_s=0.5,
        recovered_s=4.5,
        world=2,
        steps_lost=3,
        kept=True,
        attempts=2,
        digest=DIGEST,
        waited_s=10.0,
        code=0,
        late=False,
        last=f"[rank0] weights digest: {DIGEST}",
    )


def test_an_attempt_in_which_a_rank_completes_nothing_is_passed_over() -> None:
    before = attempt("0", 1.0, 0, [11, 12], [1.1, 1.1])
    half = attempt("1", 12.0, 5, [21, 22], [12.5])
    whole = attempt("2", 15.0, 5, [31, 32], [15.5, 15.75])
    outcome = judge(before, fault(10.0, 0), half, whole)
    assert (outcome.recovered_s, outcome.kept, outcome.attempts) == (5.75, False, 3)


def test_an_attempt_that_not_every_rank_began_is_passed_over() -> None:
    before = attempt("0", 1.0, 0, [11, 12], [1.1, 1.1])
    lonely = Mark(12.0, "resumed", 0, 2, 21, "1", 5)
    outcome = judge(before, fault(10.0, 0), lonely, Mark(12.5, "step", 0, 2, 21, "1", 6))
    assert (outcome.recovered_s, outcome.world, outcome.steps_lost) == (None, None, None)


def test_a_survivor_that_completes_the_cut_off_step_has_not_recovered() -> None:
    before = attempt("0", 1.0, 0, [11, 12], [1.1, 1.1])
    late = Mark(10.1, "step", 0, 2, 11, "0", 8)
    assert judge(before, fault(10.0, 1), late).recovered_s is None


def test_a_smaller_world_counts_as_recovered_and_is_told() -> None:
    before = attempt("0.0", 1.0, 0, [11, 12], [1.1, 1.1])
    after = attempt("0.1", 12.0, 5, [11], [12.5])
    outcome = judge(before, fault(10.0, 1, name="0.0"), after)
    assert (outcome.recovered_s, outcome.world, outcome.kept) == (2.5, 1, True)


def test_a_job_without_a_fault_has_nothing_but_its_digest() -> None:
    outcome = judge(attempt("0", 1.0, 0, [11, 12], [1.1, 1.1]), Mark(2.0, "found"))
    assert not outcome.fired
    assert (outcome.recovered_s, outcome.found_s, outcome.waited_s) == (None, None, 0.0)
    assert outcome.digest == DIGEST


def test_a_job_that_wrote_nothing_can_be_judged() -> None:
    outcome = outcomes.judge([], Watched([(1.0, "ImportError: no such thing")], 1, False, 2.0))
    assert (outcome.fired, outcome.attempts, outcome.code) == (False, 0, 1)
    assert outcome.last == "ImportError: no such thing"


def test_last_words_name_an_error_rather_than_what_came_after() -> None:
    lines = [(1.0, "RuntimeError: Connection closed"), (2.0, "bye"), (3.0, "")]
    assert outcomes.judge([], Watched(lines, 1, False, 4.0)).last.startswith("RuntimeError")


def test_step_lengths_do_not_reach_over_a_restart() -> None:
    marks = [Mark(t, "step", 0, 2, 1, "0", n) for n, t in enumerate((1.0, 1.25, 1.75))]
    marks += [Mark(9.0, "step", 0, 2, 1, "1", 1), Mark(9.5, "step", 0, 2, 1, "1", 2)]
    marks += [Mark(1.5, "step", 1, 2, 2, "0", 1)]
    assert outcomes.step_lengths(marks) == [0.25, 0.5, 0.5]


def test_only_lines_that_tell_of_a_failure_are_marks() -> None:
    lines = [(1.0, "starting workers"), (2.5, "failed (exitcode: -9) local_rank: 1")]
    assert outcomes.from_lines(lines, r"failed \(exitcode") == [Mark(2.5, "found")]


def test_records_of_a_job_are_read_back_and_none_is_no_error(tmp_path: Path) -> None:
    assert outcomes.read_records(tmp_path) == []
    line = '{"t": 1.5, "kind": "step", "rank": 1, "world": 2, "pid": 7, "attempt": "0", "step": 3}'
    (tmp_path / "marks.jsonl").write_text(line + "\n", encoding="utf-8")
    assert outcomes.read_records(tmp_path) == [Mark(1.5, "step", 1, 2, 7, "0", 3)]


def test_a_folder_without_events_has_no_marks(tmp_path: Path) -> None:
    assert outcomes.read_events(tmp_path) == []


# --- from keepstep's events -----------------------------------------------------------------------


def event(
    t: float, data: EventData, round: int, rank: int | None = None, step: int | None = None
) -> Event:
    return Event(
        v=1,
        run="invented",
        src="coordinator" if rank is None else "rank",
        node=0,
        t=t,
        mono=t,
        seq=1,
        kind=data.kind,
        rank=rank,
        round=round,
        step=step,
        data=msgspec.to_builtins(data),
    )


@pytest.fixture
def run() -> list[Event]:
    """A kill of rank 1 in step 8, found after 0.25 s, resumed from step 5."""
    return [
        event(1.0, events.RoundReady(pids={"0": 11, "1": 12}, resume=0), 1),
        *(event(9.0, events.StepEnd(s=0.1), 1, rank, 7) for rank in (0, 1)),
        event(9.5, events.FaultInjected(fault="kill", index=0), 1, 1, 8),
        event(9.75, events.RestartBegin(first_kind="rank.exit"), 1),
        event(10.5, events.RoundReady(pids={"0": 11, "1": 13}, resume=5), 2),
        event(11.0, events.StepEnd(s=0.1), 2, 0, 6),
        event(11.5, events.StepEnd(s=0.1), 2, 1, 6),
    ]


def test_the_events_of_a_run_tell_the_same_as_the_records_of_a_job(run: list[Event]) -> None:
    outcome = outcomes.judge(outcomes.from_events(reversed(run)), ended())
    assert (outcome.found_s, outcome.recovered_s) == (0.25, 2.0)
    assert (outcome.steps_lost, outcome.world, outcome.kept) == (3, 2, True)


def test_a_survivor_with_a_new_process_was_not_kept(run: list[Event]) -> None:
    run[5] = event(10.5, events.RoundReady(pids={"0": 14, "1": 13}, resume=5), 2)
    assert outcomes.judge(outcomes.from_events(run), ended()).kept is False
