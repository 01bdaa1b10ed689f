"""Every setting of keepstep: name, unit, default, and when to change it.

Seconds end in ``_s``, bytes in ``_bytes``; counts have no suffix. Limits are learned where they can
be: a setting is only a bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """The run as a whole."""

    id: str = ""
    """Run id; empty: made from the time. Also the default folder's name under ``runs/``."""
    dir: str = ""
    """Run folder; empty: ``runs/<id>``. On a cluster it lies on shared storage."""
    grace_s: float = 25.0
    """Time that ranks have after SIGTERM or Ctrl-C to commit a checkpoint; below the pod's grace
    period."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Who supplies each mechanism of a run: ``EngineSettings`` with nothing left open."""

    checkpoint: Literal["native", "nvrx"]
    restart: Literal["native", "nvrx", "none"]
    """``none``: no restart inside a process; at each fault the launcher restarts all ranks."""
    launcher: Literal["native", "nvrx"]

    @property
    def any_nvrx(self) -> bool:
        """Whether NVRx is needed at all."""
        return "nvrx" in (self.checkpoint, self.restart, self.launcher)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Who supplies the mechanisms."""

    name: Literal["native", "nvrx"] = "native"
    """``native`` or ``nvrx`` (needs the extra of that name); the parts below follow it."""
    checkpoint: Literal["", "native", "nvrx"] = ""
    """Who writes checkpoints; empty: as ``name``."""
    restart: Literal["", "native", "nvrx"] = ""
    """Who restarts inside the process; empty: as ``name``, but nobody where only the launcher is
    NVRx's."""
    launcher: Literal["", "native", "nvrx"] = ""
    """Who starts and replaces ranks; empty: as ``name``."""

    @property
    def parts(self) -> Parts:
        """Who supplies what. Settings that cannot go together are refused by the rules."""
        launcher = self.launcher or self.name
        restart = self.restart or self.name
        # The native restart lives in keepstep's own launcher: where that is not there and nothing
        # was asked for, the launcher restarts whole processes.
        alone = launcher == "nvrx" and restart == "native"
        return Parts(
            checkpoint=self.checkpoint or self.name,
            restart="none" if alone else restart,
            launcher=launcher,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NvrxSettings:
    """Mechanisms of NVRx, where the engine takes them from there."""

    soft_limit_s: float = 0.0
    """Longest step that is no hang; 0: twice ``heartbeat.min_limit_s``. Every other limit of NVRx
    follows from it."""
    checkpoint: Literal["torch", "dcp"] = "torch"
    """``torch``: one file a rank (``TorchAsyncCheckpoint``); ``dcp``: a sharded checkpoint of
    torch's own form (``FileSystemWriterAsync``)."""
    safety_factor: float = 5.0
    """A limit that NVRx's launcher learns is the longest time seen times this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSettings:
    """When to save, where, and what to keep."""

    dir: str = ""
    """Folder of the checkpoints; empty: ``checkpoints`` in the run folder."""
    every_steps: int = 0
    """Save each time so many steps are completed; 0: never by count."""
    keep_last: int = 3
    """Committed checkpoints to keep, at least 1; the last good one is never removed."""
    at_end: bool = True
    """Save the last step too, when ``every_steps`` is set and it is not a multiple of it."""
    max_failures: int = 3
    """Failed saves in a row that are tolerated before the run stops."""
    slots: int = 2
    """Staging copies per rank, each as large as its shard; 2 lets one be written while the next is
    filled."""
    write_limit_s: float = 600.0
    """How long a save may stay unfinished before it counts as failed."""
    stall_s: float = 30.0
    """Storage that takes nothing of a save for so long is told of."""
    copy: Literal["auto", "overlap", "blocking"] = "auto"
    """How a save copies what only optimizers change: while the next step computes (``overlap``), at
    once (``blocking``), or whichever costs less as measured in the first saves."""
    check_copy: bool = False
    """Hash what is copied in the background before and after: a value that something else than an
    optimizer changed meanwhile fails the save. For debugging; costs two passes over the state."""
    when_busy: Literal["skip", "wait"] = "skip"
    """A save that is due while all slots are in use: ``skip`` it, or let training wait."""
    retries: int = 2
    """How often a shard that storage refused is written again before the save counts as failed."""
    keep_every_steps: int = 0
    """Checkpoints of steps that are a multiple of this are never removed; 0: none."""
    resume_from: str = ""
    """Checkpoint, folder of checkpoints or run folder of another run, or a DCP folder, from which a
    run without checkpoints of its own starts."""
    rated_mb_s: float = 0.0
    """Rated write speed of the file system in MB/s (10^6 bytes), for the estimate of a save's time;
    0: worked out for FSx for Lustre, else not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartSettings:
    """Freeing ranks after a failure and forming the next round."""

    max_restarts: int = -1
    """Restarts allowed in all; -1: no limit but ``max_without_progress``."""
    max_without_progress: int = 5
    """Restarts in a row without a newly committed checkpoint or a new highest step."""
    settle_s: float = 1.0
    """How long to wait for the cause when the first evidence is only a lost peer."""
    abort_limit_s: float = 3.0
    """A rank that has not left its step so long after the abort is ended and replaced."""
    save_wait_s: float = 5.0
    """How long a restart waits for a save that every rank has staged and that is to commit."""
    join_limit_s: float = 900.0
    """How long a new process may take to reach ``keepstep.run`` (imports included)."""
    signal_after_s: float = 0.2
    """A rank whose main thread did not leave after its groups were aborted gets a signal."""
    pg_timeout_s: float = 600.0
    """Time limit of a collective; a rank that waits longer raises."""
    backend: str = ""
    """Process-group backend; empty: gloo, or ``cpu:gloo,cuda:nccl`` with a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatSettings:
    """When a rank that makes no progress is suspect, and when it is ended."""

    interval_s: float = 0.1
    """How often a rank's heartbeat thread shows that the interpreter lives."""
    min_limit_s: float = 30.0
    """A rank is never ended for a lack of progress shorter than this."""
    start_limit_s: float = 1800.0
    """Upper bound for start, load and the first steps, while nothing has been learned."""
    section_limit_s: float = 3600.0
    """Upper bound for a section (eval, export) whose length is not known yet."""
    on_hang: Literal["restart", "report"] = "restart"
    """``report`` only writes events and a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSettings:
    """How ranks' processes come to be."""

    start_method: Literal["fork", "spawn"] = "fork"
    """``fork`` from a process that has imported torch (milliseconds), or a fresh interpreter."""
    preload: str = "torch"
    """Modules imported before the fork, comma-separated; empty: none."""
    spares: int = 1
    """Parked processes per node that take a dead rank's number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultSettings:
    """Faults to inject; each fires once in a run."""

    inject: tuple[str, ...] = ()
    """``KIND@STEP:RANK``, as on the command line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings. Sections are replaced whole with ``dataclasses.replace``."""

    run: RunSettings = field(default_factory=RunSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    restart: RestartSettings = field(default_factory=RestartSettings)
    heartbeat: HeartbeatSettings = field(default_factory=HeartbeatSettings)
    rank: RankSettings = field(default_factory=RankSettings)
    nvrx: NvrxSettings = field(default_factory=NvrxSettings)
    faults: FaultSettings = field(default_factory=FaultSettings)
