"""Loading a checkpoint on all ranks together, and small decisions of rank 0 that all must know.

Runs in the ranks. Nothing of a checkpoint is used on any rank before it is known to be good on all:
after the cheap checks, and again after reading, the ranks tell each other how it went. Where
``torch.distributed`` is not initialised there is only this rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import torch.distributed as dist

from keepstep import errors
from keepstep.checkpoint import torch_reader
from keepstep.checkpoint.torch_reader import LoadReport
from keepstep.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch, KeepstepError
from keepstep.rank import exchange

T = TypeVar("T")
_Parts = tuple[str, str, str, str]
_IN_PART = "tensors may be filled in part: this state must not be used before another is loaded"


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others: a value as JSON, or an error by name with its four parts."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    parts: _Parts = ("", "", "", "")


class _Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank fared: ``kind`` ok, damaged (an older checkpoint may do) or refused."""

    kind: str = "ok"
    parts: _Parts = ("", "", "", "")


@dataclass
class Loader:
    """Loads checkpoints into ``state``; every rank has one and calls it with the same folders.

    Attributes:
        touched: Whether tensors may be filled in part.
    """

    state: Mapping[str, object]
    root: Path
    rank: int
    world: int
    run: str | None = None
    strict: bool = True
    touched: bool = False

    def load(self, folder: str, loaded: Callable[[], object] = lambda: None) -> LoadReport:
        """Load the checkpoint ``folder``; see ``torch_reader.load``.

        Args:
            folder: Its name under the root, or the absolute path of another run's.
            loaded: Called when every rank has read it, before plain values are handed over.

        Raises:
            CheckpointCorrupt: on some rank it is damaged; an older one may do.
            CheckpointMismatch: on some rank it does not fit; nothing was changed.
        """
        # Another run's is named by its path, and is wanted although it is another run's.
        run = None if Path(folder).is_absolute() else self.run
        prepared = _together(
            self.rank,
            lambda: torch_reader.prepare(
                self.state,
                self.root,
                folder,
                rank=self.rank,
                world=self.world,
                run=run,
                strict=self.strict,
            ),
        )
        self.touched = True
        _together(self.rank, prepared.read, done=_IN_PART)
        loaded()
        report = prepared.apply()
        self.touched = False
        if prepared.left_out:
            warnings.warn(
                f"restored only in part from step {report.step}: {prepared.left_out}",
                RuntimeWarning,
                stacklevel=4,
            )
        return report


def _together(rank: int, work: Callable[[], T], done: str = "") -> T:
    """What ``work`` returns, if it succeeds on every rank; ``done`` replaces that of damage.

    Raises:
        Exception: this rank's error, if it is not damage.
        CheckpointCorrupt: on some rank it is damage, and on none anything else; the same on all.
        CheckpointMismatch: another rank's error is not damage.
    """
    result: list[T] = []
    mine, error = _Verdict(), None
    try:
        result.append(work())
    except Exception as caught:  # noqa: BLE001 - the other ranks wait for this one's verdict
        error = caught
        mine = _verdict(caught)
    verdicts = [mine]
    if distributed():
        heard = exchange.gather(msgspec.json.encode(mine))
        verdicts = [msgspec.json.decode(one, type=_Verdict) for one in heard]
    if error is not None and mine.kind == "refused":
        raise error
    for other, verdict in enumerate(verdicts):
        if verdict.kind == "refused":
            raise CheckpointMismatch(
                f"rank {other} cannot restore: {verdict.parts[0].rstrip('.')}",
                where=verdict.parts[1] or f"rank {rank}",
                done=done or "nothing was restored",
                advice=verdict.parts[3],
            )
    for verdict in verdicts:
        if verdict.kind == "damaged":
            what, where, what_was_done, advice = verdict.parts
            raise CheckpointCorrupt(
                what, where=where, done=done or what_was_done, advice=advice
            ) from error
    return result[0]


def _verdict(error: Exception) -> _Verdict:
    if isinstance(error, OSError):
        what = f"a file cannot be read: {error.strerror or error}"
        where = str(error.filename or "")
        return _Verdict(kind="damaged", parts=(what, where, "", "use an older checkpoint"))
    kind = "damaged" if isinstance(error, CheckpointCorrupt) else "refused"
    if isinstance(error, KeepstepError):
        return _Verdict(kind=kind, parts=(error.what, error.where, error.done, error.advice))
    return _Verdict(kind=kind, parts=(f"{type(error).__name__}: {error}", "", "", ""))


def of_rank_0(rank: int, decide: Callable[[], T], kind: type[T]) -> T:
    """What ``decide`` returns (of type ``kind``) or raises on rank 0, on every rank."""
    if not distributed():
        return decide()
    said = None
    if rank == 0:
        try:
            said = _Said(value=msgspec.Raw(msgspec.json.encode(decide())))
        except KeepstepError as error:
            parts = (error.what, error.where, error.done, error.advice)
            said = _Said(error=type(error).__name__, parts=parts)
    heard = exchange.broadcast(None if said is None else msgspec.json.encode(said))
    answer = msgspec.json.decode(heard, type=_Said)
    if answer.error:
        raise _error(answer)
    return msgspec.json.decode(answer.value, type=kind)


def _error(answer: _Said) -> KeepstepError:
    kind = getattr(errors, answer.error, None)
    if not (isinstance(kind, type) and issubclass(kind, KeepstepError)):
        kind = CheckpointError
    what, where, done, advice = answer.parts
    return kind(what, where=where, done=done, advice=advice)


def none_left(error: CheckpointError) -> CheckpointError:
    """``error``, that no other checkpoint can be taken, after one was read in part."""
    return type(error)(error.what, where=error.where, done=_IN_PART, advice=error.advice)


def distributed() -> bool:
    """Whether there are other ranks to talk to."""
    return dist.is_available() and dist.is_initialized()


def place() -> tuple[int, int]:
    """This rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if distributed() else (0, 1)
