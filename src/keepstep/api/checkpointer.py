"""``keepstep.Checkpointer``: ``keepstep.rank.checkpointer.Checkpointer`` with an engine by name.

Runs in the ranks of any script.
"""

from __future__ import annotations

import os
from typing import Literal

from keepstep.clock import SYSTEM, Clock
from keepstep.engines.standalone import chosen_writer
from keepstep.rank import checkpointer

__all__ = ["Checkpointer"]


class Checkpointer(checkpointer.Checkpointer):
    """Saves in the background and restores the newest checkpoint that verifies.

    Every rank makes one for the same folder and calls the same methods at the same steps. The first
    ``async_save`` and every ``restore`` communicate where ``torch.distributed`` is initialised.
    Checkpoints of either engine are restored by both.

    Args:
        path: Folder of the checkpoints, shared by all ranks.
        keep_last: Committed checkpoints to keep, at least 1.
        run_id: Checkpoints of other runs are refused; None takes any.
        engine: Who writes: keepstep's own writer process, or ``TorchAsyncCheckpoint`` of NVIDIA's
            ``nvidia-resiliency-ext``.
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
        run_id: str | None = None,
        engine: Literal["native", "nvrx"] = "native",
        clock: Clock = SYSTEM,
    ) -> None:
        super().__init__(
            path, keep_last=keep_last, run_id=run_id, clock=clock, writer=chosen_writer(engine)
        )
