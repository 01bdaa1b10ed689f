"""Ways to save the state of a training, behind one interface: what torch itself offers.

Runs in ranks. A method is used as its documentation says. ``settled`` of a save is when the method
itself reports that it is done; whether the files are durable then is said by ``syncs``.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.tensor import DTensor

from benchmarks.jobs.checkpoint_model import Training, local

LIMIT_S = 100.0
"""How long one save may take."""


class Method:
    """A way to save. One save at a time: the next begins when ``done`` was true on all ranks.

    Args:
        training: What is saved. root: Folder for all checkpoints, the same on all ranks.
    """

    syncs = True
    """Whether the files have been fsynced when it reports that it is done."""
    learns = 0
    """Saves in which it measures for itself what is best; they come before those that count."""

    def __init__(self, training: Training, root: Path) -> None:
        self.training, self.root = training, root

    def folder(self, step: int) -> Path:
        """Where the checkpoint of ``step`` lies."""
        return self.root / f"step-{step}"

    def prepare(self) -> None:
        """Whatever it offers to do before the first save."""

    def save(self, step: int) -> None:
        """The call. On return training goes on."""
        raise NotImplementedError

    def before_update(self) -> None:
        """What must be done before values change."""

    def done(self) -> bool:
        """Whether the save is done, asked after each step on all ranks; raises if it failed."""
        return True

    def wait(self) -> None:
        """Return when the save is done."""

    def load(self, step: int, target: Training) -> None:
        """Fill a new training."""
        raise NotImplementedError

    def remove(self, step: int) -> None:
        """Remove the checkpoint of ``step``; called on rank 0."""
        shutil.rmtree(self.folder(step), ignore_errors=True)

    def close(self) -> None:
        """End what it has started."""


class RankFiles(Method):
    """``torch.save`` of what each rank has."""

    syncs = False

    def file(self, step: int) -> Path:
        return self.folder(step) / f"rank-{dist.get_rank()}.pt"

    def state(self) -> dict[str, Any]:
        optimizer = self.training.optimizer.state_dict()
        model = self.training.model.state_dict()
        return {"model": _local(model), "optimizer": _local(optimizer)}

    def save(self, step: int) -> None:
        self.folder(step).mkdir(exist_ok=True)
        torch.save(self.state(), self.file(step))

    def load(self, step: int, target: Training) -> None:
        loaded = torch.load(self.file(step), map_location="cpu", weights_only=True)
        with torch.no_grad():
            for name, value in target.model.state_dict().items():
                local(value).copy_(loaded["model"][name])
        parameters = list(target.model.parameters())
        for number, state in loaded["optimizer"]["state"].items():
            for kind, value in state.items():
                state[kind] = _sharded(value, parameters[number]) if value.dim() else value
        target.optimizer.load_state_dict(loaded["optimizer"])


def _local(value: Any) -> Any:
    if isinstance(value, Tensor):
        return local(value)
    if isinstance(value, dict):
        return {name: _local(part) for name, part in value.items()}
    return value


def _sharded(value: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return value
    shape, stride = like.shape, like.stride()
    made: DTensor = DTensor.from_local(
        value, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    return made


class Gather(Method):
    """All of it gathered to rank 0, which calls ``torch.save``; loaded by rank 0 and sent on."""

    syncs = False

    def save(self, step: int) -> None:
        training = self.training
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model = get_model_state_dict(training.model, options=options)
        optimizer = get_optimizer_state_dict(training.model, training.optimizer, options=options)
        if dist.get_rank() == 0:
            self.folder(step).mkdir(exist_ok=True)
            state = {"model": model, "optimizer": optimizer}
            torch.save(state, self.folder(step) / "state.pt")
        dist.barrier()

    def load(self, step: int, target: Training) -> None:
        loaded: dict[str, Any] = {"model": {}, "optimizer": {}}
        if dist.get_rank() == 0:
            path = self.folder(step) / "state.pt"
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        several = dist.get_world_size() > 1
        options = StateDictOptions(full_state_dict=several, broadcast_from_rank0=several)
        set_model_state_dict(target.model, loaded["model"], options=options)
        set_optimizer_state_dict(
            target.model, target.optimizer, loaded["optimizer"], options=options
        )


class Dcp(Method):
    """``torch.distributed.checkpoint.save``."""

    def state(self, training: Training) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(training.model),
            "optimizer": get_optimizer_state_dict(training.model, training.optimizer),
        }

    def save(self, step: int) -> None:
        state_dict_saver.save(self.state(self.training), checkpoint_id=self.folder(step))

    def load(self, step: int, target: Training) -> None:
        state = self.state(target)
        state_dict_loader.load(state, checkpoint_id=self.folder(step))
        set_model_state_dict(target.model, state["model"])
        set_optimizer_state_dict(target.model, target.optimizer, state["optimizer"])


class DcpAsync(Dcp):
    """``async_save``.

    Args:
        training: As of ``Method``. root: As of ``Method``.
        kind: Who writes. staging: Options of a stager that is kept; None: torch's own choice.
        caching: Whether the writer stages, into a copy that it keeps.
    """

    def __init__(
        self,
        training: Training,
        root: Path,
        kind: AsyncCheckpointerType,
        staging: StagingOptions | None = None,
        *,
        caching: bool = False,
    ) -> None:
        super().__init__(training, root)
        self._kind, self._caching = kind, caching
        # A thread's collectives must not meet those of training.
        thread = kind is AsyncCheckpointerType.THREAD
        self._group = dist.new_group() if thread else None
        self._stager = None if staging is None else DefaultStager(staging)
        self._staged: Future[None] | None = None
        self._saved: Future[Any] = Future()
        self._saved.set_result(None)

    def save(self, step: int) -> None:
        writer = None
        if self._caching:
            writer = FileSystemWriter(self.folder(step), cache_staged_state_dict=True)
        answer = state_dict_saver.async_save(
            self.state(self.training),
            checkpoint_id=self.folder(step),
            storage_writer=writer,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
            process_group=self._group,
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staged, self._saved = answer.staging_completion, answer.upload_completion
        else:
            self._saved = answer

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result(LIMIT_S)
            self._staged = None

    def done(self) -> bool:
        if self._saved.done():
            self._saved.result()
        return self._saved.done()

    def wait(self) -> None:
        self._saved.result(LIMIT_S)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


def sync_files(folder: Path) -> None:
    """fsync every file below ``folder``, and the folders."""
    for place, _, names in os.walk(folder):
        for name in (*names, "."):
            fd = os.open(os.path.join(place, name), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def forget_files(folder: Path) -> int:
    """Have the kernel drop its copy of every file below ``folder``; returns their bytes."""
    size = 0
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                size += os.fstat(fd).st_size
                os.fsync(fd)  # what is not written yet cannot be dropped
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
    return size
