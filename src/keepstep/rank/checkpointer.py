"""``Checkpointer``: asynchronous, sharded, verified checkpoints in a plain script.

Runs in the ranks of any script, under torchrun or alone, with nothing else of keepstep. Rank and
world come from ``torch.distributed`` where it is initialised.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import sys
import types
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from keepstep.checkpoint import catalog, resume
from keepstep.clock import SYSTEM, Clock
from keepstep.errors import CheckpointCorrupt, CheckpointError, SaveFailed, UsageError
from keepstep.policy.skipping import skip_line
from keepstep.ports import ShardWriter
from keepstep.rank import folder_lease, room, shared_folder
from keepstep.rank.admission import Account, Admission
from keepstep.rank.history import FolderHistory, History
from keepstep.rank.loading import Loader, none_left, of_rank_0, place
from keepstep.rank.place import (
    Copy,
    Overlapping,
    Place,
    Polled,
    Prepared,
    WriterFactory,
    ignore_commit,
    native_writer,
)
from keepstep.rank.save import Save
from keepstep.wire.types import Version

__all__ = ["Checkpointer", "Place", "Save", "WriterFactory", "native_writer"]

SAVE_LIMIT_S = 900.0
"""When ``finalize`` gives up; above the writer's own limits, so that it can say what is wrong."""
EXIT_LIMIT_S = 30.0
"""How long a save in flight may take when the script is ending with an exception."""


def _unobserved(step: int, size: list[int]) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass
class _Session:
    """What this process needs to save: its place, and numbers that no earlier save has."""

    rank: int
    world: int
    term: int
    writer: ShardWriter
    round: int
    slots: int
    last_step: int = -1
    prepared: bool = False


