"""How a save's values get into its slot: at once, or while the next step computes.

Runs in the rank. What only an optimizer changes is copied by a thread (on CUDA: by a side stream)
after the call has returned, and a hook that torch calls before each optimizer's step holds the step
back until the copy is complete. That nothing else changed it is checked: torch counts what is done
to a tensor in place, and on demand the bytes are hashed before and after. A copy that is not what
the state was at the call is never handed on.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from keepstep.checkpoint.torch_copy import ImageBytes, Piece
from keepstep.checkpoint.torch_image import ShardImage
from keepstep.clock import SYSTEM, Clock
from keepstep.policy.copying import Choice, CopyPolicy
from keepstep.ports import PendingWrite
from keepstep.rank.copied import Copied, CopyWatch
from keepstep.rank.copy_task import CopyTask, Job, Surroundings, aborted
from keepstep.rank.torch_copy_cuda import Flight, Pinned, Streams, is_on_device

MOST_THREADS = 8
"""Threads that copy at once where training waits; more do not make memory faster."""


class Copier:
    """Copies the saves of one writer, one at a time.

    Args:
        policy: Decides how. rank: This rank, for messages.
        check: Whether to hash what is copied in the background before and after.
        clock: Where time comes from. watch: Who is told. cuda: ``torch.cuda``, or a stand-in.
    """

    def __init__(
        self,
        policy: CopyPolicy,
        *,
        rank: int,
        check: bool = False,
        clock: Clock = SYSTEM,
        watch: CopyWatch | None = None,
        cuda: Any = torch.cuda,
    ) -> None:
        self.policy = policy
        self._around = Surroundings(rank, check, clock, watch or CopyWatch(), policy.forbid_overlap)
        self._clock = clock
        self._streams = Streams(cuda)
        self._pinned = Pinned(cuda)
        self._task: CopyTask | None = None
        # Torch keeps the hook, and that must not keep a writer that nobody has closed.
        self._hook: RemovableHandle = register_optimizer_step_pre_hook(_hook(weakref.ref(self)))
        self._pid = os.getpid()
        self._first: weakref.ref[torch.optim.Optimizer] | None = None

    def copy(self, job: Job) -> PendingWrite:
        """Copy what must be copied now; the rest follows in the background.

        Returns:
            The save; ``staged`` says when all of it is copied.

        Raises:
            SaveFailed: the round was aborted while a GPU copied.
        """
        self.settle()
        began = self._clock.mono()
        choice = self._choose(job.image)
        try:
            task = self._start(job, choice, began)
            if task is None and not self._trusted(job):
                raise aborted(job.version, self._around.rank)
        except BaseException:
            job.release()
            raise
        self.policy.began(choice.mode, excluded_s=job.excluded_s)
        if task is not None:
            self._task = task  # first: an interruption must leave it where it is waited for
            task.begin(self._clock.mono() - began)
            return task.write
        seconds = self._clock.mono() - began
        pending = job.submit()
        size = job.image.size
        self._around.watch.copied(
            Copied(job.version, choice.mode, choice.reason, size, seconds, seconds, 0.0)
        )
        return pending

    def _choose(self, image: ShardImage) -> Choice:
        if not image.stable:
            return Choice("blocking", "none of it is changed by optimizers alone")
        return self.policy.choose(beside=any(is_on_device(piece) for _, piece in image.stable))

    def _trusted(self, job: Job) -> bool:
        pieces = (*job.image.boundary, *(piece for _, piece in job.image.stable))
        return not any(map(is_on_device, pieces)) or self._around.watch.trusted(job.version)

    def _start(self, job: Job, choice: Choice, began: float) -> CopyTask | None:
        """Copy what ``choice`` says is copied now; the rest is to be begun if it is not None."""
        target = job.image.open(job.buffer)
        at_once, later = list(job.image.boundary), [piece for _, piece in job.image.stable]
        if choice.mode == "blocking":
            at_once, later = [*at_once, *later], []
        here, flight = list(filter(_on_host, at_once)), self._fly(job, target, at_once, later)
        finished = False
        try:
            target.copy(here, threads=_threads(here))
            finished = True
        finally:
            if flight is not None and (not later or not finished):
                flight.wait()  # until then the slot is being written
        return CopyTask(self._around, job, choice, target, flight, began) if later else None

    def _fly(
        self, job: Job, target: ImageBytes, at_once: list[Piece], later: list[Piece]
    ) -> Flight | None:
        boundary, stable = list(filter(is_on_device, at_once)), list(filter(is_on_device, later))
        if not boundary and not stable:
            return None
        if self._pinned.pin(job.buffer):
            job.closing.append(functools.partial(self._pinned.unpin, job.buffer))
        return self._streams.start(target, boundary, stable)

    # --- the hook ---------------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` is about to step: waits for a copy in progress, and tells the policy."""
        if os.getpid() != self._pid:
            return  # a forked child has no copying thread
        task = self._task
        if task is not None:
            task.check_begun()
            task.hold_back()
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        if self._first() is optimizer:
            self.policy.step(self._clock.mono())

    # --- waiting ----------------------------------------------------------------------------------

    def mutates(self) -> None:
        """Return when the state may change: a copy in progress is complete."""
        if self._task is not None:
            self._task.check_begun()
            self._task.write.wait_staged()

    def settle(self) -> None:
        """Return when a copy in progress is handed on, or has failed."""
        task = self._task
        if task is not None:
            task.check_begun()
            task.write.settle()
            self._task = None

    def close(self, *, abort: bool = False) -> None:
        """End a copy in progress, with ``abort`` without handing it on; later calls do nothing."""
        if self._task is not None and abort:
            self._task.called_off.set()
        self.settle()
        self._hook.remove()


def _hook(copier: weakref.ref[Copier]) -> Callable[..., None]:
    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        alive = copier()
        if alive is not None:
            alive.before_step(optimizer)

    return before


def _on_host(piece: Piece) -> bool:
    return not is_on_device(piece)


def _threads(pieces: Iterable[Piece]) -> int:
    """How many threads may copy ``pieces`` while training waits: as many as torch may use."""
    if sum(piece.nbytes for piece in pieces) < 64 << 20:
        return 1
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)), MOST_THREADS)
