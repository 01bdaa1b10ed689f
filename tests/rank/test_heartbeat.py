"""The native heartbeat does what ``ports.Heartbeat`` says, seen from the agent's side."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep import shm
from keepstep.config import Config
from keepstep.ports import Heartbeat
from keepstep.rank.heartbeat import NativeHeartbeat
from keepstep.rank.runtime import Runtime
from keepstep.shm import Board, Phase
from tests.rank.starts import start


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[NativeHeartbeat, Board]]:
    fd = shm.create()
    rank, agent = Board(fd), Board(fd)
    os.close(fd)
    with contextlib.closing(rank), contextlib.closing(agent):
        runtime = Runtime(start(tmp_path), Config(), None, rank)  # type: ignore[arg-type]
        yield NativeHeartbeat(runtime), agent


def test_steps_and_sections_are_seen_by_the_agent_and_their_limits_end(
    ends: tuple[NativeHeartbeat, Board],
) -> None:
    heartbeat, agent = ends
    assert isinstance(heartbeat, Heartbeat)
    heartbeat.beat(7)
    assert (agent.phase, agent.step) == (Phase.STEP, 7)
    first = agent.last_progress
    with heartbeat.section("eval"):
        assert (agent.phase, agent.label) == (Phase.SECTION, "eval")
        with heartbeat.section("inner"):
            assert agent.label == "inner"
        assert agent.label == "eval"
    assert (agent.phase, agent.label) == (Phase.STEP, "")
    assert agent.last_progress >= first > 0
    heartbeat.close()
    assert agent.phase is Phase.SCRIPT
    kinds = [line.split(b'"kind":"')[1].split(b'"')[0] for line in agent.take_lines()]
    assert kinds == [b"section.begin", b"section.begin", b"section.end", b"section.end"]


def test_a_section_that_raises_ends_too(ends: tuple[NativeHeartbeat, Board]) -> None:
    heartbeat, agent = ends
    heartbeat.beat(1)
    with pytest.raises(ValueError, match="bad"), heartbeat.section("eval"):
        raise ValueError("bad")
    assert agent.phase is Phase.STEP
