"""Saving where the ranks commit and not the coordinator, in a run whose events are read.

Runs in the rank: with NVRx's writers, and with any under NVRx's launcher, which has no coordinator.
Then the ranks also agree among themselves on what to restore, and rank 0 keeps the run's history.
What a coordinator would tell is told by events and on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from keepstep import events
from keepstep.checkpoint.torch_state import OPTIONAL
from keepstep.engines import WhenBusy
from keepstep.errors import SaveFailed
from keepstep.policy.skipping import skip_line
from keepstep.ports import PendingWrite
from keepstep.rank import exchange
from keepstep.rank.checkpointer import Checkpointer, WriterFactory
from keepstep.rank.history import RoundHistory, RunHistory
from keepstep.rank.progress import SaveEvents
from keepstep.rank.runtime import Runtime
from keepstep.rank.save import Save
from keepstep.wire.types import Version, World


class AttachedSaver:
    """Implements ``engines.Saver`` for one round.

    A save that fails is told and training goes on, as under the native launcher, up to
    ``checkpoint.max_failures`` in a row; only the last one of a run must commit.

    Args:
        runtime: The rank. world: Its place in this round. writer: Makes the shard writer.
        coordinated: Whether ``world`` says, on a coordinator's word, what to restore and which term
            and round saves belong to.
        extra: The engine's own state by name; saved with each checkpoint, and restored where the
            checkpoint has it.
    """

    def __init__(
        self,
        runtime: Runtime,
        world: World,
        writer: WriterFactory,
        *,
        coordinated: bool = False,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        self._runtime = runtime
        self._world = world
        self._events = SaveEvents(runtime)
        self._extra = {f"{OPTIONAL}{name}": one for name, one in (extra or {}).items()}
        self._last = 0
        self._failures = 0
        self._begun: list[tuple[int, PendingWrite]] = []
        checkpoint, run = runtime.config.checkpoint, runtime.start.run
        root = Path(checkpoint.dir).absolute()
        self._write_limit_s = checkpoint.write_limit_s
        self._most_failures = checkpoint.max_failures
        self._history = (
            RoundHistory(world)
            if coordinated
            else RunHistory(runtime.run_dir, run, root, self._damaged, checkpoint.resume_from)
        )
        self._checkpointer = Checkpointer(
            root,
            keep_last=checkpoint.keep_last,
            keep_every_steps=checkpoint.keep_every_steps,
            copy=checkpoint.copy,
            check_copy=checkpoint.check_copy,
            retries=checkpoint.retries,
            slots=checkpoint.slots,
            run_id=run,
            history=self._history,
            writer=writer,
            around_load=self._events.restoring,
            on_commit=self._committed,
            first_round=world.round if coordinated else 1,
        )

    def prepare(self, state: dict[str, object]) -> None:
        """Make the memory for saves."""
        self._checkpointer.prepare({**state, **self._extra})

    def expect(self, step: int) -> None:
        """The ranks decide when the save comes."""

    def mutates(self) -> None:
        """Return once the state may be changed by other means than an optimizer's step."""
        self._checkpointer.mutates()

    def save(self, state: dict[str, object], step: int, when_busy: WhenBusy = "wait") -> Save:
        """Copy ``state`` and write it in the background, or skip that; tells which earlier saves
        failed.

        Raises:
            SaveFailed: this one cannot be begun, or too many failed in a row.
        """
        admission = self._checkpointer.admit(when_busy)
        self._judge(admission.failed)
        if admission.reason:
            if self._world.rank == 0:
                skip = events.CheckpointSkip(reason=admission.reason)
                self._runtime.recorder.emit(skip, step=step)
                _say(skip_line(step, admission.reason))
            return Save(step, None, admission.reason)
        size: list[int] = []
        with self._events.saving(step, size):
            save = self._checkpointer.begin({**state, **self._extra}, step)
            size.append(self._checkpointer.last_bytes)
        self._last = step
        self._begun.append((step, save))
        return save

    def load(self, state: dict[str, object], *, strict: bool = True) -> int:
        """Load the newest good checkpoint of this run; returns its step, 0 if there is none.

        Raises:
            CheckpointError: there are checkpoints, and none can be used.
        """
        return self._checkpointer.restore({**state, **self._extra}, strict=strict)

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

    def leave(self, limit_s: float) -> None:
        """The attempt is over, on every rank: a save that all of them began gets its chance.

        The ranks compare notes in the process group of the next attempt, so all must call it.

        Args:
            limit_s: How long a save may still take.
        """
        begun = str(self._last if self._checkpointer.unsettled else 0).encode()
        everywhere = dist.is_initialized() and set(exchange.gather(begun)) == {begun}
        if everywhere and begun != b"0":
            self._tell_failed(self._checkpointer.settle(limit_s))
        self.close(abort=True)

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

    def _judge(self, failed: list[tuple[int, SaveFailed]]) -> None:
        """Tell of failed saves; the last of too many in a row is raised."""
        self._tell_failed(failed)
        errors = dict(failed)
        for step, pending in [one for one in self._begun if one[1].done()]:
            self._begun.remove((step, pending))
            self._failures = self._failures + 1 if step in errors else 0
        if failed and self._failures > self._most_failures:
            raise failed[-1][1]

    def _tell_failed(self, failed: list[tuple[int, SaveFailed]]) -> None:
        for step, error in failed:
            if self._world.rank == 0:  # it waits for the others: one event for one save
                self._runtime.recorder.emit(events.CheckpointFail(error=str(error)), step=step)
            _say(f"checkpoint of step {step} was not committed: {error}")


def _say(text: str) -> None:
    sys.stderr.write(f"keepstep: {text}\n")
