"""Heartbeat ages against the launcher's limits; time is given, nothing waits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import pytest

from keepstep import shm
from keepstep.agent.observe.beats import EVERY_S, Beats, bounds, limit_of
from keepstep.config import Config
from keepstep.config.settings import EngineSettings, NvrxSettings
from keepstep.policy.nvrx_limits import nvrx_limits
from keepstep.shm import Phase

_LIMITS = nvrx_limits(
    dataclasses.replace(
        Config(), engine=EngineSettings(name="nvrx"), nvrx=NvrxSettings(soft_limit_s=20.0)
    )
)


@pytest.fixture
def board() -> Iterator[shm.Board]:
    fd = shm.create()
    made = shm.Board(fd)
    os.close(fd)
    yield made
    made.close()


def test_the_limit_is_the_one_of_who_acts_first() -> None:
    assert limit_of(Phase.STEP, _LIMITS, in_process=True) == 20.0
    assert limit_of(Phase.SAVE, _LIMITS, in_process=True) == _LIMITS.ft_section
    assert limit_of(Phase.STEP, _LIMITS, in_process=False) == _LIMITS.ft_heartbeat > 20.0
    assert limit_of(Phase.SECTION, _LIMITS, in_process=True) == _LIMITS.ft_section
    assert limit_of(Phase.LOAD, _LIMITS, in_process=True) == _LIMITS.ft_initial


@pytest.mark.parametrize("limit_s", [0.5, 2.0, 60.0])
def test_the_observer_s_bound_leaves_time_for_a_stack_before_nvrx_acts(limit_s: float) -> None:
    limits = dataclasses.replace(_LIMITS, soft=limit_s)
    stamp_age_s = 2 * min(1.0, limit_s / 10)  # as old may NVRx's time stamp of a frozen rank be
    floor, bound = bounds(Phase.STEP, limits, in_process=True, floor_s=30.0)
    assert floor == bound >= limit_s / 2
    assert bound + 0.3 + stamp_age_s < limit_s or limit_s < 1.0
    assert bounds(Phase.LOAD, limits, in_process=True, floor_s=1.0)[0] == 1.0


def test_the_longest_silence_is_told_every_ten_seconds(board: shm.Board) -> None:
    beats, told = Beats(_LIMITS, in_process=True), []
    for tenth in range(201):
        now = 1000.0 + tenth / 10
        if tenth % 10 == 0 or 30 < tenth < 50:  # a pause of a second, once of none
            board.begin_step(tenth, now)
        beat = beats.look(3, board, now)
        if beat is not None:
            told.append((round(now - 1000.0, 1), beat.age_s, beat.limit_s, beat.section))
    assert told == [(EVERY_S, 0.9, 20.0, "step"), (2 * EVERY_S, 0.9, 20.0, "step")]


def test_a_silence_of_half_the_limit_is_told_at_once_and_once(board: shm.Board) -> None:
    beats, told = Beats(_LIMITS, in_process=True), []
    board.begin_step(1, 1000.0)
    for tenth in range(155):
        beat = beats.look(3, board, 1000.0 + tenth / 10)
        if beat is not None:
            told.append(beat.age_s)
    assert told == [10.0, 10.1]
    last = beats.last(3)
    assert last is not None
    assert last.age_s == 15.4
    assert beats.last(3) is None


def test_a_section_is_named_and_compared_with_its_own_limit(board: shm.Board) -> None:
    beats = Beats(_LIMITS, in_process=True)
    board.enter(Phase.SECTION, 1000.0, "eval")
    assert beats.look(0, board, 1001.0) is None
    beat = beats.look(0, board, 1015.0)
    assert beat is not None
    assert (beat.section, beat.limit_s) == ("section:eval", _LIMITS.ft_section)


@pytest.mark.parametrize("phase", [Phase.WAIT, Phase.PARKED])
def test_who_waits_for_the_others_has_no_heartbeat(board: shm.Board, phase: Phase) -> None:
    beats = Beats(_LIMITS, in_process=True)
    board.enter(phase, 1000.0)
    assert [beats.look(0, board, 1000.0 + t) for t in (0.0, 50.0, 500.0)] == [None] * 3
    assert beats.last(0) is None
