"""The ways to save that are compared, by name. Runs in ranks; the titles also in the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class System:
    """One way to save: its title in tables, and how it is made."""

    name: str
    title: str
    make: Callable[[Training, Path], Method]

    @property
    def is_keepstep(self) -> bool:
        return self.name.startswith("keepstep")

    @property
    def is_dcp(self) -> bool:
        """Whether torch's own distributed checkpoint writes it."""
        return self.name.startswith("dcp")

    @property
    def needs_nvrx(self) -> bool:
        return self.name.startswith("nvrx")


SYSTEMS = (
    System("gather", "gather to rank 0, `torch.save`", Gather),
    System("torch-save", "`torch.save` per rank", RankFiles),
    System("dcp", "`dcp.save`", Dcp),
    System("dcp-thread", "`dcp.async_save`, thread", partial(DcpAsync, kind=_THREAD)),
    System(
        "dcp-thread-kept",
        "`dcp.async_save`, thread, stager kept",
        _staged(_THREAD, shared=False, background=False),
    ),
    System(
        "dcp-thread-async",
        "`dcp.async_save`, thread, asynchronous staging",
        _staged(_THREAD, shared=False, background=True),
    ),
    System("dcp-process", "`dcp.async_save`, process", partial(DcpAsync, kind=_PROCESS)),
    System(
        "dcp-process-shared",
        "`dcp.async_save`, process, shared memory",
        _staged(_PROCESS, shared=True, background=False),
    ),
    System(
        "dcp-process-async",
        "`dcp.async_save`, process, shared memory, asynchronous staging",
        _staged(_PROCESS, shared=True, background=True),
    ),
    System(
        "nvrx-torch-fork",
        "NVRx `TorchAsyncCheckpoint`, fork",
        partial(NvrxTorch, persistent=False),
    ),
    System(
        "nvrx-torch-persistent",
        "NVRx `TorchAsyncCheckpoint`, persistent",
        partial(NvrxTorch, persistent=True),
    ),
    System(
        "nvrx-dcp-fork", "NVRx `FileSystemWriterAsync`, fork", partial(NvrxDcp, persistent=False)
    ),
    System(
        "nvrx-dcp-persistent",
        "NVRx `FileSystemWriterAsync`, persistent",
        partial(NvrxDcp, persistent=True),
    ),
    System("keepstep", "**keepstep**", partial(Keepstep, copy="auto")),
    System("keepstep-overlap", "keepstep, `copy=overlap`", partial(Keepstep, copy="overlap")),
    System("keepstep-blocking", "keepstep, `copy=blocking`", partial(Keepstep, copy="blocking")),
)
BY_NAME = {system.name: system for system in SYSTEMS}

OPTIONS: dict[str, Callable[[Training, Path], Method]] = {
    "`StagingOptions(use_non_blocking_copy=True)`": _staged(_THREAD, unblocked=True),
    "`StagingOptions(use_pinned_memory=True)`": _staged(_THREAD, pinned=True),
    "`FileSystemWriter(cache_staged_state_dict=True)`": partial(
        DcpAsync, kind=_THREAD, caching=True
    ),
}
"""What torch offers besides; each is tried once, and what comes of it is reported."""
