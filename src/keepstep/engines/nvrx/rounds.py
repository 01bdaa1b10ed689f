"""One attempt's surroundings in a rank without coordinator: its process group, number and report.

Used with and without ``inprocess.Wrapper``. Runs in the rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from keepstep import events
from keepstep.clock import SYSTEM
from keepstep.engines.nvrx.admission import Admission
from keepstep.engines.nvrx.meeting import Turn, meeting
from keepstep.errors import UsageError
from keepstep.rank.attached import failure_event
from keepstep.rank.failure import describe
from keepstep.rank.restart import Groups, RunStopped
from keepstep.rank.runtime import Runtime
from keepstep.shm import Phase
from keepstep.wire.messages import Failed, Go
from keepstep.wire.types import World

T = TypeVar("T")


class Rounds:
    """Forms the process group of each turn and tells the watching process how it went.

    Args:
        runtime: The rank. make_groups: the communication of a round, from what makes its meeting.

    Raises:
        UsageError: there is no store outside the ranks.
    """

    def __init__(
        self, runtime: Runtime, make_groups: Callable[[Callable[[World], Any]], Groups]
    ) -> None:
        if not runtime.store:
            raise UsageError(
                "the engine nvrx needs a store outside the ranks, and there is none",
                done="nothing was run",
                advice="start the script with keepstep run --engine nvrx",
            )
        self._runtime = runtime
        self.turn = Turn(runtime.store, pg_timeout_s=runtime.config.restart.pg_timeout_s)
        self.groups = make_groups(lambda world: meeting(self.turn))
        self._admission = Admission(runtime, self.turn)
        self.attempts = 0
        runtime.sequence_numbers = self.groups.sequence_numbers

    def run(self, attempt: Callable[[World], T]) -> T | None:
        """Meet the other ranks and call ``attempt``; None if the run was stopped on notice.

        Raises:
            Exception: what ``attempt`` raised; it was reported.
        """
        runtime = self._runtime
        runtime.enter(Phase.WAIT)
        self.attempts += 1
        try:
            return attempt(self._join())
        except RunStopped:
            return None
        except Exception as error:
            self._report(error)
            raise
        finally:
            runtime.enter(Phase.WAIT)

    def _join(self) -> World:
        runtime, start = self._runtime, self._runtime.start
        world = World(
            rank=start.rank,
            size=start.world,
            local_rank=start.local_rank,
            local_size=start.local_world,
            node=start.node,
            round=0,
        )
        try:
            self.groups.form(world)
            number = self.turn.round
            runtime.recorder.round = number
            runtime.recorder.emit(events.RankJoined(pid=os.getpid()))
            self._admission.wait(number)
        except RuntimeError as error:
            if not self.turn.aborted:
                raise
            # Whatever a connection says that is shut down: another rank is the cause.
            raise RuntimeError("the round was aborted") from error
        runtime.enter_round(Go(term=0, round=number, resume=0, folder=""))
        return msgspec.structs.replace(world, round=number)

    def _report(self, error: Exception) -> None:
        runtime = self._runtime
        about = describe(error)
        failed = Failed(
            inc=runtime.start.inc,
            round=runtime.recorder.round or 0,
            failure=about.failure,
            error=about.error,
            location=about.location,
            step=runtime.step,
            t=SYSTEM.mono(),
            stack=about.stack,
            fatal=about.fatal,
            fresh=self.attempts == 1,
            seqs=self.groups.sequence_numbers(),
        )
        if about.fatal and runtime.config.engine.parts.launcher != "nvrx":
            self._admission.refuse()
            runtime.control.send(failed)
        else:
            # An event, which the watching process reads: keepstep's own launcher would replace
            # all ranks on the message.
            runtime.recorder.emit(failure_event(failed), step=runtime.step)
        sys.stderr.write(about.shown)
        sys.stderr.flush()

    def abort(self) -> None:
        """Free whoever is blocked in a group, or on the way into one; any thread."""
        self.turn.aborted = True
        self.groups.abort()

    def unwound(self) -> None:
        """The main thread, after the attempt has failed here or elsewhere, and the process lives:
        its round can be judged."""
        self._runtime.recorder.emit(events.RankLeft())

    def leave(self) -> None:
        """The main thread, after the attempt has unwound: take the groups down."""
        self.turn.store = None
        self.groups.destroy()
        self.turn.aborted = False


class LauncherOnly:
    """Implements ``ports.Restarter`` without in-process restart: a failure ends the process, and
    the launcher starts all ranks again.

    Args:
        rounds: The rank's surroundings.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def run(self, attempt: Callable[[World], T]) -> T:
        """Call ``attempt`` once.

        Raises:
            SystemExit: it failed; the failure was reported and printed.
        """
        try:
            result = self._rounds.run(attempt)
        except Exception:  # noqa: BLE001 - reported; the launcher acts on the exit code
            sys.exit(1)
        self._rounds.leave()
        return result  # type: ignore[return-value]
