"""In-process restart: call the attempt again in each new round, in the same process.

After a failure anywhere the coordinator aborts the round: this rank's groups are shut down (by the
control thread, so a blocked main thread comes free), the attempt unwinds, what it held is dropped,
and the rank joins the next round. Runs in the rank.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar, cast

from keepstep.clock import SYSTEM
from keepstep.errors import RestartSignal
from keepstep.rank.failure import describe
from keepstep.rank.runtime import Runtime
from keepstep.shm import Phase
from keepstep.wire.messages import Abort, Failed, Go, Join, Returned
from keepstep.wire.types import World

T = TypeVar("T")
_LEAVE_SIGNAL = signal.SIGRTMIN + 4


class RunStopped(BaseException):
    """Unwinds ``main`` after the agreed stop step is saved."""


class Groups(Protocol):
    """What a round's communication needs; see ``rank.groups.GroupSet``."""

    def form(self, world: World) -> None:
        """Make the groups of ``world``."""

    def abort(self) -> int:
        """Free whoever is blocked; any thread."""

    def destroy(self) -> None:
        """Take the groups down."""

    def sequence_numbers(self) -> dict[str, int]:
        """Collectives entered, by group."""


class NativeRestarter:
    """Implements ``ports.Restarter`` with the launcher's control channel.

    Args:
        runtime: The rank. groups: its communication.
        saving: Gives the step of the last save asked for (0: none) when ``main`` has returned.
    """

    def __init__(
        self, runtime: Runtime, groups: Groups, saving: Callable[[], int] = lambda: 0
    ) -> None:
        self._runtime = runtime
        self._groups = groups
        self._saving = saving
        self._control = runtime.control
        self._round = 0
        self._interruptible = False
        self._active = False
        self._left = threading.Event()
        self._seqs: dict[str, int] = {}
        self._attempts = 0
        self.exit_code = 0
        """What the process must end with after ``run``."""

    def run(self, attempt: Callable[[World], T]) -> T:
        """Call ``attempt`` once a round until every rank's has returned.

        Raises:
            SystemExit: the script asked for it, or the run was stopped on notice.
        """
        runtime = self._runtime
        self._control.on_abort = self._abort
        runtime.sequence_numbers = self._groups.sequence_numbers
        previous = signal.signal(_LEAVE_SIGNAL, self._leave)
        start_state = random_state()
        after = 0
        try:
            while True:
                runtime.enter(Phase.WAIT)
                self._control.send(
                    Join(
                        inc=runtime.start.inc,
                        after_round=after,
                        step=runtime.step,
                        seqs=self._seqs,
                    )
                )
                go = self._control.wait_go(after)
                after = go.round
                done, result = self._once(attempt, go)
                if done:
                    self._groups.destroy()
                    return cast(T, result)
                self._groups.destroy()
                start_state.restore()
        finally:
            signal.signal(_LEAVE_SIGNAL, previous)

    def _once(self, attempt: Callable[[World], T], go: Go) -> tuple[bool, Any]:
        """One round. True with the result when the job is over."""
        runtime, start = self._runtime, self._runtime.start
        world = World(
            rank=start.rank,
            size=start.world,
            local_rank=start.local_rank,
            local_size=start.local_world,
            node=start.node,
            round=go.round,
            resume=go.resume,
            folder=go.folder,
            term=go.term,
        )
        self._seqs = {}
        self._left.clear()
        self._round = go.round
        self._active = True
        runtime.enter_round(go)
        self._attempts += 1
        result: Any = None
        try:
            try:
                self._interruptible = True
                self._check()
                self._groups.form(world)
                result = attempt(world)
                self._interruptible = False
            except RunStopped:
                self._interruptible = False
            except SystemExit:
                self._interruptible = False
                if self._control.aborting_round < self._round:
                    raise
                return self._failed(None)
            except BaseException as error:  # noqa: BLE001 - the boundary of the user's code
                self._interruptible = False
                return self._failed(error)
        except RestartSignal as late:  # the signal came while the exception was being handled
            self._interruptible = False
            return self._failed(late)
        return self._returned(result)

    def _check(self) -> None:
        if self._control.aborting_round >= self._round:
            raise RestartSignal

    def _returned(self, result: Any) -> tuple[bool, Any]:
        runtime = self._runtime
        runtime.enter(Phase.WAIT)
        self._control.send(
            Returned(
                inc=runtime.start.inc,
                round=self._round,
                step=runtime.step,
                saving=self._saving(),
            )
        )
        finish = self._control.wait_finish(self._round)
        if finish is None:
            return self._leave_round()
        self.exit_code = finish.exit_code
        return True, result

    def _failed(self, error: BaseException | None) -> tuple[bool, Any]:
        """Report a failure of our own, wait for the abort, and drop what the attempt held."""
        runtime, now = self._runtime, SYSTEM.mono()  # first of all: the order of failures counts
        if not self._seqs:
            self._seqs = self._groups.sequence_numbers()
        if error is not None and self._control.aborting_round < self._round:
            about = describe(error)
            self._control.send(
                Failed(
                    inc=runtime.start.inc,
                    round=self._round,
                    failure=about.failure,
                    error=about.error,
                    location=about.location,
                    step=runtime.step,
                    t=now,
                    stack=about.stack,
                    fatal=about.fatal,
                    fresh=self._attempts == 1,
                    seqs=self._seqs,
                )
            )
            sys.stderr.write(about.shown)
        runtime.enter(Phase.WAIT)
        drop(error)
        self._control.wait_abort(self._round)
        return self._leave_round()

    def _leave_round(self) -> tuple[bool, Any]:
        self._active = False
        self._left.set()
        return False, None

    # --- called by the control thread and by the signal -----------------------------------------

    def _abort(self, message: Abort) -> None:
        if message.round != self._round or not self._active:
            return  # not entered yet (checked on entering), or left already
        self._seqs = self._groups.sequence_numbers()
        self._groups.abort()
        threading.Thread(target=self._urge, name="keepstep-urge", daemon=True).start()

    def _urge(self) -> None:
        """Signal the main thread while it does not come out by itself."""
        main = threading.main_thread().ident
        while not self._left.wait(self._runtime.config.restart.signal_after_s):
            if self._interruptible and main is not None:
                signal.pthread_kill(main, _LEAVE_SIGNAL)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        if not self._interruptible or not self._control.aborting_round >= self._round > 0:
            return
        if _importing(frame, NativeRestarter._once.__code__):
            return  # half a module would stay behind for good; the next signal comes soon
        raise RestartSignal


def _importing(frame: FrameType | None, outermost: CodeType) -> bool:
    """Whether an import is in progress in ``frame`` or its callers below ``outermost``."""
    while frame is not None and frame.f_code is not outermost:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def drop(error: BaseException | None) -> None:
    """Frames of the exception hold the old model and groups: let go of them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        following = error.__cause__ or error.__context__
        error.__cause__ = error.__context__ = None
        error = following
    gc.collect()


class RandomState:
    """Random generators as they were before the first attempt, so that each starts alike."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        self._state = holder.state_dict() if holder is not None else None

    def restore(self) -> None:
        """Set them back."""
        if self._holder is not None:
            self._holder.load_state_dict(self._state)


def random_state() -> RandomState:
    """The generators as they are now; of torch only if the script has imported it."""
    if "torch" not in sys.modules:
        return RandomState(None)
    from keepstep.checkpoint.torch_rng import RngState

    return RandomState(RngState())
