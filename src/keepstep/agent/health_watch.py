"""Health checks of a node: at the start, and in the background after each failure."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

from keepstep.agent.launch_spec import Launch
from keepstep.errors import CheckpointNotWritable
from keepstep.health import CheckpointFolder, GpuPresence, MemoryAvailable, WallClock, run_all
from keepstep.ports import Finding, HealthCheck

_MIN_MEMORY_BYTES = 64 << 20


def checks_of(spec: Launch) -> list[HealthCheck]:
    """What is checked on this node."""
    return [
        CheckpointFolder(Path(spec.config.checkpoint.dir), limit_s=spec.config.checkpoint.stall_s),
        MemoryAvailable(_MIN_MEMORY_BYTES),
        WallClock(),
        GpuPresence(0),
    ]


def refuse_bad_start(findings: list[Finding]) -> None:
    """Raise for what would surely fail later.

    Raises:
        CheckpointNotWritable: the checkpoint folder.
    """
    for finding in findings:
        if finding.check == CheckpointFolder.name and finding.status == "bad":
            raise CheckpointNotWritable(
                f"checkpoints cannot be written to {finding.detail}",
                done="nothing was started",
                advice="check rights and space, or set checkpoint.dir",
            )


class HealthWatch:
    """Runs the checks in a thread, one run at a time.

    Args:
        checks: What to run. wake: called when a run is done.
    """

    def __init__(self, checks: list[HealthCheck], wake: Callable[[], None]) -> None:
        self._checks = checks
        self._wake = wake
        self._done: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Run the checks, unless a run is in progress."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="keepstep-health", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        self._done.put(run_all(self._checks))
        self._wake()

    def take(self) -> list[Finding]:
        """Findings of the runs that ended since the last call."""
        found: list[Finding] = []
        while not self._done.empty():
            found += self._done.get()
        return found

    def close(self, limit_s: float) -> None:
        """Wait for a run in progress."""
        if self._thread is not None:
            self._thread.join(timeout=limit_s)
