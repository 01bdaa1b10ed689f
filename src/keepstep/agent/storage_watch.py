"""What the agent says of storage: how long a save takes, when nothing is taken, when it is lost.

Nothing here touches storage: the writer's and the coordinator's processes are looked at from
outside, and what must be asked was asked before the agent began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from keepstep import events, linux
from keepstep.checkpoint.storage import Rated
from keepstep.config import Config
from keepstep.errors import ExitCode
from keepstep.policy.storage_stall import Stall
from keepstep.wire.messages import JobEnd, Message, Ping

_LOOK_S = 0.5
UNKNOWN = Rated("", 0.0, "")


class Waiting(Protocol):
    """Shards on their way to storage; see ``staging.Slots``."""

    finished: int
    """Shards that were written, or given up."""

    @property
    def steps(self) -> Sequence[int]:
        """Steps of the shards that are being written, oldest first."""


class StorageWatch:
    """Looks at storage for one agent.

    Args:
        config: Settings. nproc: ranks of this node. rated: what storage is rated for.
        emit: Writes an event. say: a line for people. tell: sends to the coordinator.
        lost: Says, once another job has taken the folder of checkpoints, who it is.
    """

    def __init__(
        self,
        config: Config,
        nproc: int,
        rated: Rated,
        *,
        emit: Callable[..., None],
        say: Callable[[str], None],
        tell: Callable[[Message], None],
        lost: Callable[[], str],
    ) -> None:
        self._settings = config.checkpoint
        self._nproc = nproc
        self._rated = rated
        self._emit = emit
        self._say = say
        self._tell = tell
        self._lost = lost
        self._told_lost = False
        self._looked_at = 0.0
        self._writer = Stall(self._settings.stall_s)
        self._coordinator = Stall(self._settings.stall_s)
        self._asked = 0
        self._answered = 0
        self._sizes: dict[int, list[int]] = {}
        self._last = (0, 0)
        """Step of the last save, and how many steps it came after the one before."""
        self._told_rate = self._warned = False

    def staged(self, step: int, nbytes: int, step_s: float) -> None:
        """A rank's shard of ``step`` is to be written; steps take ``step_s`` seconds (0: unknown).

        With all shards of the first save it is known how long a save takes.
        """
        if not self._rated.mb_s or self._warned:
            return
        sizes = self._sizes.setdefault(step, [])
        sizes.append(nbytes)
        if len(sizes) < self._nproc:
            return
        self._sizes.clear()
        size, every = sum(sizes), self._every(step)
        if not self._told_rate:
            self._told_rate = True
            told = events.StorageRated(
                file_system=self._rated.file_system,
                mb_s=round(self._rated.mb_s, 3),
                bytes=size,
                save_s=round(self._rated.save_s(size), 3),
            )
            self._emit(told, step=step)
            self._say(self._rated.line(size))
        warning = self._rated.warning(size, every, step_s)
        if warning:
            self._warned = True
            self._say(f"warning: {warning}")

    def _every(self, step: int) -> int:
        """After how many steps a save is due; 0: it is not known."""
        before, known = self._last
        self._last = (step, step - before)
        if self._settings.every_steps:
            return self._settings.every_steps
        # The script may have settings of its own. One save in between is no habit.
        return known if before and step - before == known else 0

    def answered(self, number: int) -> None:
        """The coordinator's answer to a ping."""
        self._answered = number

    def look(self, slots: Waiting, writer: int, coordinator: int, now: float) -> JobEnd | None:
        """Call often; what must end the run, if anything does.

        Args:
            writer, coordinator: Their processes.
        """
        if now - self._looked_at < _LOOK_S:
            return None
        self._looked_at = now
        self._look_at_lease()
        self._look_at_writer(slots, writer, now)
        return self._look_at_coordinator(coordinator, now)

    def _look_at_lease(self) -> None:
        taken = "" if self._told_lost else self._lost()
        if taken:
            self._told_lost = True
            self._say(f"{taken}: nothing that this run saves is committed any more")

    def _look_at_writer(self, slots: Waiting, pid: int, now: float) -> None:
        steps = slots.steps
        mark = (slots.finished, linux.written(pid)) if steps else None
        news, idle = self._writer.look(mark, now), self._writer.idle_s
        if news == "stalled":
            state = linux.state(pid)
            stalled = events.StorageStalled(
                process="writer", pid=pid, state=state, idle_s=round(idle, 3)
            )
            self._emit(stalled, step=steps[0])
            self._say(
                f"storage has taken nothing for {idle:.0f} s: save of step {steps[0]}, writer "
                f"process {pid}, state {state}; training goes on"
            )
        elif news:
            self._moves("writer", idle)

    def _moves(self, process: str, idle_s: float) -> None:
        self._emit(events.StorageMoves(process=process, idle_s=round(idle_s, 3)))
        self._say(f"storage goes on after {idle_s:.0f} s in which the {process} waited for it")

    def _look_at_coordinator(self, pid: int, now: float) -> JobEnd | None:
        if self._answered == self._asked:
            self._asked += 1
            self._tell(Ping(number=self._asked))
        news, idle = self._coordinator.look(self._asked, now), self._coordinator.idle_s
        if news == "stalled":
            state = linux.state(pid)
            stalled = events.StorageStalled(
                process="coordinator", pid=pid, state=state, idle_s=round(idle, 3)
            )
            self._emit(stalled)
            self._say(f"the coordinator, process {pid}, state {state}, {_SILENT} for {idle:.0f} s")
        elif news:
            self._moves("coordinator", idle)
        if not self._coordinator.told or idle < self._settings.write_limit_s:
            return None
        text = f"the coordinator, process {pid}, state {linux.state(pid)}, {_SILENT}"
        text = f"{text} for {idle:.0f} s (checkpoint.write_limit_s)"
        return JobEnd(exit_code=ExitCode.CHECKPOINT, reason=text, graceful=False)


_SILENT = "has not answered, as when storage does not"
