"""The run folder: one agent at a time, and a checkpoint folder that can be written."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from keepstep.agent.launch_spec import Launch
from keepstep.errors import CheckpointNotWritable, UsageError


class RunFolder:
    """Holds the lock of a run folder for as long as the agent lives.

    Raises:
        UsageError: another agent uses it.
        CheckpointNotWritable: checkpoints cannot be written.
    """

    def __init__(self, spec: Launch) -> None:
        self.path = spec.run_dir
        for name in ("events", "stacks", "faults", "terms"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UsageError(
                f"another keepstep run uses the run folder {self.path}",
                advice="wait for it to end, or give another --run-dir",
            ) from None
        try:
            _prepare_checkpoints(Path(spec.config.checkpoint.dir))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)


def _prepare_checkpoints(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{os.getpid()}"
        probe.write_bytes(b"keepstep")
        probe.unlink()
    except OSError as error:
        raise CheckpointNotWritable(
            f"checkpoints cannot be written to {root}: {error.strerror or error}",
            done="nothing was started",
            advice="check rights and space, or set checkpoint.dir",
        ) from error
