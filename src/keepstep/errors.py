"""Every exception and exit code of keepstep.

    KeepstepError
    +-- UsageError              64  wrong flag, unknown setting, script not found
    |   +-- EngineUnavailable   64  an engine's package is missing
    |   +-- NotEnoughMemory     64  the staging of a save does not fit into memory
    |   +-- FolderInUse         64  another job saves into the same folder
    +-- CheckpointError         65  the checkpoint that is needed cannot be used
    |   +-- CheckpointNotFound
    |   +-- CheckpointCorrupt       bytes differ from what was committed
    |   +-- CheckpointMismatch      belongs to another run or another model
    |   +-- CheckpointNotWritable   folder missing rights or space
    |   +-- SaveFailed              a save did not become durable
    +-- InternalError           70  a bug of ours
    +-- RestartsExhausted       76  restarts without progress
    +-- NodeUnhealthy           77  this node must not be used
    +-- ScriptFailed            78  the script fails in the same way each time
    RestartSignal(BaseException)    unwinds ``main`` for a restart; user code must not catch it

A message has four parts, always in this order: what happened (with numbers), where it happened,
what was done about it, and what the reader can do.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Exit codes of every keepstep command (design: they drive the Job's podFailurePolicy)."""

    OK = 0
    NEGATIVE = 1
    USAGE = 64
    CHECKPOINT = 65
    INTERNAL = 70
    STOPPED_ON_NOTICE = 75
    RESTARTS_EXHAUSTED = 76
    NODE_UNHEALTHY = 77
    SCRIPT_FAILED = 78


class KeepstepError(Exception):
    """Base of all errors that keepstep raises on purpose.

    Args:
        what: What happened, with numbers.
        where: Rank, node, step or file; may be empty.
        done: What keepstep did about it; may be empty.
        advice: What the reader can do; may be empty.
    """

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, what: str, *, where: str = "", done: str = "", advice: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.done = done
        self.advice = advice

    def __str__(self) -> str:
        head = f"{self.what} ({self.where})" if self.where else self.what
        parts = [part.rstrip(".") for part in (head, self.done, self.advice) if part]
        return ". ".join([parts[0], *(part[:1].upper() + part[1:] for part in parts[1:])]) + "."

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.done, self.advice))


def _rebuild(
    cls: type[KeepstepError], what: str, where: str, done: str, advice: str
) -> KeepstepError:
    return cls(what, where=where, done=done, advice=advice)


class UsageError(KeepstepError):
    """The command line, a setting or an argument cannot be used as given."""

    exit_code = ExitCode.USAGE


class EngineUnavailable(UsageError):
    """The chosen engine's package is not installed."""


class CheckpointError(KeepstepError):
    """A checkpoint that is needed cannot be written or read."""

    exit_code = ExitCode.CHECKPOINT


class CheckpointNotFound(CheckpointError):
    """No committed checkpoint where one must exist."""


class CheckpointCorrupt(CheckpointError):
    """Bytes on storage differ from what was committed."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint belongs to another run or another model."""


class CheckpointNotWritable(CheckpointError):
    """The checkpoint folder cannot be written: rights, space or a bad path."""


class SaveFailed(CheckpointError):
    """A save did not become durable."""


class NotEnoughMemory(UsageError):
    """The node, or its container, has no memory for the staging of a save."""


class FolderInUse(UsageError):
    """Another job, alive, saves into the same folder."""


class InternalError(KeepstepError):
    """A bug of keepstep; please report it."""


class RestartsExhausted(KeepstepError):
    """The restart budget is spent and no new step was committed."""

    exit_code = ExitCode.RESTARTS_EXHAUSTED


class NodeUnhealthy(KeepstepError):
    """A health check found this node unusable."""

    exit_code = ExitCode.NODE_UNHEALTHY


class ScriptFailed(KeepstepError):
    """The user's script fails in the same way in a fresh process."""

    exit_code = ExitCode.SCRIPT_FAILED


class RestartSignal(BaseException):
    """Unwinds ``main`` so that the rank can join the next round.

    Derives from ``BaseException``: ``except Exception`` in user code must not swallow a restart.
    """
