"""The run folder: one agent of each node at a time."""

from __future__ import annotations

import fcntl
import os

from keepstep.agent.environment import node_suffix
from keepstep.agent.launch_spec import Launch
from keepstep.errors import UsageError


class RunFolder:
    """Holds the lock of a run folder for as long as the agent lives.

    Raises:
        UsageError: another agent uses it.
    """

    def __init__(self, spec: Launch) -> None:
        self.path = spec.run_dir
        for name in ("events", "stacks", "faults", "terms"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        self._lock = os.open(
            self.path / f"lock{node_suffix(spec)}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
        )
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UsageError(
                f"another keepstep run uses the run folder {self.path}",
                advice="wait for it to end, or give another --run-dir",
            ) from None

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)
