"""Newer releases of NVRx as far as they differ from 0.4.1, the one that is installed for the tests.

``checkpointing_06`` has the signatures of 0.6 to main, ``inprocess_05`` those of 0.5 to main, where
``inprocess/wrap.py`` did not change. They are 0.4.1's classes with the differences put on top, so
that they work: processes are real. ``RankMonitorClient06`` is no client, it notes what it is told.

What they do on a machine without a GPU is what those releases were seen to do: the worker dies in
its set-up unless it is told that tensors are in shared memory, and the Wrapper finds every rank
unhealthy after a fault.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from keepstep.engines.nvrx import library
from keepstep.engines.nvrx.library import Checkpointing, InProcess

_ROOT = "nvidia_resiliency_ext"
_core: Any = importlib.import_module(f"{_ROOT}.checkpointing.async_ckpt.core")
_torch_ckpt: Any = importlib.import_module(f"{_ROOT}.checkpointing.async_ckpt.torch_ckpt")
_filesystem: Any = importlib.import_module(f"{_ROOT}.checkpointing.async_ckpt.filesystem_async")
_wrap: Any = importlib.import_module(f"{_ROOT}.inprocess.wrap")

# --- checkpoints, 0.6 to main ---------------------------------------------------------------------


class AsyncRequest06(NamedTuple):
    """The keywords are None by default, not an empty dict."""

    async_fn: Callable[..., object] | None
    async_fn_args: tuple[object, ...]
    finalize_fns: list[Callable[[], object]]
    async_fn_kwargs: dict[str, object] | None = None
    preload_fn: Callable[..., object] | None = None
    is_frozen: bool = False
    call_idx: int = 0


def _worker(rank: int, *queues: Any, cpu_shm_mode: bool) -> None:
    """The worker's main function."""
    if not cpu_shm_mode:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    _core.PersistentAsyncCaller.async_loop(rank, *queues, logging.WARNING)


