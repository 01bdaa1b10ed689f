"""The process groups of a job's rounds: which backend, whose store, and the drill's extra group.

Runs in the rank.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from keepstep.errors import UsageError
from keepstep.rank import torch_private
from keepstep.rank.groups import GroupSet
from keepstep.rank.runtime import Runtime
from keepstep.rank.store import ControlStore
from keepstep.wire.types import World


class RoundGroups:
    """Makes the default group of each round; implements ``restart.Groups``."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        for problem in torch_private.problems():
            sys.stderr.write(f"keepstep: warning: {problem}\n")
        self._groups = GroupSet()
        self._groups.install()
        self._store: ControlStore | None = None

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
        self._store = ControlStore(
            self._runtime.control,
            inc=self._runtime.start.inc,
            round=world.round,
            timeout_s=settings.pg_timeout_s,
        )
        self._groups.create(
            backend=backend,
            store=self._store,
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
        if self._store is not None:
            self._store.abort()
        return self._groups.abort()

    def destroy(self) -> None:
        """Take all groups down."""
        self._runtime.desync = None
        self._runtime.own_backend = ""
        self._groups.destroy()
        self._store = None

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
