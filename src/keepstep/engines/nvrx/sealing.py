"""Follows saves from NVRx's worker to the commit, in a thread of the rank.

One thread makes all of a writer's calls to NVRx, so that training waits for none of them: it hands
a copy to the worker, polls it, seals the file, and on rank 0 commits when every rank has sealed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from keepstep.checkpoint import foreign, layout, retention
from keepstep.checkpoint.commit import commit, missing_receipts
from keepstep.checkpoint.manifest import Layout
from keepstep.checkpoint.shard_file import TensorSpec
from keepstep.checkpoint.writer import claim_folder
from keepstep.clock import Clock
from keepstep.engines.nvrx.calls import Calls
from keepstep.engines.nvrx.staging import Staged
from keepstep.errors import InternalError, KeepstepError, SaveFailed
from keepstep.rank.local_writer import LocalWrite
from keepstep.wire.types import Version

POLL_S = 0.02
COMMIT_LIMIT_S = 600.0
"""How long rank 0 waits for another rank's receipt before the save counts as failed."""
STOP_LIMIT_S = 30.0

Guard = Callable[[], AbstractContextManager[None]]
"""Entered around a commit."""

OnCommit = Callable[[Version, str, int, float], None]
"""Told on rank 0 of each commit: version, folder, bytes of all ranks, seconds since the copy."""


class Writing(Protocol):
    """How NVRx writes: the kinds differ in nothing else.

    ``file`` is this rank's file in the folder. Where ``needs_others`` is set, ``complete`` runs on
    rank 0 after all other ranks have sealed.
    """

    layout: Layout
    needs_others: bool
    file: str
    calls: Calls

    def start(self, staged: Staged, folder: Path) -> None:
        """Have NVRx's worker write ``staged`` into ``folder``."""

    def finished(self) -> bool:
        """Whether it is written. Raises SaveFailed if it never will be."""

    def spans(self, folder: Path, specs: Sequence[TensorSpec]) -> dict[str, tuple[int, int]]:
        """Where each tensor lies in the file."""

    def complete(
        self,
        folder: Path,
        version: Version,
        specs: Sequence[TensorSpec],
        spans: Mapping[str, tuple[int, int]],
    ) -> list[str]:
        """On rank 0: write what else belongs to the checkpoint; returns its file names."""


@dataclass(kw_only=True, eq=False)
class Save:
    """One save of this rank. ``began`` is when its copy was complete, ``values`` what is no
    tensor."""

    version: Version
    staged: Staged
    values: Mapping[str, object]
    pending: LocalWrite
    began: float
    folder: str = ""
    sealed: bool = False
    expected: dict[str, str] = field(default_factory=dict)
    missing: int = -1
    progress_at: float = 0.0


