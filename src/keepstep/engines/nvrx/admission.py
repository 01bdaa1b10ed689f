"""No attempt begins before it is decided that the run goes on. Runs in the rank.

NVRx restarts after every failure, and asks nobody. ``keepstep run`` decides meanwhile, by the same
policy as ever, whether a restart can help. With NVRx's launcher it writes the newest round that may
begin on the boards of node 0, and the first rank there tells the others through the store outside
the ranks. Mostly it has decided while NVRx unwinds and the ranks meet again, so that nobody waits
here. Where it has not the ranks wait, and where the run is over they are ended while they do.

keepstep's own launcher is told only of failures against which no restart helps: then the store says
so, and the ranks wait to be ended.
"""

from __future__ import annotations

import sys

from keepstep.clock import SYSTEM
from keepstep.engines.nvrx.meeting import Turn, connect
from keepstep.rank.runtime import Runtime

_TURN_S = 0.005
"""So often one looks; NVRx's exception and time stamp come in between."""
_SPARE_S = 5.0
"""How much later than ``restart.settle_s`` the decision may come: then nobody decides any more."""
_CONNECT_S = 10.0


class Admission:
    """One rank's wait for it.

    Args:
        runtime: The rank; its board shows what was decided. turn: where it meets the others.
    """

    def __init__(self, runtime: Runtime, turn: Turn) -> None:
        self._runtime = runtime
        self._turn = turn
        self._watched = runtime.config.engine.parts.launcher == "nvrx"

    def wait(self, number: int) -> None:
        """Return once round ``number`` may begin; the main thread, which has met the others.

        Raises:
            RuntimeError: the store was lost, or the turn was aborted.
        """
        start = self._runtime.start
        limit_s = self._runtime.config.restart.settle_s + _SPARE_S
        end = SYSTEM.mono() + limit_s
        while not self._admitted(number):
            if SYSTEM.mono() >= end:
                sys.stderr.write(
                    f"keepstep: warning: nobody decided in {limit_s:.0f} s whether round {number} "
                    "may begin; it begins\n"
                )
                break
            SYSTEM.sleep(_TURN_S)
        several = start.world > start.local_world
        if self._watched and several and (start.node, start.local_rank) == (0, 0):
            self._turn.store.set(self._admitted_key, "")

    def refuse(self) -> None:
        """No restart helps against this rank's failure: nobody begins another attempt. For runs
        under keepstep's own launcher."""
        connect(*self._turn.host_and_port(), _CONNECT_S).set(self._refused_key, "")

    def _admitted(self, number: int) -> bool:
        turn = self._turn
        if not self._watched:
            return not turn.store.check([self._refused_key])
        if self._runtime.start.node == 0:
            return self._runtime.board.admitted >= number
        return bool(turn.store.check([self._admitted_key]))

    @property
    def _admitted_key(self) -> str:
        return f"keepstep/admitted/{self._turn.cycle}/{self._turn.iteration}"

    @property
    def _refused_key(self) -> str:
        return f"keepstep/refused/{self._turn.cycle}"
