"""The one file that imports NVRx: every name of it that keepstep uses, in three groups.

Only calls that exist from 0.4.1 to 0.7 and on main are used. NVRx has no type annotations that a
checker could follow, so its names are ``Any`` here. Each group is imported when it is first asked
for: the checkpointing part needs numpy, the others do not.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any

from keepstep.errors import EngineUnavailable

PACKAGE = "nvidia-resiliency-ext"
OLDEST = (0, 4, 1)
_ROOT = "nvidia_resiliency_ext"


@dataclass(frozen=True, slots=True)
class InProcess:
    """``nvidia_resiliency_ext.inprocess``."""

    Wrapper: Any
    CallWrapper: Any
    Abort: Any
    Finalize: Any
    Initialize: Any
    HealthCheck: Any
    CudaHealthCheck: Any
    Compose: Any
    ActivateAllRanks: Any
    ShiftRanks: Any
    RankShouldRestart: Any
    """What NVRx raises in the main thread to unwind it."""
    RestartAbort: Any
    StoreMixin: Any


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """``nvidia_resiliency_ext.checkpointing.async_ckpt``."""

    TorchAsyncCheckpoint: Any
    AsyncCallsQueue: Any
    AsyncRequest: Any
    FileSystemWriterAsync: Any
    save_state_dict_async_plan: Any
    save_state_dict_async_finalize: Any


def version() -> str:
    """The installed release, as in ``0.4.1``.

    Raises:
        EngineUnavailable: NVRx is not installed, or older than 0.4.1.
    """
    try:
        found = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise EngineUnavailable(
            f'engine "nvrx" needs the package {PACKAGE}, which is not installed',
            done="nothing was started",
            advice="pip install 'keepstep[nvrx]', or choose engine.name = \"native\"",
        ) from None
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise EngineUnavailable(
            f"{PACKAGE} {found} is installed, the engine nvrx needs {oldest} or newer",
            done="nothing was started",
            advice="pip install --upgrade 'keepstep[nvrx]'",
        )
    return found


def inprocess() -> InProcess:
    """The names of in-process restart. Raises EngineUnavailable as ``version``."""
    root = _module("inprocess")
    return InProcess(
        Wrapper=root.Wrapper,
        CallWrapper=root.CallWrapper,
        Abort=_module("inprocess.abort").Abort,
        Finalize=_module("inprocess.finalize").Finalize,
        Initialize=_module("inprocess.initialize").Initialize,
        HealthCheck=_module("inprocess.health_check").HealthCheck,
        CudaHealthCheck=_module("inprocess.health_check").CudaHealthCheck,
        Compose=root.Compose,
        ActivateAllRanks=_module("inprocess.rank_assignment").ActivateAllRanks,
        ShiftRanks=_module("inprocess.rank_assignment").ShiftRanks,
        RankShouldRestart=_module("inprocess.monitor_thread").RankShouldRestart,
        RestartAbort=_module("inprocess.exception").RestartAbort,
        StoreMixin=_module("inprocess.store").StoreMixin,
    )


def checkpointing() -> Checkpointing:
    """The names of asynchronous checkpoints. Raises EngineUnavailable as ``version``."""
    core = _module("checkpointing.async_ckpt.core")
    saver = _module("checkpointing.async_ckpt.state_dict_saver")
    return Checkpointing(
        TorchAsyncCheckpoint=_module("checkpointing.async_ckpt.torch_ckpt").TorchAsyncCheckpoint,
        AsyncCallsQueue=core.AsyncCallsQueue,
        AsyncRequest=core.AsyncRequest,
        FileSystemWriterAsync=_module(
            "checkpointing.async_ckpt.filesystem_async"
        ).FileSystemWriterAsync,
        save_state_dict_async_plan=saver.save_state_dict_async_plan,
        save_state_dict_async_finalize=saver.save_state_dict_async_finalize,
    )


def rank_monitor_client() -> Any:
    """``fault_tolerance.RankMonitorClient``. Raises EngineUnavailable as ``version``."""
    return _module("fault_tolerance.rank_monitor_client").RankMonitorClient


def _module(name: str) -> Any:
    found = version()
    try:
        return importlib.import_module(f"{_ROOT}.{name}")
    except ImportError as error:
        raise EngineUnavailable(
            f"{PACKAGE} {found} cannot be imported: {error}",
            done="nothing was started",
            advice="pip install 'keepstep[nvrx]' (NVRx itself does not name all it needs: numpy)",
        ) from error
