"""Every interval and time-out of NVRx, from the settings. Pure.

NVRx has a dozen of them and checks some against each other only when a rank starts. Here all follow
from one, how long a step may take, so that they fit together for every configuration that is
accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.config import Config
from keepstep.config.rules import hard_limit_s, soft_limit_s

SECTION = "section"
"""The one section that NVRx knows; all sections of a script are this one to it. Its launcher wants
to be told of sections when it starts."""
_FASTEST_S = 0.1
"""How often the monitors look: often enough that a dead process is seen at once."""
_SLOWEST_S = 1.0
_SIBLING_S = 10.0
"""A busy machine may hold a monitor process up for seconds; that is no lost rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NvrxLimits:
    """All in seconds. ``ft_*`` are the launcher's, the others those of in-process restart."""

    soft: float
    """A rank that makes no progress for so long is interrupted."""
    hard: float
    """A rank that the interruption did not free is ended."""
    barrier: float
    """How long ranks wait for each other before a new attempt."""
    completion: float
    """How long ranks that have returned wait for those that have not."""
    heartbeat: float
    """A rank whose monitor process is silent for so long counts as lost."""
    heartbeat_interval: float
    monitor_thread_interval: float
    monitor_process_interval: float
    progress_watchdog_interval: float
    last_call_wait: float
    """How long an interruption waits for other ranks to report theirs."""
    termination_grace: float
    """From SIGTERM to SIGKILL, when a rank is ended."""
    ft_initial: float
    """Until a rank's first heartbeat."""
    ft_heartbeat: float
    """Between two heartbeats of a rank."""
    ft_section: float
    """Length of a section whose length is not known yet."""
    ft_check_interval: float
    ft_safety_factor: float
    """No time: a learned limit is the longest time seen times this."""
    pg_timeout: float
    """Time limit of a collective."""


def nvrx_limits(config: Config) -> NvrxLimits:
    """What NVRx is told, given settings that keep the rules."""
    restart = config.restart
    soft = soft_limit_s(config)
    hard = hard_limit_s(soft)
    sibling = max(soft, _SIBLING_S)
    # The launcher is the second line: it acts when in-process restart has had its whole time to
    # free or end the rank. Where there is no such restart, it is the first line.
    backstop = hard + restart.abort_limit_s + soft
    in_process = config.engine.parts.restart == "nvrx"
    barrier = max(restart.join_limit_s, 2 * hard, 2 * sibling)
    return NvrxLimits(
        soft=soft,
        hard=hard,
        barrier=barrier,
        # One rank may evaluate or save for long while the others have returned.
        completion=max(barrier, config.heartbeat.section_limit_s, config.checkpoint.write_limit_s),
        heartbeat=sibling,
        heartbeat_interval=min(_SLOWEST_S, soft / 10),
        monitor_thread_interval=min(_FASTEST_S, soft / 10),
        monitor_process_interval=min(_FASTEST_S, soft / 10),
        progress_watchdog_interval=min(_SLOWEST_S, soft / 10),
        # Nothing waits for it: keepstep names the cause from the ranks' own events.
        last_call_wait=0.0,
        termination_grace=restart.abort_limit_s,
        ft_initial=config.heartbeat.start_limit_s,
        ft_heartbeat=backstop if in_process else soft,
        ft_section=config.heartbeat.section_limit_s,
        ft_check_interval=min(_SLOWEST_S, soft / 10),
        ft_safety_factor=config.nvrx.safety_factor,
        pg_timeout=restart.pg_timeout_s,
    )
