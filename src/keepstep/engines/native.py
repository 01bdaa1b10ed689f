"""The native engine in a rank of ``keepstep run``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.config import Config
from keepstep.engines import Engine, Saver
from keepstep.ports import PendingWrite, Restarter
from keepstep.rank.heartbeat import NativeHeartbeat
from keepstep.rank.progress import LaunchedProgress, SaveEvents
from keepstep.rank.restart import Groups, NativeRestarter
from keepstep.rank.runtime import Runtime
from keepstep.wire.types import Version, World

if TYPE_CHECKING:
    from keepstep.engines.attached_saver import AttachedSaver
    from keepstep.rank.shard_writer import NativeShardWriter


class NativeEngine(Engine):
    """Control channel, agent-owned staging slots, in-process restart."""

    def __init__(self, config: Config, runtime: Runtime) -> None:
        self._config = config
        self._runtime = runtime
        self.progress = LaunchedProgress(runtime, NativeHeartbeat(runtime))
        self._writer: NativeShardWriter | None = None
        self._saver: AttachedSaver | None = None
        self._restarter: NativeRestarter | None = None

    @property
    def exit_code(self) -> int:
        """What the process must end with after the run."""
        return self._restarter.exit_code if self._restarter else 0

    def restarter(self, saving: Callable[[], int]) -> Restarter:
        """In-process restart in the launcher's rounds."""
        if self._ranks_commit:
            # The attempt has waited for its saves already; the coordinator does not know them.
            saving = _nothing
        self._restarter = NativeRestarter(self._runtime, self._groups(), saving)
        return self._restarter

    def _groups(self) -> Groups:
        wanted = "torch" in sys.modules or "torch" in self._config.rank.preload.split(",")
        if not wanted:
            from keepstep.rank.no_groups import NoGroups

            return NoGroups()
        from keepstep.rank.round_groups import RoundGroups, control_meeting

        return RoundGroups(self._runtime, control_meeting(self._runtime))

    def saver(self, world: World) -> Saver:
        """Saves into the agent's slots and the coordinator commits; with NVRx the ranks do.

        Raises:
            EngineUnavailable: NVRx is chosen and not installed.
        """
        if self._ranks_commit:
            return self._own_saver(world)
        if self._writer is None:
            # Only now: a script that saves nothing through us need not have torch.
            from keepstep.rank.agent_staging import AgentStaging
            from keepstep.rank.shard_writer import NativeShardWriter

            self._writer = NativeShardWriter(
                AgentStaging(self._runtime), rank=world.rank, world=world.size
            )
        return LaunchedSaver(self._runtime, self._writer, world)

    @property
    def _ranks_commit(self) -> bool:
        return self._config.engine.parts.checkpoint == "nvrx"

    def _own_saver(self, world: World) -> Saver:
        """A new one each round; what the round before left unfinished is given up."""
        from keepstep.engines.attached_saver import AttachedSaver
        from keepstep.engines.standalone import chosen_writer

        self._drop()
        factory = chosen_writer("nvrx", self._config.nvrx.checkpoint)
        self._saver = AttachedSaver(self._runtime, world, factory, coordinated=True)
        return self._saver

    def _drop(self) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close(abort=True)

    def close(self) -> None:
        """Drop the slots' mappings and end writers of this rank."""
        self._drop()
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _nothing() -> int:
    return 0


class LaunchedSaver:
    """Implements ``engines.Saver`` for one round."""

    def __init__(self, runtime: Runtime, writer: NativeShardWriter, world: World) -> None:
        self._runtime = runtime
        self._writer = writer
        self._world = world
        self._events = SaveEvents(runtime)
        self._root = Path(runtime.config.checkpoint.dir)

    def save(self, state: dict[str, object], step: int) -> PendingWrite:
        """Copy ``state`` into a slot and hand it to the node's writer."""
        version = Version(
            run=self._runtime.start.run,
            term=self._world.term,
            round=self._world.round,
            step=step,
            world=self._world.size,
        )
        size: list[int] = []
        with self._events.saving(step, size):
            pending = self._writer.begin(state, version, self._root)
            size.append(self._writer.last_bytes)
        return pending

    def load(self, state: dict[str, object]) -> int:
        """Load the checkpoint that this round resumes from."""
        if not self._world.resume:
            return 0
        size: list[int] = []
        with self._events.restoring(self._world.resume, size):
            size.append(self._writer.load(state, self._root / self._world.folder))
        return self._world.resume

    def poll(self) -> None:
        """The node's writer goes on by itself."""

    def finish(self, timeout_s: float) -> None:
        """The coordinator waits for the last save before it ends the run."""
