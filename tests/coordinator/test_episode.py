from __future__ import annotations

from typing import Any

import pytest

from keepstep.coordinator.episode import Episode, early_report, ended_report, failed_report
from keepstep.policy import Report
from keepstep.wire.messages import Failed, RankDown

SETTLE_S = 1.0


def report(rank: int, kind: str = "exception", t: float = 10.0, **more: Any) -> Report:
    return Report(rank=rank, t=t, kind=kind, **{"step": 5, "error": "E: bad", **more})


def test_a_kill_is_settled_at_once_and_an_exception_when_all_are_accounted_for() -> None:
    killed = Episode(report(0, "killed", code=-9), "", 10.0)
    assert killed.settled(4, set(), 10.0, SETTLE_S)
    raised = Episode(report(0), "", 10.0)
    assert not raised.settled(3, {1}, 10.0, SETTLE_S)
    assert raised.settled(3, {1, 2}, 10.0, SETTLE_S)


def test_it_waits_no_longer_than_the_settling_time_from_its_first_evidence() -> None:
    episode = Episode(report(0, "peer_lost"), "", 10.0)
    episode.add(report(1, "peer_lost", t=10.9), "")
    assert not episode.settled(4, set(), 10.0 + SETTLE_S - 0.1, SETTLE_S)
    assert episode.settled(4, set(), 10.0 + SETTLE_S, SETTLE_S)


def test_later_evidence_can_change_who_is_to_blame() -> None:
    episode = Episode(report(0, "peer_lost"), "", 10.0)
    episode.add(report(2, "killed", t=10.4, code=-9), "")
    found = episode.attribute(3, {}, SETTLE_S)
    assert (found.cause, found.guilty, found.consequences) == ("killed", 2, (0,))


def test_the_stack_is_the_guilty_rank_s_first_one() -> None:
    episode = Episode(report(0), "first", 10.0)
    episode.add(report(1), "other")
    episode.add(report(0), "second")
    episode.add(report(2), "")
    assert [episode.stack(rank) for rank in (0, 1, 2, -1)] == ["first", "other", "", ""]


def test_a_report_of_a_rank_itself_keeps_what_it_told() -> None:
    failed = Failed(
        inc=1,
        round=2,
        failure="exception",
        error="E: bad",
        location="train.py:9",
        step=7,
        t=10.5,
        fatal=65,
        fresh=True,
        seqs={"0": 3},
    )
    assert failed_report(4, failed) == Report(
        rank=4,
        t=10.5,
        kind="exception",
        error="E: bad",
        location="train.py:9",
        step=7,
        fresh=True,
        fatal=65,
        seqs={"0": 3},
    )


@pytest.mark.parametrize(
    ("code", "oom", "kind", "error"),
    [
        (-9, False, "killed", ""),
        (-9, True, "oom", ""),
        (3, False, "exit", "exit code 3 before the run was over"),
        (0, False, "exit", "exit code 0 before the run was over"),
    ],
)
def test_a_report_of_an_ended_process_says_how_it_ended(
    code: int, oom: bool, kind: str, error: str
) -> None:
    down = RankDown(rank=2, inc=0, code=code, oom=oom, by_us=False, step=6, t=9.5)
    found = ended_report(down, fresh=True)
    assert found == Report(rank=2, t=9.5, kind=kind, code=code, step=6, fresh=True, error=error)


def test_an_end_before_joining_is_an_exit_of_a_fresh_process() -> None:
    found = early_report(1, 12.0)
    assert (found.rank, found.t, found.kind, found.fresh) == (1, 12.0, "exit", True)
    assert found.error == "exit code 0 before the run was over"
