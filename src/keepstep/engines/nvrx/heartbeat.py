"""Heartbeats and sections by NVRx: ``RankMonitorClient`` and the Wrapper's progress. In the rank.

The training thread only notes what it does, here or on its board; a thread of its own talks to
NVRx's rank monitor, so a monitor that is frozen or gone holds up nobody. What the training thread
does not note is not sent: a hung rank falls silent. Outside steps, where nothing says how long a
script may take (an attempt makes its model, and imports what that needs), and while a rank waits
for the others, heartbeats go on, up to ``heartbeat.start_limit_s``. NVRx wants to know the names of
all sections when the launcher starts, so every section of a script is NVRx's section
``section``; inside it heartbeats go on, up to ``heartbeat.section_limit_s``, since NVRx holds a
rank to both limits at once.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from keepstep.clock import SYSTEM
from keepstep.config import env
from keepstep.engines.nvrx import library, waking
from keepstep.policy.nvrx_limits import SECTION, NvrxLimits
from keepstep.rank.runtime import Runtime
from keepstep.shm import Phase

SOCKET_VARIABLE = "FT_RANK_MONITOR_IPC_SOCKET"
_ENOUGH = 10
_UNLIMITED = (Phase.SCRIPT, Phase.WAIT, Phase.LOAD)


class LearnedLimit:
    """How long heartbeats were apart, and the limit that follows; saved with each checkpoint.

    NVRx's own ``calculate_and_set_hb_timeouts`` takes a multiple of what it saw and nothing else: a
    job of steps of 0.1 s would end a rank after half a second. Here the multiple has a floor.

    Args:
        factor: The limit is the longest interval times this.
        floor_s: The lowest limit. ceiling_s: the highest.
    """

    def __init__(self, factor: float, floor_s: float, ceiling_s: float) -> None:
        self._factor = factor
        self._floor_s = floor_s
        self._ceiling_s = ceiling_s
        self.longest_s = 0.0
        self.count = 0

    def add(self, seconds: float) -> None:
        """Two heartbeats of one attempt were ``seconds`` apart."""
        self.longest_s = max(self.longest_s, seconds)
        self.count += 1

    @property
    def limit_s(self) -> float:
        """The limit for the next heartbeat in seconds."""
        if self.count < _ENOUGH:
            return self._ceiling_s
        return min(self._ceiling_s, max(self._floor_s, self._factor * self.longest_s))

    def state_dict(self) -> dict[str, object]:
        """What to save."""
        return {"longest_s": self.longest_s, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was saved; a longer interval seen since then stays."""
        self.longest_s = max(self.longest_s, float(state["longest_s"]))
        self.count = max(self.count, int(state["count"]))