class Follower:
    """The thread; started with the first save.

    Args:
        writing: How NVRx writes; closed by the thread at its end.
        root: Folder of the checkpoints.
        rank: This rank; rank 0 commits.
        keep_last: Committed checkpoints to keep; 0 or less keeps all.
        keep_every_steps: Also keep those of steps that are a multiple of it; 0: none.
        clock: Where time comes from.
        guard: Entered around each commit.
        on_commit: Told of each commit; must not raise.
        commit_limit_s: How long rank 0 waits for another rank's receipt.
    """

    def __init__(
        self,
        writing: Writing,
        root: Path,
        *,
        rank: int,
        keep_last: int,
        clock: Clock,
        guard: Guard,
        on_commit: OnCommit,
        keep_every_steps: int = 0,
        commit_limit_s: float = COMMIT_LIMIT_S,
    ) -> None:
        self._writing = writing
        self._root = root
        self._rank = rank
        self._keep = retention.Keep(keep_last, keep_every_steps)
        self._clock = clock
        self._guard = guard
        self._on_commit = on_commit
        self._limit_s = commit_limit_s
        self._changed = threading.Condition()
        self._begun: Save | None = None
        self._current: Save | None = None
        self._written: list[Save] = []
        self._stopping = False
        self._thread: threading.Thread | None = None

    # --- called by the rank's own threads -------------------------------------------------------

    def wait_free(self, limit_s: float) -> bool:
        """Wait until NVRx has finalized the save before; its copy may be overwritten then."""
        with self._changed:
            return self._changed.wait_for(self._free, limit_s)

    def _free(self) -> bool:
        return self._begun is None and self._current is None

    def submit(self, save: Save) -> None:
        """Write ``save``; the writer must be free."""
        with self._changed:
            self._begun = save
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="keepstep-nvrx", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait_settled(self, limit_s: float) -> bool:
        """Wait until everything begun is committed or has failed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._free() and not self._written, limit_s)

    def stop(self) -> None:
        """End NVRx's worker and the thread; saves that are not settled fail."""
        with self._changed:
            self._stopping = True
            thread = self._thread
            self._changed.notify_all()
        self._writing.calls.kill()
        if thread is not None:
            thread.join(STOP_LIMIT_S)

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._next():
                self._turn()
        finally:
            self._writing.calls.close()
            for save in [self._begun, self._current, *self._written]:
                if save is not None:
                    save.pending.failed(_failed(save, self._rank, "its writer was closed"))

    def _next(self) -> bool:
        """Wait for something to do; False: the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or self._begun or self._current or self._written
            )
            if not self._stopping and self._begun is None and self._current is None:
                self._changed.wait(POLL_S)  # only receipts of other ranks are awaited
            return not self._stopping

    def _turn(self) -> None:
        with self._changed:
            save, self._begun = self._begun, None
            if save is not None:
                self._current = save
        if save is not None:
            self._attempt(save, self._start)
        current = self._current
        if current is not None:
            self._attempt(current, self._follow)
        for one in list(self._written):
            self._attempt(one, self._advance)

    def _attempt(self, save: Save, action: Callable[[Save], None]) -> None:
        """Do ``action``; if it does not work, the save has failed and is forgotten."""
        try:
            action(save)
            return
        except SaveFailed as error:
            reason = error
        except (KeepstepError, OSError, ValueError) as error:
            reason = _failed(save, self._rank, str(error).rstrip("."))
        except Exception as error:  # noqa: BLE001 - a bug must still settle the save
            reason = _failed(save, self._rank, str(InternalError(repr(error))).rstrip("."))
        self._remove_file(save)
        save.pending.failed(reason)
        with self._changed:
            if self._current is save:
                self._current = None
            self._written = [one for one in self._written if one is not save]
            self._changed.notify_all()

    def _start(self, save: Save) -> None:
        save.folder = claim_folder(self._root, save.version)
        path = self._root / save.folder
        if (path / layout.receipt_name(self._rank)).exists():
            raise _failed(save, self._rank, "this rank's file of it was sealed before")
        self._writing.start(save.staged, path)
        # Nobody changes the copy, so that it can be read while the worker writes.
        save.expected = save.staged.checksums()

    def _follow(self, save: Save) -> None:
        try:
            finished = self._writing.finished()
        except SaveFailed as error:
            told = save.staged.error()
            what = f"{error.what}: {told}" if told else error.what
            raise SaveFailed(
                what, where=error.where, done=error.done, advice=error.advice
            ) from error
        if not finished:
            self._writing.calls.wait(POLL_S)
            return
        told = save.staged.error()
        if told:
            raise _failed(save, self._rank, f"NVRx's worker could not write its file: {told}")
        save.progress_at = self._clock.mono()
        with self._changed:  # NVRx is free again
            self._current = None
            self._written.append(save)
            self._changed.notify_all()

    def _advance(self, save: Save) -> None:
        """Seal, and on rank 0 commit, as far as it is possible now."""
        last = self._writing.needs_others and self._rank == 0
        if not save.sealed and not last:
            self._seal(save)
        if self._rank == 0:
            others = missing_receipts(self._root, save.folder, save.version.world)
            if missing := [rank for rank in others if rank != 0]:
                self._await(save, missing)
                return
            if not save.sealed:
                self._seal(save)
            self._commit(save)
        with self._changed:
            self._written.remove(save)
            self._changed.notify_all()

    def _seal(self, save: Save) -> None:
        folder, specs = self._root / save.folder, save.staged.specs
        spans = self._writing.spans(folder, specs)
        others: list[str] = []
        if self._rank == 0:
            others = self._writing.complete(folder, save.version, specs, spans)
        foreign.seal(
            self._root,
            save.folder,
            save.version,
            self._rank,
            layout=self._writing.layout,
            file=self._writing.file,
            tensors=specs,
            spans=spans,
            values=save.values,
            others=others,
            expected=save.expected,
        )
        save.sealed = True
        save.pending.written(save.folder)

    def _await(self, save: Save, missing: list[int]) -> None:
        now = self._clock.mono()
        if len(missing) != save.missing:
            save.missing, save.progress_at = len(missing), now
        if now - save.progress_at >= self._limit_s:
            raise _failed(
                save,
                self._rank,
                f"no file arrived for {self._limit_s:g} s; missing are those of the ranks "
                f"{missing[:8]}",
            )

    def _commit(self, save: Save) -> None:
        with self._guard():
            nbytes = commit(self._root, save.folder, save.version, self._clock).nbytes
        self._clean(save)
        try:
            self._on_commit(save.version, save.folder, nbytes, self._clock.mono() - save.began)
        finally:
            save.pending.committed()

    def _clean(self, save: Save) -> None:
        if self._keep.last <= 0:
            return
        with self._changed:
            others = [self._begun, self._current, *self._written]
            busy = {one.folder for one in others if one is not None and one is not save}
        # Old checkpoints that cannot be removed now are tried again after the next commit.
        with contextlib.suppress(KeepstepError, OSError):
            retention.apply(self._root, self._keep, save.version, exclude=busy)
            retention.sweep(self._root, exclude=busy)

    def _remove_file(self, save: Save) -> None:
        """Free the space of a file that no receipt names; its worker is idle or dead."""
        folder = self._root / save.folder
        if save.folder and not (folder / layout.receipt_name(self._rank)).exists():
            with contextlib.suppress(OSError):
                (folder / self._writing.file).unlink(missing_ok=True)


def _failed(save: Save, rank: int, why: str) -> SaveFailed:
    return SaveFailed(
        f"the save of step {save.version.step} failed: {why}",
        where=f"rank {rank}",
        done="it was not committed",
        advice="the next save makes a new checkpoint; check space, quota and rights of the folder",
    )
