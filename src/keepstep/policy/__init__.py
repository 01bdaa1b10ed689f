"""Decisions as pure functions: who failed, what is done about it, how long to wait.

No clock, no files, no processes: everything comes in as an argument, with the reason going out.
"""

from keepstep.policy.attribution import (
    DEFINITE,
    KINDS,
    Attribution,
    FailureKey,
    Report,
    attribute,
    settled,
)
from keepstep.policy.ladder import Decision, Progress, Record, decide
from keepstep.policy.limits import Learned, LearnedLimits, Limits, Watch, late
from keepstep.policy.stall import Blame, blame

__all__ = [
    "DEFINITE",
    "KINDS",
    "Attribution",
    "Blame",
    "Decision",
    "FailureKey",
    "Learned",
    "LearnedLimits",
    "Limits",
    "Progress",
    "Record",
    "Report",
    "Watch",
    "attribute",
    "blame",
    "decide",
    "late",
    "settled",
]
