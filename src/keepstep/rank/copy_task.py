"""One copy beside training: a thread that fills a slot, checks that it did so in time, and submits.

Runs in the rank.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass

from keepstep.checkpoint.torch_copy import ImageBytes, digest
from keepstep.checkpoint.torch_image import ShardImage
from keepstep.checkpoint.torch_state import Entry
from keepstep.clock import Clock
from keepstep.errors import SaveFailed
from keepstep.policy.copying import Choice
from keepstep.ports import PendingWrite
from keepstep.rank.copied import Copied, CopiedWrite, CopyWatch
from keepstep.rank.torch_copy_cuda import Flight, is_on_device
from keepstep.wire.types import Version


@dataclass(frozen=True, slots=True)
class Job:
    """One save: ``image`` is copied into ``buffer``, which is then to be ``submit``ted.

    ``submit`` and ``release`` (where nothing came of it) may be called in another thread.
    ``closing`` is called before ``buffer`` is unmapped. ``excluded_s`` is what the save has waited
    for before, in seconds; it is no cost of copying.
    """

    image: ShardImage
    buffer: mmap.mmap
    version: Version
    submit: Callable[[], PendingWrite]
    release: Callable[[], object]
    closing: list[Callable[[], object]]
    excluded_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all copies of a writer share. ``forbid_overlap`` is told why it cannot be trusted."""

    rank: int
    check: bool
    clock: Clock
    watch: CopyWatch
    forbid_overlap: Callable[[str], object]


