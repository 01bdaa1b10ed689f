"""How each kind of fault strikes. A rank calls ``fire`` for itself; the launcher ``check_means``.

All kinds are the real thing: real signals, a real kill by the kernel, a lock that is really held.
Only ``desync`` needs torch and is passed in.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from typing import NoReturn

from keepstep.clock import SYSTEM, Clock
from keepstep.errors import InternalError
from keepstep.faults import cgroup
from keepstep.faults.plan import Fault

EXIT_CODE = 3
OOM_ROOM_BYTES = 64 << 20
"""Memory that an oom rank may still get. What it has stays booked to its old group, so its size
does not matter, and a large rank does not drive its node to the limit."""
_BLOCK = 4 << 20
_LONG_S = 3600.0
_LONG_US = 4_000_000_000


class InjectedFault(RuntimeError):
    """Raised in user code by the fault ``exception``."""


def check_means(faults: Iterable[Fault]) -> None:
    """Refuse faults that cannot be injected on this machine, before the run starts.

    Raises:
        UsageError: a fault ``oom`` without a usable memory cgroup.
    """
    if any(fault.kind == "oom" for fault in faults):
        reason = cgroup.available()
        if reason:
            raise cgroup.refusal(reason)


def fire(
    fault: Fault,
    *,
    run: str = "",
    clock: Clock = SYSTEM,
    desync: Callable[[], None] | None = None,
) -> None:
    """Let ``fault`` strike this process. Only ``desync`` and a continued ``stop`` return.

    Args:
        fault: From the plan, already claimed.
        run: Run id; names the cgroup of ``oom``.
        clock: Sleeps in ``hang``.
        desync: Makes the caller's next collective be skipped.

    Raises:
        InjectedFault: kind ``exception``.
        UsageError: kind ``oom`` without a usable memory cgroup.
        InternalError: kind ``desync`` without ``desync``, or an unknown kind.
    """
    match fault.kind:
        case "exception":
            raise InjectedFault(f"injected exception in step {fault.step} on rank {fault.rank}")
        case "kill":
            _kill(clock)
        case "hang":
            _hang(clock)
        case "spin":
            _spin()
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(EXIT_CODE)
        case "oom":
            _out_of_memory(run)
        case "desync" if desync is not None:
            desync()
        case _:
            raise InternalError(
                f"the fault {fault} cannot fire here: kind {fault.kind!r} needs a process group"
                if fault.kind == "desync"
                else f"the fault {fault} cannot fire: there is no kind {fault.kind!r}",
                where=f"rank {fault.rank}, step {fault.step}",
            )


def _kill(clock: Clock) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    _hang(clock)  # the signal may reach another thread a moment later


def _hang(clock: Clock) -> NoReturn:
    while True:
        clock.sleep(_LONG_S)


def _spin() -> NoReturn:
    # PyDLL calls keep the interpreter lock. A signal would end the call early and let Python run
    # its handler, which a stuck extension would not do: keep them from this thread.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    stuck = ctypes.PyDLL(None).usleep
    stuck.argtypes = [ctypes.c_uint]
    while True:
        stuck(_LONG_US)


def _out_of_memory(run: str) -> NoReturn:
    reason = cgroup.available()
    if reason:
        raise cgroup.refusal(reason)
    group = cgroup.Limited(cgroup.group_name(run, os.getpid()), OOM_ROOM_BYTES)
    group.create()
    group.enter(os.getpid())
    held: list[bytearray] = []
    while len(held) * _BLOCK < 4 * OOM_ROOM_BYTES:
        held.append(bytearray(b"\1") * _BLOCK)  # written, so that the pages exist
    size = len(held) * _BLOCK
    held.clear()
    raise InternalError(
        f"{size} bytes were allocated in a memory cgroup limited to {OOM_ROOM_BYTES}",
        done="The memory was given back",
        advice="The kernel does not enforce the limit here; use the fault kill",
    )