class PersistentAsyncCaller06(_core.PersistentAsyncCaller):  # type: ignore[misc]
    """Its worker is a daemon, and sets up a GPU."""

    def __init__(
        self,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        super().__init__()
        self.process: Any
        self.rank: int | None
        self.background_worker_is_daemon = is_daemon
        self.cpu_priority = cpu_priority
        self.io_priority = io_priority
        self.sigterm_timeout = sigterm_timeout
        self.cpu_shm_mode = cpu_shm_mode

    def _start_worker(self, rank: int) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.process = context.Process(
            target=_worker,
            args=(rank, self.queue, self.preload_q, self.comp_q),
            kwargs={"cpu_shm_mode": self.cpu_shm_mode},
            daemon=self.background_worker_is_daemon,
        )
        self.process.start()

    def schedule_async_call(self, async_req: Any) -> None:
        if async_req.async_fn is not None and self.process is None:
            if self.rank is None:
                self.rank = torch.distributed.get_rank()
            self._start_worker(self.rank)
        super().schedule_async_call(async_req)

    def close(self, abort: bool = False) -> None:
        if abort and self.process:
            self.process.terminate()
            self.process.join(timeout=self.sigterm_timeout)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()
            self.process = None
        super().close()


class AsyncCallsQueue06(_core.AsyncCallsQueue):  # type: ignore[misc]
    """Closes itself when it is deleted, and waits for its worker and the other ranks then."""

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        super().__init__(persistent=persistent)
        self.persistent_caller: Any
        self.is_daemon = is_daemon
        self._options: dict[str, Any] = {
            "is_daemon": is_daemon,
            "cpu_priority": cpu_priority,
            "io_priority": io_priority,
            "sigterm_timeout": sigterm_timeout,
            "cpu_shm_mode": cpu_shm_mode,
        }

    def _get_async_caller(self) -> Any:
        if self.persistent and self.persistent_caller is None:
            self.persistent_caller = PersistentAsyncCaller06(**self._options)
        return super()._get_async_caller()

    def schedule_async_request(self, async_request: Any) -> int:
        fields = async_request._asdict()
        fields["async_fn_kwargs"] = dict(fields["async_fn_kwargs"] or {})
        return int(super().schedule_async_request(_core.AsyncRequest(**fields)))

    def close(self, abort: bool = False) -> None:
        if not abort and (not self.persistent or self.persistent_caller is not None):
            self.maybe_finalize_async_calls(blocking=True)
        if self.persistent and self.persistent_caller:
            self.persistent_caller.close(abort=abort)
        self.call_idx = -1
        self.persistent_caller = None

    def __del__(self) -> None:
        self.close()


class TorchAsyncCheckpoint06(_torch_ckpt.TorchAsyncCheckpoint):  # type: ignore[misc]
    """Closes its queue when it is deleted; what ``abort`` says is not heard."""

    def __init__(self, persistent_queue: bool = True) -> None:
        super().__init__(persistent_queue=persistent_queue)
        self._async_calls_queue: Any = AsyncCallsQueue06(persistent=persistent_queue)

    def close(self, abort: bool = False) -> None:
        if self._async_calls_queue is not None:
            self._async_calls_queue.close()

    def __del__(self) -> None:
        self.close()


class FileSystemWriterAsync06(_filesystem.FileSystemWriterAsync):  # type: ignore[misc]
    """More options; the function for one file is told how files are opened."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        is_multiproc_io: bool = False,
        use_cached_data_structure: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("open_file", None)
        super().__init__(path, *args, separation_hint=separation_hint, **kwargs)
        self.use_msc = use_msc
        self.is_multi_proc_io = is_multiproc_io

    @staticmethod
    def write_preloaded_data(
        transform_list: list[Any],
        open_file: Callable[..., Any],
        local_thread_idx: int,
        write_bucket: Any,
        results_queue: Any,
        count_queue: Any,
        use_fsync: bool,
        **kwargs: Any,
    ) -> None:
        if not callable(open_file):
            raise TypeError(f"open_file is {open_file!r}")
        _filesystem.FileSystemWriterAsync.write_preloaded_data(
            transform_list,
            local_thread_idx,
            write_bucket,
            results_queue,
            count_queue,
            use_fsync,
            **kwargs,
        )


def checkpointing_06() -> Checkpointing:
    """The names of ``library.checkpointing`` as 0.6 to main have them."""
    return dataclasses.replace(
        library.checkpointing(),
        TorchAsyncCheckpoint=TorchAsyncCheckpoint06,
        AsyncCallsQueue=AsyncCallsQueue06,
        AsyncRequest=AsyncRequest06,
        FileSystemWriterAsync=FileSystemWriterAsync06,
    )


# --- in-process restart, 0.5 to main --------------------------------------------------------------


class Wrapper05(_wrap.Wrapper):  # type: ignore[misc]
    """Without ``rank_filter``; after a fault it has GPUs checked too, and a rank that ends does not
    say why."""

    def __init__(self, *, monitor_process_pidfile: str | None = None, **kwargs: Any) -> None:
        if "rank_filter" in kwargs:
            raise TypeError("Wrapper.__init__() got an unexpected keyword argument 'rank_filter'")
        super().__init__(**kwargs)
        self.monitor_process_pidfile = monitor_process_pidfile
        checks = [*getattr(self.health_check, "instances", [self.health_check])]
        if "LOCAL_RANK" in os.environ:
            checks.append(_gpu_check())
        found = [check for check in checks if check is not None]
        self.restart_health_check: Any = _wrap.Compose(*found) if found else None

    def __call__(self, fn: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            try:
                with _wrap.CallWrapper(_View(self)) as call_wrapper:
                    return call_wrapper(fn, args, kwargs)
            except BaseException as error:
                raise error from None

        return wrapped


# ``inspect`` shows the parameters that there really are.
Wrapper05.__init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        parameter
        for name, parameter in inspect.signature(_wrap.Wrapper.__init__).parameters.items()
        if name != "rank_filter"
    ]
    + [inspect.Parameter("monitor_process_pidfile", inspect.Parameter.KEYWORD_ONLY, default=None)]
)


def _gpu_check() -> Any:
    base: Any = importlib.import_module(f"{_ROOT}.inprocess.health_check").HealthCheck
    unhealthy: Any = importlib.import_module(f"{_ROOT}.inprocess.exception").HealthCheckError

    class ChainedGPUHealthCheck(base):  # type: ignore[misc]
        def __call__(self, state: Any) -> Any:
            if not torch.cuda.is_available():
                raise unhealthy("GPU health check failed")
            return state

    return ChainedGPUHealthCheck()


class _View:
    """A Wrapper as 0.4.1's CallWrapper is to see it: with the other health check after a fault."""

    def __init__(self, wrapper: Wrapper05) -> None:
        self._wrapper = wrapper

    @property
    def health_check(self) -> Any:
        after_a_fault = isinstance(sys.exception(), _wrap.RankShouldRestart)
        wrapper = self._wrapper
        return wrapper.restart_health_check if after_a_fault else wrapper.health_check

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)


def inprocess_05() -> InProcess:
    """The names of ``library.inprocess`` as 0.5 to main have them."""
    return dataclasses.replace(library.inprocess(), Wrapper=Wrapper05)


# --- heartbeats, 0.6 to main ----------------------------------------------------------------------


class RankMonitorClient06:
    """Notes what it is told in ``sent``; answers nothing, as those releases do not wait for it.

    Args:
        sections: Names of the sections that the launcher was given time-outs for.
    """

    def __init__(self, sections: Iterable[str] = ()) -> None:
        self.cfg: Any = SimpleNamespace(
            rank_section_timeouts=dict.fromkeys(sections, 600.0), skip_section_response=True
        )
        self.is_initialized = False
        self.sent: list[str] = []
        self._state: dict[str, Any] = {"current_timeouts": {}}

    def _note(self, what: str) -> None:
        if not self.is_initialized and what != "init":
            raise RuntimeError("RankMonitorClient is not initialized")
        self.sent.append(what)

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        self._note("init")
        self.is_initialized = True

    def shutdown_workload_monitoring(self) -> None:
        if self.is_initialized:
            self._note("shutdown")
            self.is_initialized = False

    def send_heartbeat(self) -> None:
        self._note("heartbeat")

    def start_section(self, section: str) -> None:
        if section in self.cfg.rank_section_timeouts:
            self._note(f"open {section}")

    def end_section(self, section: str) -> None:
        if section in self.cfg.rank_section_timeouts:
            self._note(f"close {section}")

    def end_all_sections(self) -> None:
        """Does nothing: the section it closes is called None, which is not a configured one."""

    def state_dict(self) -> Mapping[str, Any]:
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)
