"""Who makes no progress, as the agent's boards show it; time is given, nothing waits."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.agent.hangs import HangWatch, bounds_of
from keepstep.agent.processes import RankProcess
from keepstep.config import Config
from keepstep.config.settings import HeartbeatSettings
from keepstep.shm import Phase
from keepstep.wire.messages import Stalled
from keepstep.wire.types import stack_file
from tests.agent.boards import rank_process

_TICK_S = 0.05
_CONFIG = dataclasses.replace(
    Config(),
    heartbeat=HeartbeatSettings(min_limit_s=2.0, start_limit_s=100.0, section_limit_s=50.0),
)


class _Node:
    """Ranks on a clock that the test moves; the watch looks at each tick."""

    def __init__(self, ranks: list[RankProcess], folder: Path) -> None:
        self.ranks = ranks
        self.now = 1000.0
        self.watch = HangWatch[RankProcess](bounds_of(_CONFIG), folder, _TICK_S)
        self.stalls: list[Stalled] = []
        self.suspects: list[tuple[int, float, float]] = []  # rank, when, limit

    def pass_time(self, seconds: float, *, beating: bool = True) -> None:
        """Let the time pass with a look at each tick."""
        for _ in range(round(seconds / _TICK_S)):
            self.now += _TICK_S
            if beating:
                for process in self.ranks:
                    process.board.beat(self.now, 0)
            stalled, suspects = self.watch.look(self.ranks, self.now)
            if stalled is not None:
                self.stalls.append(stalled)
            for process, suspect in suspects:
                self.suspects.append((process.rank, self.now, suspect.limit_s))

    def steps(self, first: int, last: int, seconds: float, *ranks: int) -> None:
        """Steps ``first`` to ``last`` of ``seconds`` each on these ranks."""
        for step in range(first, last + 1):
            for rank in ranks:
                self.ranks[rank].board.begin_step(step, self.now)
            self.pass_time(seconds)
            for rank in ranks:
                self.ranks[rank].board.end_step(step, seconds, 0.0)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[_Node]:
    with contextlib.ExitStack() as stack:
        yield _Node([stack.enter_context(rank_process(rank)) for rank in (0, 1)], tmp_path)


def test_a_rank_that_stops_after_short_steps_is_suspect_first_and_reported_at_the_lower_bound(
    node: _Node,
) -> None:
    node.steps(1, 10, 0.1, 0, 1)
    stopped = node.now
    node.ranks[0].board.begin_step(11, stopped)
    for _ in range(40):
        node.ranks[1].board.enter(Phase.STEP, node.now)
        node.pass_time(0.1)
    assert [rank for rank, _, _ in node.suspects] == [0]
    assert stopped + 1.0 < node.suspects[0][1] < stopped + 1.5
    [stall] = node.stalls  # once, although it stays so
    hung, other = stall.ranks
    assert (hung.rank, hung.phase, hung.step) == (0, "step", 11)
    assert hung.limit_s == 2.0
    assert 2.0 < hung.idle_s < 2.2
    assert other.idle_s < 0.2
    assert hung.beat_age_s == 0.0


def test_a_suspect_that_goes_on_is_not_reported_and_can_be_suspect_again(node: _Node) -> None:
    node.steps(1, 10, 0.1, 0, 1)
    for _ in range(2):
        node.ranks[0].board.enter(Phase.STEP, node.now)
        node.ranks[1].board.enter(Phase.WAIT, node.now)
        node.pass_time(1.6)
    assert [rank for rank, _, _ in node.suspects] == [0, 0]
    assert node.stalls == []


def test_the_limit_follows_the_steps_that_were_seen(node: _Node) -> None:
    node.steps(1, 5, 2.0, 0, 1)
    for process in node.ranks:
        process.board.begin_step(6, node.now)
    node.pass_time(10.0)
    assert node.stalls == []
    node.pass_time(20.0)
    [stall] = node.stalls
    assert stall.ranks[0].limit_s == pytest.approx(24.0)  # twelve times the usual step


def test_the_first_step_has_the_bound_of_the_start(node: _Node) -> None:
    for process in node.ranks:
        process.board.begin_step(1, node.now)
    node.pass_time(99.0)
    assert node.stalls == []
    node.pass_time(2.0)
    assert [one.limit_s for one in node.stalls[0].ranks] == [100.0, 100.0]


def test_a_section_has_its_own_bound_and_name(node: _Node) -> None:
    node.ranks[0].board.enter(Phase.SECTION, node.now, "eval")
    node.ranks[1].board.enter(Phase.WAIT, node.now)
    node.pass_time(51.0)
    [stall] = node.stalls
    assert stall.ranks[0].phase == "section:eval"
    assert stall.ranks[0].limit_s == 50.0
    assert stall.ranks[1].idle_s == 0.0


@pytest.mark.parametrize("phase", [Phase.WAIT, Phase.PARKED])
def test_who_waits_for_keepstep_itself_is_not_watched(node: _Node, phase: Phase) -> None:
    for process in node.ranks:
        process.board.enter(phase, node.now)
    node.pass_time(300.0)
    assert node.stalls == []
    assert node.suspects == []


def test_a_process_without_heartbeat_thread_is_not_watched(node: _Node) -> None:
    for process in node.ranks:
        process.board.enter(Phase.START, node.now)
    node.pass_time(300.0, beating=False)
    assert node.stalls == []
    assert node.suspects == []


def test_time_in_which_the_agent_itself_did_not_run_is_nobodys_fault(node: _Node) -> None:
    node.steps(1, 10, 0.1, 0, 1)
    for process in node.ranks:
        process.board.begin_step(11, node.now)
    node.now += 600.0
    node.pass_time(0.5)
    assert node.stalls == []
    assert node.suspects == []


def test_the_evidence_holds_the_end_of_the_ranks_stack_file(node: _Node, tmp_path: Path) -> None:
    node.steps(1, 10, 0.1, 0, 1)
    file = stack_file(tmp_path, 1, 0)
    file.parent.mkdir()
    node.ranks[1].pid = 2**22 + 1  # nobody: asking for its stack must not fail
    file.write_text("x" * 10_000 + "File train.py, line 7 in wait")
    node.ranks[1].board.begin_step(11, node.now)
    node.ranks[0].board.enter(Phase.WAIT, node.now)
    node.pass_time(3.0)
    [stall] = node.stalls
    assert stall.ranks[0].stack == ""
    assert stall.ranks[1].stack.endswith("line 7 in wait")
    assert len(stall.ranks[1].stack) == 8000
    assert stall.ranks[1].state == "X"


def test_a_replaced_process_starts_with_nothing_remembered(node: _Node) -> None:
    node.steps(1, 10, 0.1, 0, 1)
    node.ranks[0].board.begin_step(11, node.now)
    node.ranks[1].board.enter(Phase.WAIT, node.now)
    node.pass_time(3.0)
    node.watch.forget(node.ranks[0])
    node.pass_time(3.0)
    assert len(node.stalls) == 2
    assert [rank for rank, _, _ in node.suspects] == [0, 0]
