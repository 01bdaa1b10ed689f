"""The process groups of a job's rounds: which backend, whose store, and the drill's extra group.

Runs in the rank, for every engine: native rounds meet through the control channel, those of another
launcher through a store outside the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from keepstep.errors import UsageError
from keepstep.rank import torch_private
from keepstep.rank.groups import GroupSet
from keepstep.rank.runtime import Runtime
from keepstep.rank.store import ControlStore
from keepstep.wire.types import World


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a round find each other: a ``torch.distributed.Store``, and what makes
    waiting calls of it return (``GroupSet`` shuts down the sockets of one that has some)."""

    store: Any
    abort: Callable[[], None]


def control_meeting(runtime: Runtime) -> Callable[[World], Meeting]:
    """Rounds meet through the control channel."""

    def make(world: World) -> Meeting:
        store = ControlStore(
            runtime.control,
            inc=runtime.start.inc,
            round=world.round,
            timeout_s=runtime.config.restart.pg_timeout_s,
        )
        return Meeting(store, store.abort)

    return make


class RoundGroups:
    """Makes the default group of each round; implements ``restart.Groups``.

    Args:
        runtime: The rank. meet: makes the store of a round.
    """

    def __init__(self, runtime: Runtime, meet: Callable[[World], Meeting]) -> None:
        self._runtime = runtime
        self._meet = meet
        for problem in torch_private.problems():
            sys.stderr.write(f"keepstep: warning: {problem}\n")
        self._groups = GroupSet()
        self._groups.install()
        self._meeting: Meeting | None = None

    def form(self, world: World) -> None:
        """Initialise ``torch.distributed`` for ``world``.

        Raises:
            UsageError: the script has initialised it already.
        """
        if dist.is_initialized():
            raise UsageError(
                "torch.distributed is initialised before keepstep.run",
                advice="take init_process_group out of the script, or move it into main",
            )
        settings = self._runtime.config.restart
        backend = settings.backend or (
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        )
        desync = self._runtime.expect_desync()
        self._groups.release()  # every rank has left the round before
        with self._groups.watch():
            self._meeting = self._meet(world)
        self._groups.create(
            backend=backend,
            store=self._meeting.store,
            rank=world.rank,
            size=world.size,
            timeout_s=settings.pg_timeout_s,
        )
        self._runtime.own_backend = backend
        self._runtime.desync = self._desync_group(settings.pg_timeout_s) if desync else None

    def _desync_group(self, timeout_s: float) -> Desync:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        return Desync(group)

    def abort(self) -> int:
        """Free whoever is blocked in a group or in the store."""
        meeting = self._meeting
        if meeting is not None:
            meeting.abort()
        return self._groups.abort()

    def destroy(self) -> None:
        """Take all groups down."""
        self._runtime.desync = None
        self._runtime.own_backend = ""
        self._groups.destroy()
        self._meeting = None

    def sequence_numbers(self) -> dict[str, int]:
        """Collectives entered so far, by group."""
        return self._groups.sequence_numbers()


class Desync:
    """The drill's fault "desync": everybody but one rank enters a collective."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def __call__(self, skip: bool) -> None:
        if not skip:
            dist.all_reduce(torch.zeros(1), group=self._group)
