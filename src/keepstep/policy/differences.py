"""What a run does otherwise than with keepstep's own mechanisms, because NVRx is made so. Pure.

``keepstep run`` prints them once, when the engine is chosen; the conformance suites name the same
clauses, so that what is printed is what was found.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.config import Parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One clause that NVRx cannot keep."""

    clause: str
    """Its name, as in the conformance suites."""
    text: str
    """What happens instead, for the person who starts the run."""


_RESTART = (
    Difference(
        clause="learned-limits",
        text="the soft limit of in-process restart is fixed for a run (nvrx.soft_limit_s); it is "
        "not learned",
    ),
    Difference(
        clause="long-call",
        text="a single call of the main thread that takes longer than the soft limit counts as a "
        "hang",
    ),
)
_LAUNCHER = (
    Difference(
        clause="survivors-keep-process",
        text="after a hard fault (a process ended or frozen) the launcher restarts every rank",
    ),
)
_NO_RESTART = (
    Difference(
        clause="restart-in-process",
        text="after every fault, an exception too, NVRx's launcher restarts every rank",
    ),
)


_RESTART_ONLY = (
    *_LAUNCHER,
    Difference(
        clause="restarts-in-table",
        text="restarts that NVRx does inside the processes are in the ranks' events, not in the "
        "table of faults (a fault that they answered is shown as missed)",
    ),
)


def differences(parts: Parts) -> list[Difference]:
    """The clauses that a run with ``parts`` does not keep; none for a native one."""
    found: list[Difference] = []
    if parts.launcher == "nvrx":
        found += _LAUNCHER if parts.restart == "nvrx" else _NO_RESTART + _LAUNCHER
    elif parts.restart == "nvrx":
        found += _RESTART_ONLY
    if parts.restart == "nvrx":
        found += _RESTART
    return found
