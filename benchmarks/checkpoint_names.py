"""The ways to save that the benchmark of checkpoints compares, and words that it shares with jobs.

Without torch, so that what only starts jobs and shows tables starts at once.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY, SAVING, SEEN = "memory", "saving", "seen"
"""Files of a job: there while its memory is watched; from the moment when steps with saves begin;
once their memory was looked at."""
CALIBRATION = (16, 96)
"""Lengths of the input whose time is measured to find the one that was asked for."""


@dataclass(frozen=True)
class System:
    """One way to save and its title in tables."""

    name: str
    title: str

    @property
    def is_keepstep(self) -> bool:
        return self.name.startswith("keepstep")

    @property
    def is_dcp(self) -> bool:
        """Whether torch's own distributed checkpoint writes it."""
        return self.name.startswith("dcp")

    @property
    def needs_nvrx(self) -> bool:
        return self.name.startswith("nvrx")


SYSTEMS = (
    System("gather", "gather to rank 0, `torch.save`"),
    System("torch-save", "`torch.save` per rank"),
    System("dcp", "`dcp.save`"),
    System("dcp-thread", "`dcp.async_save`, thread"),
    System("dcp-thread-kept", "`dcp.async_save`, thread, stager kept"),
    System("dcp-thread-async", "`dcp.async_save`, thread, asynchronous staging"),
    System("dcp-process", "`dcp.async_save`, process"),
    System("dcp-process-shared", "`dcp.async_save`, process, shared memory"),
    System("dcp-process-async", "`dcp.async_save`, process, shared memory, asynchronous staging"),
    System("nvrx-torch-fork", "NVRx `TorchAsyncCheckpoint`, fork"),
    System("nvrx-torch-persistent", "NVRx `TorchAsyncCheckpoint`, persistent"),
    System("nvrx-dcp-fork", "NVRx `FileSystemWriterAsync`, fork"),
    System("nvrx-dcp-persistent", "NVRx `FileSystemWriterAsync`, persistent"),
    System("keepstep", "**keepstep**"),
    System("keepstep-overlap", "keepstep, `copy=overlap`"),
    System("keepstep-blocking", "keepstep, `copy=blocking`"),
)
BY_NAME = {system.name: system for system in SYSTEMS}

OPTIONS = {
    "option-non-blocking": "`StagingOptions(use_non_blocking_copy=True)`",
    "option-pinned": "`StagingOptions(use_pinned_memory=True)`",
    "option-cached": "`FileSystemWriter(cache_staged_state_dict=True)`",
}
"""What torch offers besides, and is tried only once."""
