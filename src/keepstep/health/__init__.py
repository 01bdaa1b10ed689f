"""Checks of a node, run before it takes part and after a failure."""

from keepstep.health.node import (
    CheckpointFolder,
    GpuPresence,
    MemoryAvailable,
    WallClock,
    run_all,
)

__all__ = ["CheckpointFolder", "GpuPresence", "MemoryAvailable", "WallClock", "run_all"]