class CopyTask:
    """A copy in progress; made at the call, when everything still is as it must be saved.

    Args:
        around: The writer's. job: The save. choice: Why it is copied like this.
        target: The slot, with everything in it that had to be copied at once.
        flight: Copies that a GPU does by itself, if any. began: When the call began.

    Attributes:
        write: The save as its caller sees it.
        called_off: Set to end the copy as soon as possible; nothing is handed on then.
    """

    def __init__(
        self,
        around: Surroundings,
        job: Job,
        choice: Choice,
        target: ImageBytes,
        flight: Flight | None,
        began: float,
    ) -> None:
        self._around = around
        self._version, self._size = job.version, job.image.size
        self._job: Job | None = job
        self._choice = choice
        self._target: ImageBytes | None = target
        self._flight = flight
        self._began = began
        self._boundary_s = 0.0
        self._held_since: float | None = None
        self.called_off = threading.Event()
        self.write = CopiedWrite(job.version, self.called_off.set, around.clock)
        entries = [entry for entry, _ in job.image.stable]
        self._names = [entry.name for entry in entries]
        self._counted = [(entry, _counts(entry)) for entry in entries]
        self._digests = [digest(entry.tensor) for entry in entries] if around.check else []
        self._lock = threading.Lock()
        self._compared = False
        self._changed = ""
        """Name of a tensor that was changed too early."""
        self._host_done = threading.Event()
        self._turn = threading.Lock()
        """Taken by who deals with the copy: the thread, or who finds that there is none."""
        self._begun = False

    def begin(self, boundary_s: float) -> None:
        """Start the thread; the call took ``boundary_s`` until now."""
        self._boundary_s = boundary_s
        # Not a daemon: a script that ends after its last save still has it copied.
        threading.Thread(target=self._run, name="keepstep-copy").start()
        self._begun = True

    def check_begun(self) -> None:
        """Give the copy up if ``begin`` was interrupted before the thread ran, by a restart."""
        if not self._begun and self._turn.acquire(blocking=False):
            if self._flight is not None:
                self._flight.wait()
            self._end(None, _called_off(self._version, self._around.rank))

    def hold_back(self) -> None:
        """An optimizer is about to change what is copied: wait, or let its device wait."""
        if not self.write.staged() and self._held_since is None:
            self._held_since = self._around.clock.mono()
        flight = self._flight
        if flight is None or self._around.check:
            self.write.wait_staged()
            return
        self._host_done.wait()
        self._compare()  # here, before the step that may change them is queued
        flight.hold_back()

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        if not self._turn.acquire(blocking=False):
            return
        job, around = self._job, self._around
        assert job is not None
        pending: PendingWrite | None = None
        error: SaveFailed | None
        try:
            error = self._copy(job)
            copied_s = around.clock.mono() - self._began
            # The slot is the staging's from here on: no view of it may be left. And what training
            # holds may be another model by the time that this object goes.
            self._target = self._flight = None
            self._counted.clear()
            if error is None:
                self.write.complete()
                pending = job.submit()
        except Exception as failure:  # noqa: BLE001 - nobody else would hear of it
            error = self._broken(failure)
        self._end(pending, error)
        if pending is not None:
            self._tell(copied_s)

    def _end(self, pending: PendingWrite | None, error: SaveFailed | None) -> None:
        job, self._job, self._target = self._job, None, None
        assert job is not None
        self._host_done.set()
        if pending is not None:
            self.write.handed_on(pending)
            return
        assert error is not None
        job.release()
        self.write.give_up(error)
        self._around.watch.failed(self._version, error)

    def _copy(self, job: Job) -> SaveFailed | None:
        """Copy, and say why the copy cannot be used, if so."""
        around, flight, target = self._around, self._flight, self._target
        assert target is not None
        pieces = [piece for _, piece in job.image.stable]
        try:
            on_host = (piece for piece in pieces if not is_on_device(piece))
            whole = target.copy(on_host, called_off=self.called_off.is_set)
            if flight is not None:
                self._host_done.set()
        finally:
            if flight is not None:
                flight.wait()  # until then the slot is being written
        if not whole or self.called_off.is_set():
            return _called_off(self._version, around.rank)
        if flight is not None and not around.watch.trusted(self._version):
            return aborted(self._version, around.rank)
        self._compare()
        self._hash(job, target)
        if not self._changed:
            return None
        around.forbid_overlap(f"{self._changed} was changed while it was being copied")
        return SaveFailed(
            f"{self._changed} was changed while step {self._version.step} was being copied",
            where=f"rank {around.rank}",
            done="this save was given up; from now on saves are copied before training goes on",
            advice="only a torch optimizer's step may change it unannounced: call mutates() before "
            "it is changed in another way, or set checkpoint.copy to blocking",
        )

    def _compare(self) -> None:
        """Note whether something was changed in place until now; only the first call looks."""
        with self._lock:
            if self._compared:
                return
            self._compared = True
            for entry, counts in self._counted:
                if _counts(entry) != counts:
                    self._changed = entry.name
                    return

    def _hash(self, job: Job, target: ImageBytes) -> None:
        """With ``check``: note whether the bytes were others at the call, or are now."""
        for (entry, piece), at_call in zip(job.image.stable, self._digests, strict=False):
            if not digest(entry.tensor) == at_call == target.digest(piece):
                self._changed = entry.name
                return

    def _broken(self, failure: Exception) -> SaveFailed:
        if isinstance(failure, SaveFailed):
            return failure
        return SaveFailed(
            f"the copy of step {self._version.step} failed: {type(failure).__name__}: {failure}",
            where=f"rank {self._around.rank}",
            done="this save was given up",
        )

    def _tell(self, copied_s: float) -> None:
        held = self._held_since
        waited_s = 0.0 if held is None else max(0.0, self._began + copied_s - held)
        told = Copied(
            version=self._version,
            mode="overlap",
            reason=self._choice.reason,
            bytes=self._size,
            boundary_s=self._boundary_s,
            copy_s=copied_s,
            waited_s=waited_s,
        )
        self._around.watch.copied(told)


def _counts(entry: Entry) -> list[int]:
    """How often torch has seen ``entry`` changed in place."""
    return [tensor._version for tensor in entry.counted]


def _called_off(version: Version, rank: int) -> SaveFailed:
    return SaveFailed(
        f"the copy of step {version.step} was called off",
        where=f"rank {rank}",
        done="nothing of it was saved",
    )


def aborted(version: Version, rank: int) -> SaveFailed:
    """The round of ``version`` was aborted while a GPU copied."""
    return SaveFailed(
        f"round {version.round} was aborted while step {version.step} was being copied",
        where=f"rank {rank}",
        done="nothing of it was saved: kernels that are cut short leave wrong values",
    )
