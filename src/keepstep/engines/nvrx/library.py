"""The one file that imports NVRx: every name of it that keepstep uses, in three groups.

Only calls that exist from 0.4.1 to 0.7 and on main are used. NVRx has no type annotations that a
checker could follow, so its names are ``Any`` here. Each group is imported when it is first asked
for: the checkpointing part needs numpy, the others do not. One thread imports at a time: NVRx's
modules import each other in circles, and where two threads meet in one Python raises
``_DeadlockError`` in one of them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import threading
from dataclasses import dataclass
from typing import Any

from keepstep.errors import EngineUnavailable

PACKAGE = "nvidia-resiliency-ext"
OLDEST = (0, 4, 1)
_ROOT = "nvidia_resiliency_ext"
_IMPORTS = threading.RLock()


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
            advice="install it with pip install 'keepstep[nvrx]', or choose "
            'engine.name = "native"',
        ) from None
    # What follows the numbers (rc1, .dev3, +cu13) says nothing about which calls are there.
    leading = re.match(r"\d+(\.\d+)*", found)
    if leading is None or tuple(map(int, leading[0].split("."))) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise EngineUnavailable(
            f"{PACKAGE} {found} is installed, the engine nvrx needs {oldest} or newer",
            done="nothing was started",
            advice="upgrade it with pip install --upgrade 'keepstep[nvrx]'",
        )
    return found


def inprocess() -> InProcess:
    """The names of in-process restart. Raises EngineUnavailable as ``version``."""
    return InProcess(
        Wrapper=_name("inprocess", "Wrapper"),
        CallWrapper=_name("inprocess", "CallWrapper"),
        Abort=_name("inprocess.abort", "Abort"),
        Finalize=_name("inprocess.finalize", "Finalize"),
        Initialize=_name("inprocess.initialize", "Initialize"),
        HealthCheck=_name("inprocess.health_check", "HealthCheck"),
        CudaHealthCheck=_name("inprocess.health_check", "CudaHealthCheck"),
        Compose=_name("inprocess", "Compose"),
        ActivateAllRanks=_name("inprocess.rank_assignment", "ActivateAllRanks"),
        ShiftRanks=_name("inprocess.rank_assignment", "ShiftRanks"),
        RankShouldRestart=_name("inprocess.monitor_thread", "RankShouldRestart"),
        RestartAbort=_name("inprocess.exception", "RestartAbort"),
        StoreMixin=_name("inprocess.store", "StoreMixin"),
    )


def checkpointing() -> Checkpointing:
    """The names of asynchronous checkpoints. Raises EngineUnavailable as ``version``."""
    folder = "checkpointing.async_ckpt"
    return Checkpointing(
        TorchAsyncCheckpoint=_name(f"{folder}.torch_ckpt", "TorchAsyncCheckpoint"),
        AsyncCallsQueue=_name(f"{folder}.core", "AsyncCallsQueue"),
        AsyncRequest=_name(f"{folder}.core", "AsyncRequest"),
        FileSystemWriterAsync=_name(f"{folder}.filesystem_async", "FileSystemWriterAsync"),
    )


def rank_monitor_client() -> Any:
    """``fault_tolerance.RankMonitorClient``. Raises EngineUnavailable as ``version``."""
    return _name("fault_tolerance.rank_monitor_client", "RankMonitorClient")


def _name(module: str, name: str) -> Any:
    """``name`` of NVRx's ``module``, which is imported if it was not."""
    found = version()
    try:
        with _IMPORTS:
            return getattr(importlib.import_module(f"{_ROOT}.{module}"), name)
    except ImportError as error:
        raise EngineUnavailable(
            f"{PACKAGE} {found} cannot be imported: {error}",
            where=f"{_ROOT}.{module}",
            done="nothing was started",
            advice="install what is missing with pip install 'keepstep[nvrx]'; NVRx itself does "
            "not name all it needs (numpy)",
        ) from error
    except AttributeError as error:
        raise EngineUnavailable(
            f"{PACKAGE} {found} does not fit: {error}",
            where=f"{_ROOT}.{module}",
            done="nothing was started",
            advice="install a release that keepstep was written for: 0.4.1 to 0.7",
        ) from error