class Checkpointer:
    """Saves in the background and restores the newest checkpoint that verifies.

    Every rank makes one for the same folder and calls the same methods at the same steps.
    ``prepare``, ``async_save`` and ``restore`` communicate where ``torch.distributed`` is
    initialised: a few numbers, never a tensor of the state.

    Args:
        path: Folder of the checkpoints, shared by all ranks.
        keep_last: Committed checkpoints to keep, at least 1.
        keep_every_steps: Checkpoints of steps that are a multiple of it are never removed; 0: none.
        run_id: Checkpoints of other runs are refused; None takes any.
        copy: How what only optimizers change is copied: while the next step computes
            (``overlap``), at once (``blocking``), or as costs less in the first saves (``auto``).
        check_copy: Hash what is copied in the background before and after; for debugging.
        when_busy: A save while all slots are in use is skipped, or waits.
        retries: How often a shard that storage refused is written again.
        slots: Staging copies of a rank; 2 let one be written while the next is filled.
        resume_from: A checkpoint, a folder of checkpoints or a run folder of another run, or a DCP
            folder: ``restore`` takes it while the folder has no checkpoint of its own.
        clock: Where time comes from.
        history: What was saved before; None: whatever is in the folder, else in
            ``resume_from``.
        writer: Makes the shard writer; None: keepstep's own.
        around_load: Entered around the loading of a step; the list gets the bytes read. Left with
            an exception where nothing was loaded.
        on_commit: Told on rank 0 of each commit; see ``Place``.
        first_round: Number that the saves before the first restore have.

    Raises:
        UsageError: ``keep_last`` is below 1.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        keep_every_steps: int = 0,
        run_id: str | None = None,
        copy: Copy = "auto",
        check_copy: bool = False,
        when_busy: Literal["skip", "wait"] = "skip",
        retries: int = 2,
        slots: int = 2,
        resume_from: str | os.PathLike[str] | None = None,
        clock: Clock = SYSTEM,
        history: History | None = None,
        writer: WriterFactory | None = None,
        around_load: Callable[[int, list[int]], AbstractContextManager[None]] = _unobserved,
        on_commit: Callable[[Version, str, int, float], None] = ignore_commit,
        first_round: int = 1,
    ) -> None:
        if keep_last < 1:
            raise UsageError(
                f"keep_last is {keep_last}",
                advice="keep at least 1 checkpoint",
            )
        # Absolute: the script may change its working folder, and the writer has its own.
        self._root = Path(path).absolute()
        self._place = Place(
            self._root,
            rank=0,
            world=1,
            keep_last=keep_last,
            clock=clock,
            on_commit=on_commit,
            keep_every_steps=keep_every_steps,
            retries=retries,
            copy=copy,
            check_copy=check_copy,
            slots=slots,
        )
        self._when_busy = when_busy
        self._run_id = run_id
        self._clock = clock
        self._history = history or FolderHistory(self._root, run_id, clock, resume_from=resume_from)
        self._make_writer = writer or native_writer
        self._around_load = around_load
        self._first_round = first_round
        self._session: _Session | None = None
        self._alone = history is None
        self._lease = 0
        self._shared = 1
        """Size of the world that was found to see one folder."""
        self._account = Account(clock)
        self._closed = False

    # --- saving -------------------------------------------------------------------------------

    def prepare(self, state: Mapping[str, object]) -> None:
        """Make the memory for saves of ``state``, before the first of them needs it.

        Best called once, after the first step, when optimizers have made their state: then no save
        waits for memory. Without it the first ``async_save`` does the same. It returns while a
        thread goes on. All ranks must call it; rank 0 says on stderr how much memory that is.

        Raises:
            NotEnoughMemory: it does not fit on some node; no rank has taken any.
            CheckpointError: something in ``state`` cannot be kept; the message names it.
        """
        self._check_open()
        session = self._session_now()
        writer = session.writer
        if session.prepared or not isinstance(writer, Prepared):
            return
        size, answer = room.agree(lambda: writer.size_of(state), session.slots, session.world)
        session.prepared, session.slots = True, answer.slots
        writer.prepare(size, answer.slots)
        if session.rank == 0:
            _say(answer.statement)

    def async_save(
        self,
        state: Mapping[str, object],
        step: int,
        *,
        when_busy: Literal["skip", "wait"] | None = None,
    ) -> Save:
        """Copy ``state`` as it is now and write it in the background as checkpoint ``step``.

        All ranks compare a few numbers first: either all begin the save, or all skip it, or all
        raise.

        Args:
            state: By name: modules, optimizers, objects with ``state_dict`` and
                ``load_state_dict``, tensors, dicts, lists, namespaces and dataclasses.
            step: Completed steps, from 0 on.
            when_busy: For this save only; None: as the checkpointer's.

        Returns:
            The save; ``skipped`` is True if nothing was begun, because all slots are in use.

        Raises:
            SaveFailed: an earlier save failed, here or on another rank; this one was not begun.
            NotEnoughMemory: the copy does not fit into memory.
            CheckpointError: something in ``state`` cannot be kept; the message names it.
            CheckpointNotWritable: the folder cannot be written, or not all ranks see the same one.
            FolderInUse: another job saves into the folder.
            UsageError: ``step`` is negative, or the checkpointer is closed.
        """
        self._check_open()
        if step < 0:
            raise UsageError(f"a checkpoint of step {step} was asked for", advice="count from 0")
        admission = self.admit(when_busy)
        for _, error in admission.failed:
            raise error
        if admission.reason:
            if self._session_now().rank == 0:
                _say(skip_line(step, admission.reason))
            return Save(step, None, admission.reason)
        return self.begin(state, step)

    def admit(self, when_busy: Literal["skip", "wait"] | None = None) -> Admission:
        """What all ranks know before a save: earlier ones that failed, and whether it is skipped.

        Failures are told once: here, or by ``async_save`` or ``finalize``.
        """
        self._check_open()
        session = self._session_now()
        skip = (when_busy or self._when_busy) == "skip"
        return self._account.agree(session.rank, session.world, session.slots, skip=skip)

    def begin(self, state: Mapping[str, object], step: int) -> Save:
        """The save itself, after ``admit`` on all ranks. Raises as ``async_save``."""
        self.prepare(state)
        session = self._session_now()
        if step <= session.last_step:
            session.round += 1  # the same step again is another version, never the same folder
        session.last_step = step
        version = Version(
            run=self._run_id or "",
            term=session.term,
            round=session.round,
            step=step,
            world=session.world,
        )
        save = Save(step, None)
        try:
            save = Save(step, session.writer.begin(state, version, self._root))
        except Exception as error:
            # The other ranks may have begun it: they are told before the next one.
            save.give_up(SaveFailed(f"the save of step {step} could not be begun: {error}"))
            raise
        finally:
            self._account.add(save)
        return save

    def poll(self) -> None:
        """A step was completed: call it on every rank at the same step, as often as you like.

        Some writers commit only here and in ``finalize``; for others it costs nothing.
        """
        if self._session is not None and isinstance(self._session.writer, Polled):
            self._session.writer.poll()

    def mutates(self) -> None:
        """Return once the state may be changed by other means than an optimizer's step.

        Optimizer steps wait by themselves; call this before you write into tracked parameters
        while a save may still be copying them.
        """
        if self._session is not None and isinstance(self._session.writer, Overlapping):
            self._session.writer.mutates()

    @property
    def last_bytes(self) -> int:
        """Size in bytes of this rank's shard in the save begun last; 0 if it is not known."""
        writer = None if self._session is None else self._session.writer
        return int(getattr(writer, "last_bytes", 0))

    @property
    def unsettled(self) -> bool:
        """Whether a save begun is neither committed nor known to have failed."""
        return any(not save.done() for save in self._account.saves)

    def finalize(self, timeout_s: float | None = None) -> None:
        """Return when every save begun is durable and committed.

        Args:
            timeout_s: Limit for all of them together; None: ``SAVE_LIMIT_S``.

        Raises:
            SaveFailed: one failed, or is not committed in time; it then goes on in the background.
        """
        for _, error in self.settle(SAVE_LIMIT_S if timeout_s is None else timeout_s):
            raise error

    def settle(self, timeout_s: float) -> list[tuple[int, SaveFailed]]:
        """As ``finalize``, but returns the steps that failed, and why, instead of raising."""
        deadline = self._clock.mono() + timeout_s
        failed: list[tuple[int, SaveFailed]] = []
        for save in self._account.saves:
            try:
                save.wait(max(0.0, deadline - self._clock.mono()))
            except SaveFailed as error:
                failed.append((save.step, error))
            if save.done():
                self._account.drop(save)
        return failed

    def _session_now(self) -> _Session:
        rank, world = place()
        session = self._session
        if session is not None and (session.rank, session.world) == (rank, world):
            return session
        if session is not None:
            session.writer.close()
            self._session = None
        term, lease = of_rank_0(rank, self._claim, tuple[int, int])
        self._check_shared(rank, world)
        writer = self._make_writer(
            dataclasses.replace(self._place, rank=rank, world=world, lease=lease)
        )
        slots = int(getattr(writer, "slots", self._place.slots))
        atexit.register(self._at_exit)
        self._session = _Session(rank, world, term, writer, self._first_round, slots)
        return self._session

    def _claim(self) -> tuple[int, int]:
        """On rank 0: the term, and the lease of the folder where no launcher holds it."""
        if self._alone and not self._lease:
            self._lease = folder_lease.hold(self._root, self._run_id or "")
        return self._history.claim(), self._lease

    def _check_shared(self, rank: int, world: int) -> None:
        if self._shared < world:
            shared_folder.check(self._root, rank, world, self._clock)
            self._shared = world

    # --- restoring ----------------------------------------------------------------------------

    def restore(self, state: Mapping[str, object], *, strict: bool = True) -> int:
        """Fill ``state`` in place from the newest committed checkpoint that verifies.

        A damaged checkpoint is reported with a warning, and the next older one is taken, on all
        ranks together. Plain values are handed over when every rank has read its tensors.

        Args:
            state: The objects, under the names under which they were saved.
            strict: Whether objects, and tensors of modules, that only ``state`` or only the
                checkpoint has are an error; else they keep what they have, or are not read, and a
                warning names them. Shapes and types must match in any case.

        Returns:
            The step of the checkpoint; 0 if there is none.

        Raises:
            CheckpointMismatch: it is of another run or another model; nothing was changed.
            CheckpointCorrupt: there are checkpoints, but all of them are damaged. Where the error
                says so, tensors are filled in part.
            SaveFailed: a save begun before failed.
        """
        self._check_open()
        self.finalize()
        rank, world = place()
        loader = Loader(state, self._root, rank, world, self._run_id, strict)
        refused: list[str] = []
        while True:
            try:
                folder, step = of_rank_0(rank, lambda: self._choose(refused), tuple[str, int])
            except CheckpointError as error:
                raise (none_left(error) if loader.touched else error) from None
            if not folder:
                self._check_shared(rank, world)  # before anything is computed
                self._go_on(rank, 0)
                return 0
            try:
                self._load(loader, folder, step)
            except CheckpointCorrupt as damage:
                refused.append(folder)
                if rank == 0:
                    self._history.damaged(folder, str(damage))
            else:
                if rank == 0 and Path(folder).is_absolute():
                    _say(f"resuming after step {step} from {folder}")
                return step

    def _choose(self, refused: Collection[str]) -> tuple[str, int]:
        folder = self._history.choose(refused)
        return folder, resume.step_of(self._root, folder) if folder else 0

    def _load(self, loader: Loader, folder: str, step: int) -> None:
        size: list[int] = []
        with self._around_load(step, size):
            report = loader.load(folder, lambda: self._go_on(loader.rank, step))
            size.append(report.bytes)

    def _go_on(self, rank: int, step: int) -> None:
        """Training goes on after ``step``: what is saved from now on is of a new round."""
        session = self._session
        number = self._first_round if session is None else session.round + 1

        def record() -> int:
            self._history.went_on(number, step)
            return number

        of_rank_0(rank, record, int)
        if session is not None:
            session.round, session.last_step = number, step

    def latest(self) -> int:
        """Step of the newest committed checkpoint of this run; 0 if there is none."""
        info = catalog.newest(self._root, self._run_id)
        return 0 if info is None else info.step

    # --- the rest -----------------------------------------------------------------------------

    def close(self, *, abort: bool = False) -> None:
        """Finish the saves begun and end the writer; later calls do nothing.

        Args:
            abort: Drop the saves begun instead, without waiting for anything.

        Raises:
            SaveFailed: as ``finalize``; the writer is ended all the same.
        """
        self._close(None if abort else SAVE_LIMIT_S)

    def _close(self, limit_s: float | None) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        settled = False
        try:
            if limit_s is not None:
                self.finalize(limit_s)
                settled = True
        finally:
            if self._session is not None:
                self._session.writer.close(abort=not settled)
                self._session = None
            if self._lease:
                self._lease = 0
                folder_lease.let_go(self._root)

    def _at_exit(self) -> None:
        """The script ends without ``close``: its exit code is settled, all that is left is a word.

        A save in flight goes on in the writer's process. Nobody may wait for another rank here.
        """
        for save in self._account.saves:
            error = save.failure
            if error is not None:
                _say(f"warning: {error} The exit code does not show it: call close() or finalize()")
            elif save.in_work:
                _say(
                    f"warning: the script ends while the save of step {save.step} goes on; whether "
                    "it is committed shows only in the folder: call close() or finalize()"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            # The script's own error is the one to show; a save in flight still gets its chance.
            with contextlib.suppress(SaveFailed):
                self._close(EXIT_LIMIT_S)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the checkpointer is closed", advice="make a new one")


def _say(text: str) -> None:
    sys.stderr.write(f"keepstep: {text}\n")
