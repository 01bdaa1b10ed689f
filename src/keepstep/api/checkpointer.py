"""``keepstep.Checkpointer``: ``keepstep.rank.checkpointer.Checkpointer`` with an engine by name.

Runs in the ranks of any script.
"""

from __future__ import annotations

import os
from typing import Literal

from keepstep.clock import SYSTEM, Clock
from keepstep.engines.standalone import chosen_writer
from keepstep.rank import checkpointer
from keepstep.rank.place import Copy

__all__ = ["Checkpointer"]


class Checkpointer(checkpointer.Checkpointer):
    """Saves in the background and restores the newest checkpoint that verifies.

    Every rank makes one for the same folder and calls the same methods at the same steps:

    - ``async_save(state, step)`` copies and returns; the rest is done by a process beside this one.
      All ranks begin a save, or all skip it (``skipped`` of what it returns), or all raise what
      became of an earlier one. It compares a few numbers between the ranks.
    - ``finalize(timeout_s)`` returns when all saves begun are durable and committed, or raises.
      ``close()``, or leaving the ``with`` block, does the same and ends the writer.
    - ``restore(state)`` loads the newest good checkpoint, the same on every rank; ``latest()`` is
      its step.
    - ``prepare(state)`` makes the memory ahead of the first save; best after the first step.
    - ``mutates()`` comes before tracked parameters are changed by other means than an optimizer's
      step, where a save may still be copying.
    - ``poll()`` after each step lets NVRx's writers go on.

    Checkpoints of either engine are restored by both. In a script that forgets ``close`` the saves
    begun are finished all the same, a failed one is told on stderr, and the exit code is 0.

    Args:
        path: Folder of the checkpoints, shared by all ranks.
        keep_last: Committed checkpoints to keep, at least 1.
        keep_every_steps: Checkpoints of steps that are a multiple of it are never removed; 0: none.
        run_id: Checkpoints of other runs are refused; None takes any.
        engine: Who writes: keepstep's own writer process, or ``TorchAsyncCheckpoint`` of NVIDIA's
            ``nvidia-resiliency-ext``.
        copy: How what only optimizers change is copied: while the next step computes
            (``overlap``), at once (``blocking``), or as costs less in the first saves (``auto``).
        check_copy: Hash what is copied in the background before and after; for debugging.
        when_busy: A save that comes while both staging copies are in use is skipped, or waits.
        retries: How often a shard that storage refused is written again before the save failed.
        resume_from: A checkpoint, a folder of checkpoints or a run folder of another run, or a DCP
            folder: ``restore`` takes it while ``path`` has no checkpoint of its own.
        clock: Where time comes from.

    Raises:
        EngineUnavailable: the engine's package is not installed.
        UsageError: ``keep_last`` is below 1, or there is no such engine.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        keep_every_steps: int = 0,
        run_id: str | None = None,
        engine: Literal["native", "nvrx"] = "native",
        copy: Copy = "auto",
        check_copy: bool = False,
        when_busy: Literal["skip", "wait"] = "skip",
        retries: int = 2,
        resume_from: str | os.PathLike[str] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        super().__init__(
            path,
            keep_last=keep_last,
            keep_every_steps=keep_every_steps,
            run_id=run_id,
            copy=copy,
            check_copy=check_copy,
            when_busy=when_busy,
            retries=retries,
            resume_from=resume_from,
            clock=clock,
            writer=chosen_writer(engine),
        )
