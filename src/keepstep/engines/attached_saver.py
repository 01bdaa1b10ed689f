"""Saving where the ranks commit and not the coordinator, in a run whose events are read.

Runs in the rank: with NVRx's writers, and with any under NVRx's launcher, which has no coordinator.
Then the ranks also agree among themselves on what to restore, and rank 0 keeps the run's history.
What a coordinator would tell is told by events and on stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path

from keepstep import events
from keepstep.errors import SaveFailed
from keepstep.ports import PendingWrite
from keepstep.rank.checkpointer import Checkpointer, WriterFactory
from keepstep.rank.history import RoundHistory, RunHistory
from keepstep.rank.progress import SaveEvents
from keepstep.rank.runtime import Runtime
from keepstep.wire.types import Version, World


class AttachedSaver:
    """Implements ``engines.Saver`` for one round.

    A save that fails is told and training goes on, as under the native launcher: only the last one
    of a run must commit.

    Args:
        runtime: The rank. world: Its place in this round. writer: Makes the shard writer.
        coordinated: Whether ``world`` says, on a coordinator's word, what to restore and which term
            and round saves belong to.
    """

    def __init__(
        self,
        runtime: Runtime,
        world: World,
        writer: WriterFactory,
        *,
        coordinated: bool = False,
    ) -> None:
        self._runtime = runtime
        self._world = world
        self._events = SaveEvents(runtime)
        self._last = 0
        checkpoint, run = runtime.config.checkpoint, runtime.start.run
        root = Path(checkpoint.dir).absolute()
        self._write_limit_s = checkpoint.write_limit_s
        self._history = (
            RoundHistory(world)
            if coordinated
            else RunHistory(runtime.run_dir, run, root, self._damaged)
        )
        self._checkpointer = Checkpointer(
            root,
            keep_last=checkpoint.keep_last,
            run_id=run,
            history=self._history,
            writer=writer,
            around_load=self._events.restoring,
            on_commit=self._committed,
            first_round=world.round if coordinated else 1,
        )

    def save(self, state: dict[str, object], step: int) -> PendingWrite:
        """Copy ``state`` and write it in the background; tells which earlier saves failed.

        Raises:
            SaveFailed: this one cannot be begun.
        """
        self._tell_failed(self._checkpointer.failures())
        size: list[int] = []
        with self._events.saving(step, size):
            pending = self._checkpointer.async_save(state, step)
            size.append(self._checkpointer.last_bytes)
        self._last = step
        return pending

    def load(self, state: dict[str, object]) -> int:
        """Load the newest good checkpoint of this run; returns its step, 0 if there is none.

        Raises:
            CheckpointError: there are checkpoints, and none can be used.
        """
        return self._checkpointer.restore(state)

    def poll(self) -> None:
        """A step was completed."""
        self._checkpointer.poll()

    def finish(self, timeout_s: float) -> None:
        """Wait until the saves begun are committed.

        Raises:
            SaveFailed: the last one failed, or is not committed after ``timeout_s`` seconds.
        """
        failed = self._checkpointer.settle(timeout_s)
        self._tell_failed(failed)
        for step, error in failed:
            if step == self._last:
                raise error

    def close(self, *, abort: bool = False) -> None:
        """End the writer; without ``abort`` the saves begun are waited for. Can be called twice.

        Raises:
            SaveFailed: as ``finish``; the writer is ended all the same.
        """
        settled = False
        try:
            if not abort:
                self.finish(self._write_limit_s)
                settled = True
        finally:
            self._checkpointer.close(abort=not settled)
            self._history.close()

    # --- what a coordinator would tell ----------------------------------------------------------

    def _damaged(self, folder: str, step: int, error: str) -> None:
        """Rank 0: ``folder`` is passed over."""
        found = events.CheckpointUnusable(folder=folder, error=error)
        self._runtime.recorder.emit(found, step=step)
        _say(f"checkpoint {folder} is not usable: {error}")

    def _committed(self, version: Version, folder: str, nbytes: int, save_s: float) -> None:
        """Rank 0, any thread: a checkpoint is durable."""
        done = events.CheckpointCommit(folder=folder, bytes=nbytes, save_s=round(save_s, 6))
        self._runtime.recorder.emit(done, step=version.step)

    def _tell_failed(self, failed: list[tuple[int, SaveFailed]]) -> None:
        for step, error in failed:
            if self._world.rank == 0:  # it waits for the others: one event for one save
                self._runtime.recorder.emit(events.CheckpointFail(error=str(error)), step=step)
            _say(f"checkpoint of step {step} was not committed: {error}")


def _say(text: str) -> None:
    sys.stderr.write(f"keepstep: {text}\n")
