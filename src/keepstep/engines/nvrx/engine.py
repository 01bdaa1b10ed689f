"""The engine whose restart or launcher is NVRx's. Runs in the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep.config import Config
from keepstep.engines import Engine, Saver
from keepstep.engines.attached_saver import AttachedSaver
from keepstep.engines.nvrx.heartbeat import NvrxHeartbeat
from keepstep.engines.nvrx.progress import AttachedProgress
from keepstep.engines.nvrx.restarter import NvrxRestarter
from keepstep.engines.nvrx.rounds import LauncherOnly, Rounds
from keepstep.policy.nvrx_limits import nvrx_limits
from keepstep.ports import Restarter
from keepstep.rank.restart import Groups
from keepstep.rank.runtime import Runtime
from keepstep.wire.types import World


class NvrxEngine(Engine):
    """``inprocess.Wrapper`` or none, ``RankMonitorClient`` where the launcher has one, and saves
    that the ranks commit among themselves: NVRx has no coordinator.

    Args:
        config: Settings. runtime: The rank.
    """

    def __init__(self, config: Config, runtime: Runtime) -> None:
        self._config = config
        self._runtime = runtime
        self._limits = nvrx_limits(config)
        self._wrapper: NvrxRestarter | None = None
        self._heartbeat = NvrxHeartbeat(runtime, self._limits, self._call)
        self.progress = AttachedProgress(runtime, self._heartbeat)
        self._saver: AttachedSaver | None = None

    def _call(self) -> Any:
        return self._wrapper.call if self._wrapper is not None else None

    def restarter(self, saving: Callable[[], int]) -> Restarter:
        """In-process restart by NVRx, or none: then the launcher starts all ranks again."""
        rounds = Rounds(self._runtime, self._groups)
        if self._config.engine.parts.restart != "nvrx":
            return LauncherOnly(rounds)
        self._wrapper = NvrxRestarter(
            self._runtime, self._limits, rounds, started=self._heartbeat.new_attempt
        )
        return self._wrapper

    def _groups(self, meet: Callable[[World], Any]) -> Groups:
        from keepstep.rank.round_groups import RoundGroups

        return RoundGroups(self._runtime, meet)

    def saver(self, world: World) -> Saver:
        """Saves with a writer of this rank; a save left by the attempt before is given up."""
        self._drop_saver(abort=True)
        self._saver = AttachedSaver(self._runtime, world, self._writer())
        return self._saver

    def _writer(self) -> Any:
        if self._config.engine.parts.checkpoint != "nvrx":
            from keepstep.rank.checkpointer import native_writer

            return native_writer
        from keepstep.engines.nvrx.shards import writer_factory

        guard = self._wrapper.atomic if self._wrapper is not None else None
        return writer_factory(self._config.nvrx.checkpoint, guard=guard)

    def _drop_saver(self, *, abort: bool) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close(abort=abort)

    def close(self) -> None:
        """End the writer and the heartbeat; saves are finished by ``Saver.finish`` before."""
        try:
            self._drop_saver(abort=True)
        finally:
            self._heartbeat.end()
