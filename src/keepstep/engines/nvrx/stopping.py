"""The step after which all ranks of all nodes stop, agreed through the store outside the ranks.

Runs in the rank. A thread waits in the store for somebody to ask, so that training costs nothing.
Once asked it closes the gate, so that no step is completed unnoticed from then on, and only then
tells the step after the one in progress: whatever the main thread does in between, it comes to the
gate at the end of that step at the latest. The highest step that any rank told is the agreed one.
The threads answer for main threads that are blocked in a collective, so nobody waits in a circle.
"""

from __future__ import annotations

import signal
import sys
import threading
from datetime import timedelta
from typing import Any

from keepstep import events
from keepstep.engines.nvrx.meeting import Turn, connect
from keepstep.rank.runtime import Runtime

_FOREVER = timedelta(days=365)
"""The thread's patience: a time-out would be traffic, and a warning of torch in the log."""
_TURN_S = 0.05
"""So often the main thread lets NVRx's interruption in while it waits."""
_CONNECT_S = 60.0


class StopAgreement:
    """One rank's part in it.

    Args:
        runtime: The rank; its board shows the step in progress.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._rank, self._world = runtime.start.rank, runtime.start.world
        self.round: int | None = None
        """The round that is watched; None: none yet."""
        self.asked = False
        """Whether somebody asked for a stop in this round: then ``agreed`` tells the step."""
        self._step = 0
        self._known = threading.Event()

    # --- the main thread --------------------------------------------------------------------------

    def watch(self, round: int) -> None:
        """Listen for a wish to stop in ``round`` from now on; the main thread, where no group is
        being made: the connections must not be taken for one of its own."""
        if self.round is not None:  # every rank has left that round: free the thread that waits
            self._connected().set(f"{self._prefix}/asked", "")
        self.round, self.asked, self._step = round, False, 0
        self._known = threading.Event()
        arguments = (self._connected(), round, self._known)
        threading.Thread(
            target=self._listen, args=arguments, name="keepstep-stop", daemon=True
        ).start()

    def ask(self, number: int) -> None:
        """Ask all ranks to stop, on the signal ``number``."""
        self._connected().set(f"{self._prefix}/asked", signal.Signals(number).name)
        self.asked = True

    def agreed(self) -> int:
        """The step to stop after; waits until all ranks have agreed."""
        while not self._known.wait(_TURN_S):
            pass
        return self._step

    def leave(self) -> None:
        """The loop is over here: whoever asks for a stop now does not wait for this rank."""
        if self.round is not None:
            self._tell(self._connected())

    def _connected(self) -> Any:
        host, port = Turn(self._runtime.store, _CONNECT_S).host_and_port()
        return connect(host, port, _CONNECT_S)

    @property
    def _prefix(self) -> str:
        return f"keepstep/stop/{self.round}"

    # --- the thread -------------------------------------------------------------------------------

    def _listen(self, store: Any, round: int, known: threading.Event) -> None:
        prefix = self._prefix
        try:
            store.wait([f"{prefix}/asked"], _FOREVER)
            name = store.get(f"{prefix}/asked").decode()
            if not name or self.round != round:
                return
            self.asked = True  # the gate; only then is the step read
            self._tell(store)
            self._say_notice(name)
            keys = [f"{prefix}/{rank}" for rank in range(self._world)]
            store.wait(keys, _FOREVER)
            step = max(int(value) for value in store.multi_get(keys))
        except RuntimeError:
            return  # the store is gone, and with it the run
        if self._rank == 0:
            sys.stderr.write(f"keepstep: stopping after step {step}\n")
        if self.round == round:
            self._step = step
            known.set()

    def _tell(self, store: Any) -> None:
        store.set(f"{self._prefix}/{self._rank}", str(self._runtime.board.step + 1))

    def _say_notice(self, name: str) -> None:
        """Tell the watching process of a node that was not asked itself."""
        runtime = self._runtime
        if not runtime.board.stop_signal and runtime.start.local_rank == 0:
            runtime.recorder.emit(events.StopNotice(signal=name))
