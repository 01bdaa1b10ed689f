"""The native engine in a rank of ``keepstep run``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep import events
from keepstep.config import Config
from keepstep.engines import Engine, Saver, WhenBusy
from keepstep.errors import RestartSignal
from keepstep.ports import Restarter
from keepstep.rank.heartbeat import NativeHeartbeat
from keepstep.rank.progress import LaunchedProgress, SaveEvents
from keepstep.rank.restart import Groups, NativeRestarter
from keepstep.rank.runtime import Runtime
from keepstep.rank.save import Save
from keepstep.wire.messages import SaveAsk
from keepstep.wire.types import Version, World

if TYPE_CHECKING:
    from keepstep.engines.attached_saver import AttachedSaver
    from keepstep.rank.agent_staging import AgentStaging
    from keepstep.rank.copied import Copied
    from keepstep.rank.shard_writer import NativeShardWriter
    from keepstep.rank.slots import SlotPool


class NativeEngine(Engine):
    """Control channel, agent-owned staging slots, in-process restart."""

    def __init__(self, config: Config, runtime: Runtime) -> None:
        self._config = config
        self._runtime = runtime
        self.progress = LaunchedProgress(runtime, NativeHeartbeat(runtime))
        self._writer: NativeShardWriter | None = None
        self._staging: AgentStaging | None = None
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
            from keepstep.rank.copied import CopyWatch
            from keepstep.rank.shard_writer import NativeShardWriter

            checkpoint, control = self._config.checkpoint, self._runtime.control
            staging = self._staging = AgentStaging(self._runtime)
            self._writer = NativeShardWriter(
                staging,
                rank=world.rank,
                world=world.size,
                copy=checkpoint.copy,
                check_copy=checkpoint.check_copy,
                watch=CopyWatch(
                    copied=self._copied,
                    failed=lambda version, error: staging.failed(version, str(error)),
                    trusted=lambda version: control.aborting_round < version.round,
                ),
            )
        assert self._staging is not None
        return LaunchedSaver(self._runtime, self._writer, self._staging.pool, world)

    def _copied(self, copied: Copied) -> None:
        """Any thread: a save is with the agent."""
        found = events.CheckpointCopied(
            mode=copied.mode,
            reason=copied.reason,
            copy_s=round(copied.copy_s, 6),
            waited_s=round(copied.waited_s, 6),
            bytes=copied.bytes,
        )
        version = copied.version
        self._runtime.recorder.emit(found, step=version.step, round=version.round)

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
    """Implements ``engines.Saver`` for one round.

    Args:
        runtime: The rank. writer: Copies and hands over. pool: its slots. world: the round.
    """

    def __init__(
        self, runtime: Runtime, writer: NativeShardWriter, pool: SlotPool, world: World
    ) -> None:
        self._runtime = runtime
        self._writer = writer
        self._pool = pool
        self._world = world
        self._events = SaveEvents(runtime)
        self._root = Path(runtime.config.checkpoint.dir)
        self._asked = 0
        """Newest step of this round for which the coordinator was asked."""
        writer.settle()
        pool.reclaim()  # what an abort interrupted before it was copied

    def prepare(self, state: dict[str, object]) -> None:
        """Ask the agent for slots, which a thread populates; ``poll`` tells of a failure."""
        size = self._writer.size_of(state)
        self._writer.prepare(size, self._runtime.config.checkpoint.slots)

    def expect(self, step: int) -> None:
        """Ask the coordinator now, so that the answer is there when the step ends."""
        if step > self._asked:
            self._asked = step
            inc = self._runtime.start.inc
            self._runtime.control.send(SaveAsk(inc=inc, round=self._world.round, step=step))

    def mutates(self) -> None:
        """Return once the state may be changed by other means than an optimizer's step."""
        self._writer.mutates()

    def save(self, state: dict[str, object], step: int, when_busy: WhenBusy = "wait") -> Save:
        """Copy ``state`` into a slot and hand it to the node's writer.

        Raises:
            RestartSignal: the round was aborted before it was known whether to begin.
        """
        if when_busy == "skip":
            self.expect(step)
            reason = self._runtime.control.wait_answer(self._world.round, step)
            if reason is None:
                raise RestartSignal
            if reason:
                return Save(step, None, reason)
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
        return Save(step, pending)

    def load(self, state: dict[str, object], *, strict: bool = True) -> int:
        """Load the checkpoint that this round resumes from, on all ranks together.

        Raises:
            CheckpointCorrupt: on some rank it is damaged; the coordinator picks another one.
            CheckpointMismatch: on some rank it does not fit.
        """
        from keepstep.rank.loading import Loader

        world, folder = self._world, self._world.folder
        if not folder:
            return 0
        self.mutates()
        loader = Loader(state, self._root, world.rank, world.size, strict=strict)
        size: list[int] = []
        with self._events.restoring(self._world.resume, size):
            size.append(loader.load(folder).bytes)
        return self._world.resume

    def poll(self) -> None:
        """The node's writer goes on by itself.

        Raises:
            NotEnoughMemory: there is no memory for the slots that were asked for.
        """
        self._pool.check()

    def finish(self, timeout_s: float) -> None:
        """The coordinator waits for the last save before it ends the run."""
