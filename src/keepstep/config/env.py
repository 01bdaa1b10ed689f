"""The process's environment: the only module that reads or changes it. Runs in every process.

Everything else gets the environment as a mapping, so that it can be tested without one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def snapshot() -> dict[str, str]:
    """A copy of the environment as it is now."""
    return dict(os.environ)


def read(name: str, default: str = "") -> str:
    """The value of one variable, or ``default`` where it is not set."""
    return os.environ.get(name, default)


def update(mapping: Mapping[str, str]) -> None:
    """Set the variables of ``mapping``; all others stay as they are."""
    os.environ.update(mapping)


def apply(mapping: Mapping[str, str]) -> None:
    """Take on a rank's variables: a parked process calls this when it is given a rank's number.

    Variables that ``mapping`` does not name stay: the process was started with the job's.

    Raises:
        ValueError: a name is empty or holds ``=``, or a value holds a null byte; nothing was set.
    """
    for name, value in mapping.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"the environment cannot hold the variable {name!r} as given")
    os.environ.update(mapping)
