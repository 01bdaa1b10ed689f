"""The engine whose restart or launcher is NVRx's. Runs in the rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep.config import Config
from keepstep.engines import Engine, Saver
from keepstep.engines.attached_saver import AttachedSaver
from keepstep.engines.nvrx.busy_saver import BusySaver
from keepstep.engines.nvrx.heartbeat import NvrxHeartbeat
from keepstep.engines.nvrx.progress import AttachedProgress
from keepstep.engines.nvrx.restarter import NvrxRestarter
from keepstep.engines.nvrx.rounds import LauncherOnly, Rounds
from keepstep.engines.standalone import chosen_writer
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
        """Saves with a writer of this rank; a save that the attempt before left behind on every
        rank is finished first."""
        saver, self._saver = self._saver, None
        if saver is not None:
            with self._heartbeat.busy():
                saver.leave(self._config.restart.save_wait_s)
        self._saver = AttachedSaver(
            self._runtime, world, self._writer(), extra={"nvrx_heartbeat": self._heartbeat.learned}
        )
        return BusySaver(self._saver, self._heartbeat)

    def _writer(self) -> Any:
        parts, kind = self._config.engine.parts, self._config.nvrx.checkpoint
        guard = self._wrapper.atomic if self._wrapper is not None else None
        return chosen_writer(parts.checkpoint, kind, guard)

    def close(self) -> None:
        """End the writer and the heartbeat; saves are finished by ``Saver.finish`` before."""
        saver, self._saver = self._saver, None
        try:
            if saver is not None:
                saver.close(abort=True)
        finally:
            self._heartbeat.end()
