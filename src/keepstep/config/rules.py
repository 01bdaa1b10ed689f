"""What the settings must fulfil, alone and against each other. Pure.

A rule says why: a limit without its reason is only worked around.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass

from keepstep.config.settings import Config

_Number = int | float
NVRX_HARD_FACTOR = 1.5
"""Hard limit of NVRx's in-process restart over the soft one."""
NVRX_LEAST_S = 0.1
"""Shortest soft limit: its monitors look ten times in that time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """``holds`` takes the values of ``settings`` in order; ``reason`` says what must be so."""

    settings: tuple[str, ...]
    holds: Callable[..., bool]
    reason: str
    when: Callable[[Config], bool] = lambda _: True
    """Whether the rule concerns this configuration at all."""


def _above_zero(name: str, otherwise: str) -> Rule:
    return Rule(
        settings=(name,),
        holds=lambda value: value > 0,
        reason=f"it must be above 0, or {otherwise}",
    )


def _at_least(name: str, least: int, otherwise: str) -> Rule:
    return Rule(
        settings=(name,),
        holds=lambda value: value >= least,
        reason=f"it must be at least {least}{otherwise}",
    )


def _ten_intervals(interval_s: _Number, limit_s: _Number) -> bool:
    return interval_s * 10 <= limit_s


def soft_limit_s(config: Config) -> float:
    """How long a step may take with NVRx's in-process restart, seconds."""
    return _soft_limit_s(config.nvrx.soft_limit_s, config.heartbeat.min_limit_s)


def hard_limit_s(soft_s: float) -> float:
    """After how long NVRx ends a rank that its abort did not free, seconds: above ``soft_s``."""
    return max(NVRX_HARD_FACTOR * soft_s, soft_s + 1)


def _soft_limit_s(given_s: float, min_limit_s: float) -> float:
    return max(given_s or 2 * min_limit_s, NVRX_LEAST_S)


def _outlasts_hard_limit(pg_timeout_s: float, given_s: float, min_limit_s: float) -> bool:
    return pg_timeout_s > hard_limit_s(_soft_limit_s(given_s, min_limit_s))


def _nvrx_restart(config: Config) -> bool:
    return config.engine.parts.restart == "nvrx"


def _nvrx_ends_ranks(config: Config) -> bool:
    return "nvrx" in (config.engine.parts.restart, config.engine.parts.launcher)


RULES: tuple[Rule, ...] = (
    _above_zero("run.grace_s", "ranks are ended before they can commit a checkpoint"),
    _at_least("checkpoint.every_steps", 0, " (0: never by count)"),
    _at_least("checkpoint.keep_every_steps", 0, " (0: none is kept for its number)"),
    _at_least("checkpoint.retries", 0, " (0: a refused shard is not written again)"),
    _at_least("checkpoint.rated_mb_s", 0, " (0: not known)"),
    _at_least("checkpoint.keep_last", 1, ", or the last good checkpoint would be removed"),
    _at_least("checkpoint.max_failures", 0, " (0: the first failed save stops the run)"),
    _at_least("checkpoint.slots", 1, ", or there is nowhere to copy the state to"),
    _above_zero("checkpoint.write_limit_s", "every save counts as failed at once"),
    _above_zero("checkpoint.stall_s", "every save is told of as one that storage does not take"),
    _at_least("restart.max_restarts", -1, " (-1: no limit, 0: no restart)"),
    _at_least("restart.max_without_progress", 1, ", or no failure could be recovered from"),
    _at_least("restart.settle_s", 0, " (0: do not wait for the cause)"),
    _above_zero("restart.abort_limit_s", "every rank is replaced instead of kept"),
    _at_least("restart.save_wait_s", 0, " (0: do not wait for a save)"),
    _above_zero("restart.join_limit_s", "no new process can reach the start in time"),
    _above_zero("restart.signal_after_s", "ranks get the signal before the abort can free them"),
    _above_zero("restart.pg_timeout_s", "every collective times out"),
    _above_zero("heartbeat.interval_s", "the heartbeat thread never rests"),
    _above_zero("heartbeat.min_limit_s", "ranks are ended without having been silent"),
    _above_zero("heartbeat.start_limit_s", "ranks are ended before their first step"),
    _above_zero("heartbeat.section_limit_s", "ranks are ended as soon as a section begins"),
    _at_least("rank.spares", 0, " (0: a dead rank waits for a new process)"),
    Rule(
        settings=("restart.signal_after_s", "restart.abort_limit_s"),
        holds=operator.lt,
        reason="the signal must come before the rank is given up; lower the first or raise the "
        "second",
    ),
    Rule(
        settings=("heartbeat.min_limit_s", "heartbeat.start_limit_s"),
        holds=operator.le,
        reason="the lower bound of every limit cannot be above the upper bound for the start; "
        "lower the first or raise the second",
    ),
    Rule(
        settings=("heartbeat.min_limit_s", "heartbeat.section_limit_s"),
        holds=operator.le,
        reason="the lower bound of every limit cannot be above the upper bound for a section; "
        "lower the first or raise the second",
    ),
    Rule(
        settings=("heartbeat.interval_s", "heartbeat.min_limit_s"),
        holds=_ten_intervals,
        reason="ten intervals must fit into the limit, or a few late heartbeats look like a hang; "
        "lower the first or raise the second",
    ),
    _at_least("nvrx.soft_limit_s", 0, " (0: twice heartbeat.min_limit_s)"),
    _at_least("nvrx.safety_factor", 1, ", or a learned limit ends ranks that are not slower"),
    Rule(
        settings=("engine.launcher", "engine.restart"),
        holds=lambda launcher, restart: restart != "native",
        reason="keepstep's in-process restart needs keepstep's own launcher; leave engine.restart "
        "empty for NVRx's launcher only, or set it to nvrx",
        when=lambda config: config.engine.parts.launcher == "nvrx",
    ),
    Rule(
        settings=("restart.pg_timeout_s", "nvrx.soft_limit_s", "heartbeat.min_limit_s"),
        holds=_outlasts_hard_limit,
        reason="with NVRx's in-process restart a collective must not time out before the hard "
        f"limit, {NVRX_HARD_FACTOR} times the soft one (nvrx.soft_limit_s, where it is 0 "
        "twice heartbeat.min_limit_s): torch would end ranks that NVRx was about to free; raise "
        "the first or lower the soft limit",
        when=_nvrx_restart,
    ),
    Rule(
        settings=("heartbeat.on_hang",),
        holds=lambda on_hang: on_hang == "restart",
        reason="NVRx ends a rank that hangs and cannot only report it; leave it at restart, or use "
        "keepstep's own launcher and restart",
        when=_nvrx_ends_ranks,
    ),
)


def value_of(config: Config, name: str) -> object:
    """The value of the setting ``section.key``."""
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)


def broken(config: Config, unknown: Collection[str] = ()) -> list[str]:
    """One sentence for each rule that ``config`` breaks.

    Args:
        config: The settings to check.
        unknown: Settings whose value could not be read. Rules about them are left out: their value
            here is only the default, and nobody asked for that.
    """
    sentences = []
    for rule in RULES:
        if any(name in unknown for name in rule.settings) or not rule.when(config):
            continue
        values = [value_of(config, name) for name in rule.settings]
        if not rule.holds(*values):
            pairs = zip(rule.settings, values, strict=True)
            stated = " and ".join(
                f"{name} is {'empty' if value == '' else value}" for name, value in pairs
            )
            sentences.append(f"{stated}: {rule.reason}")
    return sentences
