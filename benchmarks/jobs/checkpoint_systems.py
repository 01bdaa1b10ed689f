"""The ways to save that are compared, by name. Runs in ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import keepstep
from benchmarks.jobs.checkpoint_methods import LIMIT_S, Dcp, DcpAsync, Gather, Method, RankFiles
from benchmarks.jobs.checkpoint_model import Training
from benchmarks.jobs.checkpoint_nvrx import NvrxDcp, NvrxTorch
from keepstep.checkpoint import catalog
from keepstep.policy.copying import MINIMUM, WARM_UP
from keepstep.rank.checkpointer import Save

_THREAD, _PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS


class Keepstep(Method):
    """``keepstep.Checkpointer``; it keeps one checkpoint and removes the one before by itself."""

    def __init__(
        self, training: Training, root: Path, *, copy: Literal["auto", "overlap", "blocking"]
    ) -> None:
        super().__init__(training, root)
        self._own = keepstep.Checkpointer(root, keep_last=1, copy=copy, when_busy="wait")
        self._state = {"model": training.model, "optimizer": training.optimizer}
        self._saved: Save | None = None
        self.learns = WARM_UP + 2 * MINIMUM if copy == "auto" else 0

    def folder(self, step: int) -> Path:
        info = catalog.newest(self.root)
        return self.root if info is None else self.root / info.folder

    def prepare(self) -> None:
        self._own.prepare(self._state)

    def save(self, step: int) -> None:
        self._saved = self._own.async_save(self._state, step)

    def done(self) -> bool:
        return self._saved is None or self._saved.done()

    def wait(self) -> None:
        self._own.finalize(LIMIT_S)

    def load(self, step: int, target: Training) -> None:
        state = {"model": target.model, "optimizer": target.optimizer}
        found = self._own.restore(state)
        if found != step:
            raise RuntimeError(f"step {found} was loaded instead of {step}")

    def remove(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._own.close()


def _staged(
    kind: AsyncCheckpointerType,
    *,
    pinned: bool = False,
    shared: bool = False,
    background: bool = False,
    unblocked: bool = False,
) -> Callable[[Training, Path], Method]:
    """``dcp.async_save`` with a stager that is kept from save to save."""
    options = StagingOptions(pinned, shared, background, unblocked)
    return partial(DcpAsync, kind=kind, staging=options)


MAKERS: dict[str, Callable[[Training, Path], Method]] = {
    "gather": Gather,
    "torch-save": RankFiles,
    "dcp": Dcp,
    "dcp-thread": partial(DcpAsync, kind=_THREAD),
    "dcp-thread-kept": _staged(_THREAD),
    "dcp-thread-async": _staged(_THREAD, background=True),
    "dcp-process": partial(DcpAsync, kind=_PROCESS),
    "dcp-process-shared": _staged(_PROCESS, shared=True),
    "dcp-process-async": _staged(_PROCESS, shared=True, background=True),
    "nvrx-torch-fork": partial(NvrxTorch, persistent=False),
    "nvrx-torch-persistent": partial(NvrxTorch, persistent=True),
    "nvrx-dcp-fork": partial(NvrxDcp, persistent=False),
    "nvrx-dcp-persistent": partial(NvrxDcp, persistent=True),
    "keepstep": partial(Keepstep, copy="auto"),
    "keepstep-overlap": partial(Keepstep, copy="overlap"),
    "keepstep-blocking": partial(Keepstep, copy="blocking"),
    "option-non-blocking": _staged(_THREAD, unblocked=True),
    "option-pinned": _staged(_THREAD, pinned=True),
    "option-cached": partial(DcpAsync, kind=_THREAD, caching=True),
}
"""By the names of ``benchmarks.checkpoint_names``: makes one for a training and a folder."""
