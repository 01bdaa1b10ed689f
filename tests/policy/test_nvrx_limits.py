"""Limits of NVRx: whatever the settings, they keep NVRx's own conditions and ours."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from keepstep.config import Config, EngineSettings
from keepstep.config.load import load
from keepstep.config.rules import broken
from keepstep.policy.nvrx_limits import NvrxLimits, nvrx_limits


def limits(*sets: str) -> NvrxLimits:
    return nvrx_limits(load(file=None, environ={}, sets=["engine.name=nvrx", *sets], arguments={}))


SECONDS = st.one_of(st.floats(1e-9, 10), st.floats(1, 1e7))


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Settings that keep every rule, with NVRx inside the ranks or only around them."""
    least = draw(SECONDS)
    config = Config()
    engine = draw(
        st.sampled_from(
            [
                EngineSettings(name="nvrx"),
                EngineSettings(launcher="nvrx"),
                EngineSettings(restart="nvrx"),
            ]
        )
    )
    config = dataclasses.replace(
        config,
        engine=engine,
        nvrx=dataclasses.replace(config.nvrx, soft_limit_s=draw(st.just(0.0) | SECONDS)),
        heartbeat=dataclasses.replace(
            config.heartbeat,
            interval_s=least / draw(st.floats(11, 1000)),
            min_limit_s=least,
            start_limit_s=least + draw(SECONDS),
            section_limit_s=least + draw(SECONDS),
        ),
        checkpoint=dataclasses.replace(config.checkpoint, write_limit_s=draw(SECONDS)),
        restart=dataclasses.replace(
            config.restart,
            settle_s=draw(st.just(0.0) | SECONDS),
            abort_limit_s=0.2 + draw(SECONDS),
            join_limit_s=draw(SECONDS),
            pg_timeout_s=draw(SECONDS) * 3,
        ),
    )
    assume(not broken(config))
    return config


@given(configs())
def test_the_conditions_that_nvrx_enforces_hold_for_all_valid_settings(config: Config) -> None:
    """Those of ``inprocess/wrap.py``, equal from 0.4.1 to main, on the times that it is given."""
    known = nvrx_limits(config)
    time = {
        name: timedelta(seconds=value)
        for name, value in dataclasses.asdict(known).items()
        if name != "ft_safety_factor"
    }
    assert time["soft"] < time["hard"] < time["barrier"]
    assert time["monitor_process_interval"] < time["barrier"]
    assert time["heartbeat"] < time["barrier"]
    assert time["heartbeat_interval"] < time["heartbeat"]
    assert time["monitor_process_interval"] < time["heartbeat"]
    assert time["monitor_process_interval"] < time["soft"]
    assert time["monitor_thread_interval"] < time["soft"]
    assert time["progress_watchdog_interval"] < time["soft"]


@given(configs())
def test_each_line_of_defence_waits_for_the_one_before_it(config: Config) -> None:
    known = nvrx_limits(config)
    if config.engine.parts.restart == "nvrx":
        assert known.soft < known.hard < known.pg_timeout
        assert known.hard + known.termination_grace < known.ft_heartbeat
    else:
        assert known.ft_heartbeat == known.soft
    assert known.barrier >= config.restart.join_limit_s
    assert known.completion >= known.barrier
    assert known.completion >= config.heartbeat.section_limit_s


@given(configs())
def test_nothing_that_looks_regularly_looks_less_than_once_a_second(config: Config) -> None:
    known = nvrx_limits(config)
    intervals = [value for name, value in dataclasses.asdict(known).items() if "interval" in name]
    assert len(intervals) == 5
    assert all(0 < interval <= 1 for interval in intervals)
    assert known.monitor_process_interval <= 0.1


def test_without_a_soft_limit_it_is_twice_the_shortest_limit_of_a_heartbeat() -> None:
    assert limits().soft == 60
    assert limits("heartbeat.min_limit_s=5").soft == 10
    assert limits("nvrx.soft_limit_s=7").soft == 7


@pytest.mark.parametrize(("soft", "hard"), [(60, 90), (1, 2), (2, 3), (3, 4.5)])
def test_the_hard_limit_is_half_as_long_again_and_at_least_a_second_more(
    soft: float, hard: float
) -> None:
    assert limits(f"nvrx.soft_limit_s={soft}").hard == hard


def test_the_launcher_gets_the_bounds_of_the_settings() -> None:
    known = limits(
        "heartbeat.start_limit_s=77", "heartbeat.section_limit_s=88", "nvrx.safety_factor=4"
    )
    assert (known.ft_initial, known.ft_section, known.ft_safety_factor) == (77, 88, 4)


def test_a_monitor_process_on_a_busy_machine_is_not_lost_within_ten_seconds() -> None:
    assert limits("nvrx.soft_limit_s=0.5").heartbeat == 10
