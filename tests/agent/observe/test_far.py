"""Two nodes' rounds, each with its own ranks, that tell one another through a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep import events as ev
from keepstep.agent.observe.far import FarNodes
from keepstep.agent.observe.helpers import Boards
from keepstep.agent.observe.observer import numbered
from keepstep.agent.observe.rounds import Rounds
from keepstep.agent.observe.seats import Ended, Occupant, Started, Told
from keepstep.agent.observe.state import State
from keepstep.clock import SYSTEM
from keepstep.errors import UsageError
from keepstep.events import Event, EventData
from keepstep.shm import Phase
from keepstep.wire.messages import Evidence, JobEnd, Notice, Stalled
from tests.agent.launches import launch_of
from tests.process.job import wait_until

_FAILED = ev.RankFailed(failure="exception", error="ValueError: x", location="t.py:1")
_LOST = ev.RankFailed(failure="peer_lost", error="closed by peer", location="")


class _Node:
    """One node with one rank, whose number is the node's."""

    def __init__(self, folder: Path, number: int) -> None:
        sets = ("engine.launcher=nvrx", "engine.restart=nvrx", "restart.settle_s=1")
        spec = launch_of(*sets, folder=folder, nproc=1, nnodes=2, node_rank=number)
        decides = number == 0
        self.number = number
        self.state = State(
            world=2 if decides else 1, config=spec.config, decides=decides, several=True
        )
        self.far = FarNodes(spec, self.state)
        self.told: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self.rounds = Rounds(
            self.state, self._emit, kill_after_s=3.0, hard_s=10.0, forward=self.far.failed
        )
        self.boards = Boards(1)
        self.who: Occupant
        self.said: list[Notice | JobEnd] = []
        self.rounds.begin()

    def _emit(self, data: EventData, **head: Any) -> None:
        self.told.append((data.kind, msgspec.to_builtins(data), head))

    def close(self) -> None:
        self.far.close()
        self.boards.close()

    def start(self, pid: int) -> None:
        """A new process takes the board."""
        board = self.boards.boards[0]
        self.who = Occupant(
            ticket=pid,
            rank=self.number,
            inc=board.take(pid),
            pid=pid,
            board=board,
            file="",
            logs={},
        )
        self.rounds.started(self.who, SYSTEM.mono())
        self.far.saw(Started(self.who), SYSTEM.mono())

    def tell(self, data: EventData, *, round: int = 1, step: int = 0) -> None:
        """The rank writes an event."""
        now = SYSTEM.mono()
        event = Event(
            v=1,
            run="r",
            src="rank",
            node=self.number,
            t=SYSTEM.wall(),
            mono=now,
            seq=1,
            kind=data.kind,
            rank=self.number,
            round=round,
            step=step,
            data=msgspec.to_builtins(data),
        )
        self.rounds.told(self.who, event, now)
        self.far.saw(Told(self.who, event), now)

    def join(self, number: int) -> None:
        """The rank joins a round and completes its first step."""
        self.boards.boards[0].enter_round(number, 0)
        self.tell(ev.RankJoined(pid=self.who.pid), round=number)

    def work(self, number: int, step: int) -> None:
        """The rank completes a step."""
        self.boards.boards[0].begin_step(step, SYSTEM.mono())
        self.who.phase, self.who.progress = Phase.STEP, SYSTEM.mono()
        self.tell(ev.StepEnd(s=0.1), round=number, step=step)

    def end(self, code: int) -> None:
        """The rank's process ends."""
        now = SYSTEM.mono()
        self.rounds.ended(self.who, code, True, now)
        self.far.saw(Ended(self.who, code, True), now)

    def stand(self, entered: int) -> None:
        """The rank stands still, after so many collectives."""
        seen = Evidence(
            rank=self.number,
            inc=self.who.inc,
            idle_s=5.0,
            limit_s=4.0,
            beat_age_s=0.0,
            state="S",
            phase="step",
            step=8,
            seq=entered,
            seqs={"0": entered},
        )
        self.far.stalled(Stalled(ranks=[seen]))
        self.rounds.failures.stalled(Stalled(ranks=[seen]), SYSTEM.mono())

    def look(self) -> None:
        """A turn of the observer's loop."""
        self.said += self.far.take(self.rounds, SYSTEM.mono())
        self.rounds.progress(SYSTEM.mono())
        went_on, self.rounds.failures.went_on = self.rounds.failures.went_on, []
        self.far.went_on(went_on)
        for one in self.rounds.take():
            if isinstance(one, JobEnd):
                self.far.ended(one)
            elif self.state.decides:
                self.far.said(one)

    def data(self, kind: str) -> list[dict[str, Any]]:
        """The data of the events of ``kind`` that this node wrote."""
        return [data for name, data, _ in self.told if name == kind]

    @property
    def causes(self) -> list[tuple[str, int, str]]:
        """(cause, guilty, level) of each restart."""
        return [(d["cause"], d["guilty"], d["level"]) for d in self.data("restart.cause")]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[_Node, _Node]]:
    """Two nodes in round 1, after step 7."""
    made = _Node(tmp_path, 0), _Node(tmp_path, 1)
    for node in made:
        node.start(101 + node.number)
        node.join(1)
        node.work(1, 7)
    _until(made, lambda: made[0].state.running, "round 1 is ready")
    yield made
    for node in made:
        node.close()


def _until(nodes: tuple[_Node, _Node], probe: Callable[[], object], what: str) -> None:
    def look() -> bool:
        for node in nodes:
            node.look()
        return bool(probe())

    wait_until(look, what)


