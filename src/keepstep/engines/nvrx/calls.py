"""NVRx's queue of asynchronous calls and the one worker process behind it, watched.

Runs in the ranks. NVRx waits for its worker without asking whether it lives, in ``close``, in
``__del__`` and in blocking calls; its worker does not notice that the rank has died. Here the queue
is only ever polled, a worker that ended is named, and the worker ends with its rank.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait as wait_for
from typing import Any

from keepstep.engines.nvrx.library import Checkpointing
from keepstep.engines.nvrx.staging import ignore_job_signals
from keepstep.errors import SaveFailed
from keepstep.linux import die_with_parent

EXIT_LIMIT_S = 10.0
"""How long a killed worker may take to be gone (it may be stuck in the kernel)."""


class ArmedRank(int):
    """A rank's number for NVRx's worker: a plain number there, once the worker is bound to us."""

    def __reduce__(self) -> tuple[Callable[[int, int], int], tuple[int, int]]:
        return _arm, (int(self), os.getpid())


def _arm(rank: int, owner: int) -> int:
    """Unpickled in the worker, before it takes any work."""
    if os.getpid() != owner:
        ignore_job_signals()
        die_with_parent(owner)
    return rank


class Calls:
    """One ``AsyncCallsQueue`` at a time, with a persistent worker; a new one after a death.

    All methods but ``kill`` are for one thread, which must outlive the worker.

    Args:
        nvrx: NVRx's names.
        rank: This rank.
        changed: Called with a new queue, before its first use.
    """

    def __init__(
        self, nvrx: Checkpointing, rank: int, changed: Callable[[Any], None] = lambda _: None
    ) -> None:
        self._nvrx = nvrx
        self._rank = rank
        self._changed = changed
        self._queue: Any = None
        self._caller: Any = None
        self._killed = False

    @property
    def pid(self) -> int | None:
        """The worker's process id; None if none was started."""
        process = _process(self._caller)
        return None if process is None else int(process.pid)

    @contextlib.contextmanager
    def sending(self) -> Iterator[Any]:
        """The queue, to send one request; a worker is started if none lives.

        Raises:
            SaveFailed: ``kill`` was called.
        """
        if _ended(self._caller):
            self.close()  # it died with nothing to do: the next one takes over
        if self._queue is None:
            self._open()
        starts = self._caller.process is None
        with _no_main_file() if starts else contextlib.nullcontext():
            yield self._queue
        if self._killed:  # perhaps before there was a process to kill
            self.close()
            raise SaveFailed(
                "the save was dropped: its writer is being closed", where=f"rank {self._rank}"
            )

    def _open(self) -> None:
        known = inspect.signature(self._nvrx.AsyncCallsQueue.__init__).parameters
        # Newer releases set up CUDA in the worker, and fail without a GPU, unless told that all
        # tensors are in shared memory. Their worker may be a daemon: it starts no processes.
        wanted = {"cpu_shm_mode": True, "is_daemon": True}
        optional = {name: value for name, value in wanted.items() if name in known}
        self._queue = self._nvrx.AsyncCallsQueue(persistent=True, **optional)
        self._caller = self._queue._get_async_caller()
        self._caller.rank = ArmedRank(self._rank)
        self._changed(self._queue)

    def poll(self, finalize: Callable[[], object] | None = None) -> bool:
        """Whether nothing is in flight any more. Never waits.

        Args:
            finalize: Has NVRx finalize what is done; None: the queue's own call.

        Raises:
            SaveFailed: the worker ended before it was done; it is named.
        """
        if self._queue is None:
            return True
        ended = _ended(self._caller)  # before the last look: it may have told before it ended
        if finalize is None:
            self._queue.maybe_finalize_async_calls(blocking=False, no_dist=True)
        else:
            finalize()
        if not self._queue.get_num_unfinalized_calls():
            return True
        if ended:
            how = _how(self._caller.process)
            self.close()
            raise SaveFailed(
                f"NVRx's worker process {how} before it had written its file",
                where=f"rank {self._rank}",
                done="it was not waited for; the next save starts another",
                advice="look for its traceback on the rank's standard error, and for a kill for "
                "lack of memory in the kernel's log",
            )
        return False

    def wait(self, seconds: float) -> None:
        """Return after ``seconds``, earlier if the worker ends."""
        wait_for([self._caller.process.sentinel], seconds)

    def kill(self) -> None:
        """End the worker at once and start no other. May be called by any thread."""
        self._killed = True
        process = _process(self._caller)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def close(self) -> None:
        """End the worker and drop the queue, whatever is in it.

        NVRx's own ``close``, which its destructors call too, waits for the worker and takes part in
        collectives: it must find nothing to do.
        """
        queue, caller = self._queue, self._caller
        self._queue = self._caller = None
        if queue is None:
            return
        queue.async_calls.clear()
        queue.persistent_caller = None
        process, caller.process = _process(caller), None
        if process is not None:
            process.kill()
            process.join(EXIT_LIMIT_S)
        for channel in (caller.queue, caller.preload_q, caller.comp_q):
            channel.cancel_join_thread()
            channel.close()


def _process(caller: Any) -> Any:
    """The worker's process object, if it has one that was started."""
    process = None if caller is None else caller.process
    return None if process is None or process.pid is None else process


def _ended(caller: Any) -> bool:
    process = _process(caller)
    # The sentinel tells also where somebody else has reaped the process.
    return process is not None and bool(wait_for([process.sentinel], 0))


def _how(process: Any) -> str:
    process.join(EXIT_LIMIT_S)
    code = process.exitcode
    if code is None:
        return f"{process.pid} ended"
    if code < 0:
        return f"{process.pid} was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"{process.pid} exited with status {code}"


@contextlib.contextmanager
def _no_main_file() -> Iterator[None]:
    """Start processes that do not run the user's script again.

    Python's ``spawn`` runs the file of ``__main__`` in each child. Nothing that NVRx's worker needs
    is defined there, and a script without a ``__main__`` guard would start to train in it.
    """
    main = vars(sys.modules["__main__"])
    names = ("__file__", "__spec__")
    kept: dict[str, object] = {name: main[name] for name in names if name in main}
    main.pop("__file__", None)
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(kept)
