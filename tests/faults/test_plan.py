"""Fault plans: what can be asked for, and that each fault fires once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import ExitCode, UsageError
from keepstep.faults import KINDS, Fault, FaultPlan, claim


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_planned(kind: str) -> None:
    plan = FaultPlan.parse([f"{kind}@12:1"], world=2)
    assert plan.faults == (Fault(kind=kind, step=12, rank=1, index=0),)


def test_several_faults_keep_their_place_and_are_due_by_rank_and_step() -> None:
    plan = FaultPlan.parse(["kill@5:1", "hang@5:0", "stop@5:1", "kill@5:1"], world=2)
    assert [(f.kind, f.index) for f in plan.due(1, 5)] == [("kill", 0), ("stop", 2), ("kill", 3)]
    assert [f.kind for f in plan.due(0, 5)] == ["hang"]
    assert plan.due(1, 6) == ()


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("kil@5:1", "no kind 'kil' (the nearest is 'kill')"),
        ("Sigstop@5:1", "the nearest is 'stop'"),
        ("@5:1", "there is no kind ''"),
        ("kill@5:2", "rank 2 does not exist, the job has ranks 0 to 1"),
        ("kill@5:-1", "rank -1 does not exist"),
        ("kill@0:1", "step 0 does not exist, the first step is 1"),
        ("kill@-3:1", "step -3 does not exist"),
        ("kill@five:1", "the step 'five' is not a whole number"),
        ("kill@5:", "the rank '' is not a whole number"),
        ("kill@5.0:1", "the step '5.0' is not a whole number"),
        ("kill:5@1", "KIND@STEP:RANK"),
        ("kill", "KIND@STEP:RANK"),
        ("kill@5:1:2", "KIND@STEP:RANK"),
        ("", "KIND@STEP:RANK"),
    ],
)
def test_a_wrong_fault_is_refused_with_what_is_wrong(spec: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        FaultPlan.parse([spec], world=2)
    assert problem in caught.value.what
    assert caught.value.exit_code == ExitCode.USAGE


def test_all_wrong_faults_are_reported_together() -> None:
    with pytest.raises(UsageError) as caught:
        FaultPlan.parse(["kil@1:0", "kill@1:0", "hang@0:0"], world=1)
    assert "'kil@1:0'" in caught.value.what
    assert "'hang@0:0'" in caught.value.what
    assert "'kill@1:0'" not in caught.value.what


@given(st.text(max_size=20))
def test_any_text_is_a_fault_or_a_usage_error(spec: str) -> None:
    try:
        (fault,) = FaultPlan.parse([spec], world=4).faults
    except UsageError:
        return
    assert FaultPlan.parse([str(fault)], world=4).faults == (fault,)


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 10**9), st.integers(0, 3))
def test_a_fault_is_written_as_it_is_read(kind: str, step: int, rank: int) -> None:
    spec = f"{kind}@{step}:{rank}"
    assert str(FaultPlan.parse([spec], world=4).faults[0]) == spec


def test_a_fault_is_claimed_once_however_many_try(tmp_path: Path) -> None:
    won: list[bool] = []
    start = threading.Barrier(8)

    def rank() -> None:
        start.wait()
        won.append(claim(tmp_path / "run", 0))

    threads = [threading.Thread(target=rank) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]
    assert (tmp_path / "run" / "faults" / "0.fired").is_file()
    assert claim(tmp_path / "run", 1)
