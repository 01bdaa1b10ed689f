"""NVRx's asynchronous checkpoints as methods of the benchmark, called as NVRx's examples call them.

Runs in ranks, and in NVRx's workers, which import the job's file anew. NVRx calls CUDA also where
every tensor is in host memory; without a GPU those calls get a stand-in, here and in the workers.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.jobs.checkpoint_methods import LIMIT_S, Dcp, RankFiles
from benchmarks.jobs.checkpoint_model import Training

_PACKAGE = "nvidia_resiliency_ext.checkpointing.async_ckpt"


def stand_in_for_cuda() -> None:
    """What NVRx calls of ``torch.cuda`` does nothing, or names the CPU; not if there is a GPU."""
    cuda: Any = torch.cuda
    if not cuda.is_available():
        cuda.synchronize, cuda.current_device = _nothing, _cpu


def _nothing(*_: object) -> None:
    pass


def _cpu() -> Any:
    return "cpu"


def _module(name: str) -> Any:
    return importlib.import_module(f"{_PACKAGE}.{name}")


class NvrxTorch(RankFiles):
    """``TorchAsyncCheckpoint``: ``torch.save`` of each rank in a worker or a forked child."""

    def __init__(self, training: Training, root: Path, *, persistent: bool) -> None:
        super().__init__(training, root)
        self._checkpoint = _module("torch_ckpt").TorchAsyncCheckpoint(persistent_queue=persistent)
        self._queue = self._checkpoint._async_calls_queue

    def save(self, step: int) -> None:
        self.folder(step).mkdir(exist_ok=True)
        self._checkpoint.async_save(self.state(), self.file(step))

    def done(self) -> bool:
        self._checkpoint.finalize_async_save(blocking=False, no_dist=True)
        return not self._queue.get_num_unfinalized_calls()

    def wait(self) -> None:
        _wait(self)

    def close(self) -> None:
        self._queue.close()


class NvrxDcp(Dcp):
    """``FileSystemWriterAsync``: the files of a DCP folder, by a worker or forked children."""

    def __init__(self, training: Training, root: Path, *, persistent: bool) -> None:
        super().__init__(training, root)
        self._core, self._saver = _module("core"), _module("state_dict_saver")
        self._writer: Any = _module("filesystem_async").FileSystemWriterAsync
        self._queue = self._core.AsyncCallsQueue(persistent=persistent)

    def save(self, step: int) -> None:
        self.folder(step).mkdir(exist_ok=True)
        writer = self._writer(self.folder(step), thread_count=1)
        planned = self._saver.save_state_dict_async_plan(self.state(self.training), writer)
        function, preload, arguments = writer.get_save_function_and_args()

        def finalize() -> None:
            self._saver.save_state_dict_async_finalize(*planned)

        request = self._core.AsyncRequest(
            function, arguments, [finalize], preload_fn=preload, async_fn_kwargs={}
        )
        self._queue.schedule_async_request(request)

    def done(self) -> bool:
        self._queue.maybe_finalize_async_calls(blocking=False)
        return not self._queue.get_num_unfinalized_calls()

    def wait(self) -> None:
        _wait(self)

    def close(self) -> None:
        self._queue.close()


def _wait(method: NvrxTorch | NvrxDcp) -> None:
    """Ask until it is done. NVRx's own blocking calls wait for ever for a worker that died."""
    deadline = time.monotonic() + LIMIT_S
    while not method.done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not done after {LIMIT_S:g} s")
        time.sleep(0.005)
