"""The seams: what an engine supplies. Mechanism only; policy lives elsewhere, once.

``Heartbeat``, ``ShardWriter`` (with ``PendingWrite``), ``Restarter`` and ``HealthCheck`` are all
that an engine implements. Commit, verification, retention, budgets, events and reports are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import msgspec

from keepstep.wire.types import Version, World

__all__ = [
    "Finding",
    "HealthCheck",
    "Heartbeat",
    "PendingWrite",
    "Restarter",
    "ShardWriter",
    "Version",
    "World",
]

T = TypeVar("T")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a health check: ``status`` ok, bad or absent; ``action`` continue, restart_rank or
    replace_node."""

    check: str
    status: str
    detail: str
    action: str = "continue"


@runtime_checkable
class Heartbeat(Protocol):
    """Tells the launcher that this rank makes progress."""

    def beat(self, step: int) -> None:
        """Progress was made; ``step`` is the step now in progress."""

    def section(self, name: str) -> AbstractContextManager[None]:
        """A named span with its own limit."""

    def close(self) -> None:
        """No step is in progress any more; a later ``beat`` begins again."""


@runtime_checkable
class PendingWrite(Protocol):
    """A save in flight. Call every method on every rank, at the same step."""

    def staged(self) -> bool:
        """Whether the state may change again."""

    def done(self) -> bool:
        """Whether the checkpoint is committed."""

    def wait(self, timeout_s: float) -> None:
        """Return when committed.

        Raises:
            SaveFailed: it failed, or is not committed after ``timeout_s`` seconds.
        """


@runtime_checkable
class ShardWriter(Protocol):
    """Writes this rank's shard of a checkpoint and reads it back."""

    def begin(self, state: Mapping[str, object], version: Version, folder: Path) -> PendingWrite:
        """Copy ``state`` and start to write it; returns once the state may change."""

    def load(self, state: Mapping[str, object], folder: Path) -> int:
        """Fill ``state`` in place from a committed checkpoint; returns bytes read.

        Raises:
            CheckpointCorrupt, CheckpointMismatch: nothing may be trusted, or it is another model's.
        """

    def close(self, *, abort: bool = False) -> None:
        """End the writer; with ``abort`` unfinished writes are dropped."""


@runtime_checkable
class Restarter(Protocol):
    """Calls ``attempt`` until it returns, once a round."""

    def run(self, attempt: Callable[[World], T]) -> T:
        """Returns what ``attempt`` returned in the round that finished."""


@runtime_checkable
class HealthCheck(Protocol):
    """One check of the node."""

    name: str

    def __call__(self) -> Finding:
        """Run the check; must return within its own limit."""
