"""The native heartbeat: the rank's board in shared memory, which the agent watches. In the rank."""

from __future__ import annotations

from contextlib import AbstractContextManager

from keepstep.rank.runtime import Runtime


class NativeHeartbeat:
    """Implements ``ports.Heartbeat``.

    The runtime's own thread shows that the interpreter lives.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def beat(self, step: int) -> None:
        """``step`` is now in progress."""
        self._runtime.begin_step(step)

    def section(self, name: str) -> AbstractContextManager[None]:
        """A named span with its own learned limit and goodput category."""
        return self._runtime.section(name)

    def close(self) -> None:
        """No step is in progress any more: its limit no longer applies."""
        self._runtime.leave_steps()
