"""What an exception in the user's script means: its kind, its place, its text. Runs in the rank."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import msgspec

from keepstep.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    ExitCode,
    KeepstepError,
    SaveFailed,
    UsageError,
)

_OURS = str(Path(__file__).resolve().parents[1])
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
# gloo and NCCL name what happened only in the text of a RuntimeError.
_TIMEOUT = ("timed out", "timeout")
_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "socket is not connected",
    "transport endpoint",
    "peer closed",
    "ncclremoteerror",
    "the round was aborted",
    "application timeout caused pair closure",
)


# What the coordinator is told instead: the failure, and the exit code where no restart can help.
_TOLD = {
    "mismatch": ("checkpoint", ExitCode.CHECKPOINT),
    "save": ("save", ExitCode.CHECKPOINT),
    "usage": ("exception", ExitCode.USAGE),
}
# These are not errors in the script's code, or another rank shows them: no traceback is printed.
_PLAIN = ("peer_lost", "checkpoint", "mismatch", "save", "usage")


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """An exception for people and for the policy."""

    kind: str
    error: str
    location: str
    stack: str

    @property
    def failure(self) -> str:
        """What the coordinator is told."""
        return _TOLD[self.kind][0] if self.kind in _TOLD else self.kind

    @property
    def fatal(self) -> int:
        """The exit code where a restart cannot help, else 0."""
        return int(_TOLD[self.kind][1]) if self.kind in _TOLD else 0

    @property
    def shown(self) -> str:
        """What the rank writes to its error output."""
        return "" if self.kind in _PLAIN else self.stack


def describe(error: BaseException) -> Description:
    """Classify ``error`` and find the user's innermost line.

    Kinds: exception, timeout (a collective's limit), peer_lost (another rank went away),
    checkpoint (bytes damaged), mismatch (another run's or model's checkpoint), save.
    """
    frames = traceback.extract_tb(error.__traceback__)
    kept = [frame for frame in frames if not _ours(frame.filename)]
    users = [frame for frame in kept if not frame.filename.startswith((*_LIBRARIES, "<"))]
    last = users[-1] if users else (kept[-1] if kept else None)
    text = "".join(traceback.format_exception_only(error)).strip()
    body = "".join(traceback.format_list(kept)) if kept else ""
    return Description(
        kind=_kind(error),
        error=text,
        location=f"{last.filename}:{last.lineno}" if last else "",
        stack=f"Traceback (most recent call last):\n{body}{text}\n",
    )


def _ours(filename: str) -> bool:
    return filename.startswith((_OURS, "<frozen runpy>", "<frozen importlib"))


def _kind(error: BaseException) -> str:
    if isinstance(error, CheckpointCorrupt):
        return "checkpoint"
    if isinstance(error, CheckpointMismatch):
        return "mismatch"
    if isinstance(error, SaveFailed):
        return "save"
    if isinstance(error, UsageError):
        return "usage"
    if isinstance(error, KeepstepError) or not isinstance(error, RuntimeError):
        return "exception"
    text = str(error).lower()
    if any(word in text for word in _PEER):
        return "peer_lost"
    if _from_torch(error) and any(word in text for word in _TIMEOUT):
        return "timeout"
    return "exception"


def _from_torch(error: BaseException) -> bool:
    """Whether the innermost frame is torch's: a user's own "timeout" is an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "torch" in Path(frames[-1].filename).parts