def _restart(nodes: tuple[_Node, _Node]) -> None:
    for node in nodes:
        node.join(2)
        node.work(2, 6)
    _until(nodes, lambda: nodes[0].state.running, "round 2 is ready")
    for node in nodes:
        node.work(2, 7)
    _until(nodes, lambda: nodes[0].data("restart.end"), "all go on")


def test_node_0_writes_of_all_ranks_and_the_other_one_of_its_own(
    nodes: tuple[_Node, _Node],
) -> None:
    zero, one = nodes
    assert zero.data("round.ready") == [{"pids": {"0": 101, "1": 102}, "resume": 6}]
    assert [data["pid"] for data in zero.data("rank.start")] == [101]
    assert {kind for kind, _, _ in one.told} == {"rank.start"}


def test_an_exception_on_another_node_is_named_with_the_node(nodes: tuple[_Node, _Node]) -> None:
    zero, one = nodes
    one.tell(_FAILED, step=8)
    zero.tell(_LOST, step=8)
    _restart(nodes)
    assert zero.causes == [("exception", 1, "rerun")]
    assert zero.data("restart.cause")[0]["line"].startswith("rank 1 (node 1) raised ValueError: x")
    assert one.causes == []


def test_a_rank_killed_on_another_node_is_named(nodes: tuple[_Node, _Node]) -> None:
    zero, one = nodes
    one.end(-9)
    zero.tell(_LOST, step=8)
    _until(nodes, lambda: zero.causes, "the cause is known")
    assert zero.causes == [("killed", 1, "respawn")]
    assert zero.data("rank.exit") == []  # it is the other node's to write down
    assert [data["code"] for data in one.data("rank.exit")] == [-9]


def test_a_rank_ended_by_the_launcher_before_the_cause_is_known_here_is_no_cause(
    nodes: tuple[_Node, _Node],
) -> None:
    zero, one = nodes
    one.end(-15)
    assert one.data("rank.exit")[0]["by_us"] is True
    zero.end(-9)
    _until(nodes, lambda: zero.causes, "the cause is known")
    assert zero.causes == [("killed", 0, "respawn")]


@pytest.mark.parametrize("hung", [0, 1])
def test_a_hang_is_blamed_once_all_nodes_have_said_how_their_ranks_stand(
    hung: int, nodes: tuple[_Node, _Node]
) -> None:
    zero, one = nodes
    for node in nodes:
        node.stand(9 if node.number == hung else 10)
    _until(nodes, lambda: zero.data("rank.hung"), "the hang is seen")
    assert [head["rank"] for kind, _, head in zero.told if kind == "rank.hung"] == [hung]
    assert one.data("rank.hung") == []
    nodes[1 - hung].tell(_LOST, step=8)
    _restart(nodes)
    assert zero.causes == [("hang", hung, "rerun")]


def test_a_rank_of_another_node_that_goes_on_was_only_slow(nodes: tuple[_Node, _Node]) -> None:
    zero, _ = nodes
    for node in nodes:
        node.stand(10 - node.number)
    _until(nodes, lambda: zero.state.members[1].hang, "the hang is seen")
    for node in nodes:
        node.work(1, 8)
    _until(nodes, lambda: zero.state.members[1].hang is None, "it goes on")
    zero.end(-9)
    _until(nodes, lambda: zero.causes, "the cause is known")
    assert zero.causes == [("killed", 0, "respawn")]


def test_when_node_0_ends_the_run_the_others_end_with_the_same_code(
    nodes: tuple[_Node, _Node],
) -> None:
    _, one = nodes
    one.tell(ev.RankFailed(failure="save", error="disk full", location="", fatal=65), step=8)
    _until(nodes, lambda: any(isinstance(said, JobEnd) for said in one.said), "the end is heard")
    [end] = [said for said in one.said if isinstance(said, JobEnd)]
    assert end.exit_code == 65
    assert "rank 1 (node 1) cannot save" in end.reason


def test_a_commit_on_another_node_is_progress_and_said_everywhere(
    nodes: tuple[_Node, _Node],
) -> None:
    zero, one = nodes
    one.tell(ev.CheckpointCommit(folder="step-00000007", bytes=1, save_s=0.1), step=7)
    _until(
        nodes,
        lambda: [said for said in one.said if isinstance(said, Notice) and said.kind == "commit"],
        "node 0 has said so",
    )
    assert zero.state.committed == 7


@pytest.mark.parametrize("number", [0, 1])
def test_a_node_that_hears_of_no_other_ends_the_run_with_the_reason(
    number: int, tmp_path: Path
) -> None:
    alone = _Node(tmp_path, number)
    alone.start(101)
    alone.join(1)
    now = SYSTEM.mono()
    for later_s, ended in ((0.0, False), (80.0, False), (91.0, True)):
        alone.far.take(alone.rounds, now + later_s)
        assert alone.state.over is ended
    [end] = [one for one in alone.rounds.take() if isinstance(one, JobEnd)]
    assert end.exit_code == 64
    assert f"nothing is heard of node {1 - number} in {tmp_path}" in end.reason
    assert "one run folder on shared storage" in end.reason
    alone.close()


def test_a_node_of_several_has_a_number_from_the_flag_or_from_kubernetes(tmp_path: Path) -> None:
    def of(environ: dict[str, str], rank: int | None = None) -> int | None:
        spec = launch_of(folder=tmp_path, nnodes=2, node_rank=rank, environ=environ)
        return numbered(spec).node_rank

    assert of({}, rank=1) == 1
    assert of({"JOB_COMPLETION_INDEX": "1"}) == 1
    for index in ({}, {"JOB_COMPLETION_INDEX": "2"}, {"JOB_COMPLETION_INDEX": "x"}):
        with pytest.raises(UsageError, match="one of 2 nodes, and its number is not known"):
            of(index)
    assert numbered(launch_of(folder=tmp_path)).node_rank is None