class NvrxHeartbeat:
    """Implements ``ports.Heartbeat``.

    Args:
        runtime: The rank; its board shows the same to ``keepstep run``.
        limits: NVRx's time limits.
        call: Gives the Wrapper's CallWrapper, None where there is no Wrapper.
    """

    def __init__(
        self, runtime: Runtime, limits: NvrxLimits, call: Callable[[], Any] = lambda: None
    ) -> None:
        self._runtime = runtime
        self._limits = limits
        self._call = call
        self.learned = LearnedLimit(
            limits.ft_safety_factor,
            limits.ft_heartbeat,
            max(limits.ft_heartbeat, limits.ft_initial),
        )
        self._told_s = 0.0
        self._beat_at = 0.0
        self._changed = threading.Condition()
        self._wishes: list[str] = []
        self._depth = 0
        self._section_until = 0.0
        self._ended = False
        self._seen_progress = runtime.board.last_progress
        self._client: Any = None
        self._client_class: Any = None
        self._monitored = bool(env.read(SOCKET_VARIABLE))
        if self._monitored:
            # Here and not in the thread: the main thread goes on with other imports of NVRx.
            self._reached(self._load)
        self._thread = threading.Thread(target=self._serve, name="keepstep-ft", daemon=True)
        self._thread.start()

    # --- the training thread ----------------------------------------------------------------------

    def beat(self, step: int) -> None:
        """``step`` is now in progress."""
        self._runtime.begin_step(step)
        now = SYSTEM.mono()
        if self._beat_at:
            self.learned.add(now - self._beat_at)
        self._beat_at = now
        self._ping()
        self._wish("beat")

    def section(self, name: str) -> AbstractContextManager[None]:
        """A named span; the limit is ``heartbeat.section_limit_s`` for all of them."""
        return self._section(name)

    @contextmanager
    def _section(self, name: str) -> Iterator[None]:
        with self._runtime.section(name), self.busy():
            yield

    @contextmanager
    def busy(self) -> Iterator[None]:
        """What is done inside is no part of a step and may take as long as a section."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._changed:
            self._depth += 1
            if self._depth == 1:
                self._section_until = SYSTEM.mono() + self._limits.ft_section
                self._wishes.append("open")
                self._changed.notify()

    def _leave(self) -> None:
        with self._changed:
            self._depth -= 1
            if self._depth == 0:
                self._section_until = 0.0
                if self._wishes[-1:] == ["open"]:
                    self._wishes.pop()  # nobody was told: the monitor is slow, or it was short
                else:
                    self._wishes.append("close")
                self._changed.notify()
        self._beat_at = 0.0  # what comes next is no interval between two steps
        self._ping()

    def close(self) -> None:
        """No step is in progress any more."""
        self._beat_at = 0.0
        self._runtime.leave_steps()

    def new_attempt(self) -> None:
        """Intervals across a restart teach nothing, and no section is open any more."""
        with self._changed:
            self._beat_at = 0.0
            self._section_until = 0.0
            if self._depth:
                self._depth = 0
                self._wishes.append("close")
                self._changed.notify()

    def end(self) -> None:
        """The run is over: tell NVRx's monitor not to expect this rank any more."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(self._limits.heartbeat)

    def _ping(self) -> None:
        call = self._call()
        if call is not None:
            # A Wrapper that has ended has closed its queue: nobody waits for progress any more.
            with contextlib.suppress(ValueError):
                call.ping()

    def _wish(self, what: str) -> None:
        with self._changed:
            if what not in self._wishes[-1:]:
                self._wishes.append(what)
            self._changed.notify()

    # --- the sending thread -----------------------------------------------------------------------

    def _serve(self) -> None:
        if self._monitored:
            self._reached(self._connect)
        while self._turn():
            pass
        if self._client is not None:  # its socket is to be closed where the monitor is lost, too
            with contextlib.suppress(Exception):
                self._client.shutdown_workload_monitoring()

    def _load(self) -> None:
        self._client_class = library.rank_monitor_client()

    def _connect(self) -> None:
        self._client = self._client_class()
        self._client.init_workload_monitoring()

    def _reached(self, act: Callable[[], None]) -> None:
        """Tell NVRx's monitor; if it is lost training goes on without."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - whatever NVRx raises, it is lost
            sys.stderr.write(f"keepstep: warning: NVRx's rank monitor is lost: {error!r}\n")
            self._monitored = False

    def _turn(self) -> bool:
        """Send what is wanted; False when the run is over."""
        pause = self._limits.ft_check_interval / 2
        with self._changed:
            if not self._wishes and not self._ended:
                self._changed.wait(pause)
            wishes, self._wishes = self._wishes, []
            inside = SYSTEM.mono() < self._section_until
            ended = self._ended
        board = self._runtime.board
        moved = board.last_progress != self._seen_progress
        self._seen_progress = board.last_progress
        outside = board.phase in _UNLIMITED and (
            SYSTEM.mono() - board.last_progress < self._limits.ft_initial
        )
        if inside:
            waking.wake()  # NVRx's own time stamp needs Python code to run in the main thread
        if inside or moved or outside:
            self._ping()
            if "beat" not in wishes:
                wishes.append("beat")
        for wish in wishes:
            if self._monitored:
                self._reached(functools.partial(self._send, wish))
        return not ended

    def _send(self, wish: str) -> None:
        if wish == "open":
            self._client.start_section(SECTION)
        elif wish == "close":
            self._client.end_section(SECTION)
        else:
            self._client.send_heartbeat()
            self._teach()

    def _teach(self) -> None:
        """Give NVRx the learned limit when it has changed by much, through its own state."""
        limit = self.learned.limit_s
        if self.learned.count < _ENOUGH or abs(limit - self._told_s) < 0.2 * limit:
            return
        timeouts = {"initial": self._limits.ft_initial, "subsequent": limit}
        self._client.load_state_dict(
            {"current_timeouts": {"heartbeat": {**timeouts, "were_calculated": True}}}
        )
        self._told_s = limit
