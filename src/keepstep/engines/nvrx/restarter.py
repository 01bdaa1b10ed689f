"""In-process restart by NVRx: ``inprocess.Wrapper`` around the attempt. Runs in the rank.

The Wrapper by itself would go on with fewer ranks after a death. Here it never does: a world that
is not whole ends the process, and the launcher starts all ranks again. NVRx's own abort frees no
rank that is blocked in gloo, so ours is used; its store is the one outside the ranks. NVRx unwinds
the main thread by an asynchronous exception, which waits until the interpreter runs Python code
there: a rank that sleeps would be ended after the hard limit. Signals let it run some (``waking``).
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch

from keepstep.engines.nvrx import library, waking
from keepstep.engines.nvrx.imports import cut_import, wait_for_imports
from keepstep.engines.nvrx.meeting import OutsideStore
from keepstep.engines.nvrx.rounds import Rounds
from keepstep.health import GpuPresence, MemoryAvailable, run_all
from keepstep.policy.nvrx_limits import NvrxLimits
from keepstep.rank.restart import drop, random_state
from keepstep.rank.runtime import Runtime
from keepstep.wire.types import World

T = TypeVar("T")
_MIN_MEMORY_BYTES = 64 << 20


class AttemptFailed(Exception):
    """A failure of the script as NVRx gets to see it: without frames, which hold the old model."""


class NvrxRestarter:
    """Implements ``ports.Restarter`` with ``inprocess.Wrapper``.

    Args:
        runtime: The rank. limits: NVRx's time limits. rounds: the rank's surroundings.
        started: Called at the start of each turn.
    """

    def __init__(
        self,
        runtime: Runtime,
        limits: NvrxLimits,
        rounds: Rounds,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        self._runtime = runtime
        self._limits = limits
        self._rounds = rounds
        self._started = started
        self._names = library.inprocess()
        self._call: Any = None
        self._left = threading.Event()
        self._ended_by: BaseException | None = None
        """What the attempt ended with; its frames hold the old model."""
        self._cut = False
        """Whether an interruption has cut an import in two: this process cannot go on."""

    def run(self, attempt: Callable[[World], T]) -> T:
        """Call ``attempt`` once a turn of the Wrapper until every rank's has returned.

        Raises:
            SystemExit: the script asked for it, or NVRx gave up in this process: a world that is
                not whole, a health check, an error of its own.
        """
        start_state = random_state()

        def turn(call: Any) -> T | None:
            self._call = call
            self._rounds.turn.iteration = int(call.iteration)
            if self._rounds.attempts:
                start_state.restore()
            self._started()
            self._left.clear()
            return self._once(attempt)

        # NVRx gives its CallWrapper to the parameter that is annotated with the class itself.
        turn.__annotations__ = {"call": self._names.CallWrapper}
        wrapper = self._wrapper()
        waking.install()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="logging not initialized")
            try:
                result = wrapper(turn)(call=None)
            except (self._names.RestartAbort, Exception) as error:  # noqa: BLE001 - said below
                sys.stderr.write(f"keepstep: NVRx gives up in this process: {error!r}\n")
                sys.exit(1)
            finally:
                self._left.set()
        self._rounds.leave()
        return cast(T, result)

    def _once(self, attempt: Callable[[World], T]) -> T | None:
        try:
            return self._rounds.run(attempt)
        except self._names.RankShouldRestart as interruption:
            self._ended_by = interruption
            self._cut = self._cut or cut_import(interruption)
            raise
        except Exception as error:  # noqa: BLE001 - reported already
            # Nothing long here: until NVRx's exception has come it may come anywhere, and one that
            # comes inside a callback (of a weak reference, while garbage is collected) is lost.
            self._ended_by = error
            raise AttemptFailed(f"rank {self._runtime.start.rank}: {error!r}") from None
        finally:
            self._left.set()

    @property
    def call(self) -> Any:
        """The Wrapper's view of the turn in progress; None before the first."""
        return self._call

    def atomic(self) -> AbstractContextManager[None]:
        """No termination begins inside; for what must not be cut in two (a commit)."""
        if self._call is None:
            return nullcontext()
        return cast(AbstractContextManager[None], self._call.atomic())

    # --- what NVRx calls --------------------------------------------------------------------------

    def _abort(self) -> None:
        """NVRx's monitor thread: free the main thread, wherever it is blocked."""
        self._rounds.abort()
        wait_for_imports(NvrxRestarter._once.__code__, self._limits.soft)
        threading.Thread(target=self._urge, name="keepstep-urge", daemon=True).start()

    def _unwound(self) -> None:
        """The main thread, after the attempt; NVRx raises nothing any more."""
        if not self._cut:
            self._rounds.unwound()
        ended_by, self._ended_by = self._ended_by, None
        drop(ended_by)
        self._rounds.leave()

    def _urge(self) -> None:
        """Wake the main thread while it has not left the attempt."""
        while not self._left.wait(self._runtime.config.restart.signal_after_s):
            waking.wake()

    def _whole(self, world_size: int) -> None:
        """The start of a turn: go on only with every rank.

        Raises:
            RestartAbort: ranks are missing.
        """
        whole = self._runtime.start.world
        if world_size != whole:
            raise self._names.RestartAbort(
                f"{world_size} of {whole} ranks are left, and the run needs all of them"
            )

    def _healthy(self) -> None:
        """Before and after each attempt.

        Raises:
            RuntimeError: a check says that this node cannot go on, or this process cannot.
        """
        if self._cut:
            text = (
                "NVRx's interruption cut an import in two, which would fail again in this process"
            )
            sys.stderr.write(f"keepstep: {text}\n")
            raise RuntimeError(text)
        for finding in run_all([MemoryAvailable(_MIN_MEMORY_BYTES), GpuPresence(0)]):
            if finding.status == "bad" and finding.action != "continue":
                text = f"health check {finding.check} is bad: {finding.detail}"
                # From 0.5 on NVRx cuts off why a check failed: it is said here.
                sys.stderr.write(f"keepstep: {text}\n")
                raise RuntimeError(text)

    def _wrapper(self) -> Any:
        names, limits = self._names, self._limits

        def seconds(value: float) -> timedelta:
            return timedelta(seconds=value)

        def hook(base: Any, act: Callable[[Any], None]) -> Any:
            def call(_: Any, state: Any) -> Any:
                act(state)
                return state

            return type(f"Keepstep{base.__name__}", (base,), {"__call__": call})()

        wrapper = names.Wrapper(
            store_factory=OutsideStore.of(names.StoreMixin),
            store_kwargs=self._rounds.turn.store_arguments(),
            initialize=hook(names.Initialize, lambda state: self._whole(state.world_size)),
            abort=hook(names.Abort, lambda state: self._abort()),
            finalize=hook(names.Finalize, lambda state: self._unwound()),
            health_check=names.Compose(
                names.CudaHealthCheck(seconds(limits.soft)),
                hook(names.HealthCheck, lambda state: self._healthy()),
            ),
            rank_assignment=names.Compose(names.ActivateAllRanks(), names.ShiftRanks()),
            monitor_thread_interval=seconds(limits.monitor_thread_interval),
            monitor_process_interval=seconds(limits.monitor_process_interval),
            heartbeat_interval=seconds(limits.heartbeat_interval),
            progress_watchdog_interval=seconds(limits.progress_watchdog_interval),
            soft_timeout=seconds(limits.soft),
            hard_timeout=seconds(limits.hard),
            heartbeat_timeout=seconds(limits.heartbeat),
            barrier_timeout=seconds(limits.barrier),
            completion_timeout=seconds(limits.completion),
            last_call_wait=seconds(limits.last_call_wait),
            termination_grace_time=seconds(limits.termination_grace),
        )
        if not torch.cuda.is_available():
            # From 0.5 on NVRx adds GPU checks of its own after a fault; without NVML they call
            # every rank unhealthy, and none would ever restart.
            wrapper.restart_health_check = wrapper.health_check
        return wrapper
