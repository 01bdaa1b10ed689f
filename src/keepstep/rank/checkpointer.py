"""``Checkpointer``: asynchronous, sharded, verified checkpoints in a plain script.

Runs in the ranks of any script, under torchrun or alone, with nothing else of keepstep. Rank and
world come from ``torch.distributed`` where it is initialised.
"""

from __future__ import annotations

import contextlib
import os
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import torch.distributed as dist

from keepstep import errors
from keepstep.checkpoint import catalog, layout, torch_reader
from keepstep.checkpoint.torch_reader import PreparedLoad
from keepstep.checkpoint.writer import owner
from keepstep.clock import SYSTEM, Clock
from keepstep.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotWritable,
    KeepstepError,
    SaveFailed,
    UsageError,
)
from keepstep.ports import PendingWrite
from keepstep.rank import exchange
from keepstep.rank.local_writer import LocalStaging
from keepstep.rank.shard_writer import NativeShardWriter
from keepstep.wire.types import Version

SAVE_LIMIT_S = 900.0
"""When ``finalize`` gives up; above the writer's own limits, so that it can say what is wrong."""
EXIT_LIMIT_S = 30.0
"""How long a save in flight may take when the script is ending with an exception."""
_TERMS = "terms"
T = TypeVar("T")


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others: a value as JSON, or an error by name with its four parts."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    parts: tuple[str, str, str, str] = ("", "", "", "")


class _Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a rank can load a checkpoint; ``damaged``: an older one may do."""

    ok: bool
    damaged: bool
    text: str


@dataclass
class _Session:
    """What this process needs to save: its place, and numbers that no earlier save has."""

    rank: int
    world: int
    term: int
    writer: NativeShardWriter
    round: int = 1
    last_step: int = -1


class Checkpointer:
    """Saves in the background and restores the newest checkpoint that verifies.

    Every rank makes one for the same folder and calls the same methods at the same steps. The first
    ``async_save`` and every ``restore`` communicate where ``torch.distributed`` is initialised.

    Args:
        path: Folder of the checkpoints, shared by all ranks.
        keep_last: Committed checkpoints to keep, at least 1.
        run_id: Checkpoints of other runs are refused; None takes any.
        clock: Where time comes from.

    Raises:
        UsageError: ``keep_last`` is below 1.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        run_id: str | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        if keep_last < 1:
            raise UsageError(
                f"keep_last is {keep_last}",
                advice="keep at least 1 checkpoint",
            )
        # Absolute: the script may change its working folder, and the writer has its own.
        self._root = Path(path).absolute()
        self._keep_last = keep_last
        self._run_id = run_id
        self._clock = clock
        self._session: _Session | None = None
        self._pending: list[PendingWrite] = []
        self._reported: set[str] = set()
        self._closed = False

    # --- saving -------------------------------------------------------------------------------

    def async_save(self, state: Mapping[str, object], step: int) -> PendingWrite:
        """Copy ``state`` as it is now and write it in the background as checkpoint ``step``.

        Args:
            state: By name: modules, optimizers, objects with ``state_dict`` and
                ``load_state_dict``, tensors, dicts, lists, namespaces and dataclasses.
            step: Completed steps, from 0 on.

        Raises:
            SaveFailed: an earlier save failed; this one was not begun.
            CheckpointError: something in ``state`` cannot be kept; the message names it.
            CheckpointNotWritable: the folder cannot be written.
            UsageError: ``step`` is negative, or the checkpointer is closed.
        """
        self._check_open()
        if step < 0:
            raise UsageError(f"a checkpoint of step {step} was asked for", advice="count from 0")
        self._raise_failed()
        session = self._session_now()
        if step <= session.last_step:
            session.round += 1  # the same step again is another version, never the same folder
        session.last_step = step
        version = Version(
            run=self._run_id or "",
            term=session.term,
            round=session.round,
            step=step,
            world=session.world,
        )
        pending = session.writer.begin(state, version, self._root)
        self._pending.append(pending)
        return pending

    def finalize(self, timeout_s: float | None = None) -> None:
        """Return when every save begun is durable and committed.

        Args:
            timeout_s: Limit for all of them together; None: ``SAVE_LIMIT_S``.

        Raises:
            SaveFailed: one failed, or is not committed in time; it then goes on in the background.
        """
        deadline = self._clock.mono() + (SAVE_LIMIT_S if timeout_s is None else timeout_s)
        failure: SaveFailed | None = None
        for pending in list(self._pending):
            try:
                pending.wait(max(0.0, deadline - self._clock.mono()))
            except SaveFailed as error:
                failure = failure or error
            if pending.done():
                self._pending.remove(pending)
        if failure is not None:
            raise failure

    def _raise_failed(self) -> None:
        for pending in list(self._pending):
            if pending.done():
                self._pending.remove(pending)
                pending.wait(0.0)

    def _session_now(self) -> _Session:
        rank, world = _place()
        session = self._session
        if session is not None and (session.rank, session.world) == (rank, world):
            return session
        if session is not None:
            session.writer.close()
            self._session = None
        term = self._of_rank_0(rank, self._claim_term, int)
        staging = LocalStaging(self._root, rank=rank, keep_last=self._keep_last, clock=self._clock)
        writer = NativeShardWriter(staging, rank=rank, world=world, clock=self._clock)
        self._session = _Session(rank, world, term, writer)
        return self._session

    def _claim_term(self) -> int:
        """A number that no earlier process has used: its saves can be told from all others."""
        folder = self._root / _TERMS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            used = [int(name) for name in os.listdir(folder) if name.isdecimal()]
            owners = [owner(self._root / name) for name in layout.list_folders(self._root)]
            used += [version.term for version in owners if version is not None]
            term = max(used, default=0) + 1
            text = msgspec.json.encode({"pid": os.getpid(), "created": self._clock.wall()})
            while True:
                try:
                    layout.publish(folder / str(term), text)
                except FileExistsError:
                    term += 1
                else:
                    return term
        except OSError as error:
            raise CheckpointNotWritable(
                f"the checkpoint folder cannot be written: {error.strerror or error}",
                where=str(self._root),
                done="nothing was saved",
                advice="check that it is a folder, its rights and its space",
            ) from error

    # --- restoring ----------------------------------------------------------------------------

    def restore(self, state: Mapping[str, object]) -> int:
        """Fill ``state`` in place from the newest committed checkpoint that verifies.

        A damaged checkpoint is reported with a warning, and the next older one is taken, on all
        ranks together.

        Args:
            state: The objects, under the names under which they were saved.

        Returns:
            The step of the checkpoint; 0 if there is none.

        Raises:
            CheckpointMismatch: it is of another run or another model; nothing was changed.
            CheckpointCorrupt: there are checkpoints, but all of them are damaged.
            SaveFailed: a save begun before failed.
        """
        self._check_open()
        self.finalize()
        rank, world = _place()
        refused: list[str] = []
        while True:
            folder = self._of_rank_0(rank, lambda: self._choose(refused), str)
            if not folder:
                return 0
            prepared, error = self._try(state, folder, rank, world)
            damage = _settle(rank, error)
            if damage is None and prepared is not None:
                step = prepared.apply().step
                if self._session is not None:
                    self._session.round += 1
                    self._session.last_step = step
                return step
            refused.append(folder)
            if rank == 0:
                self._warn(folder, damage or "")

    def _try(
        self, state: Mapping[str, object], folder: str, rank: int, world: int
    ) -> tuple[PreparedLoad | None, Exception | None]:
        try:
            prepared = torch_reader.prepare(
                state, self._root, folder, rank=rank, world=world, run=self._run_id
            )
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one's verdict
            return None, error
        return prepared, None

    def _choose(self, refused: list[str]) -> str:
        """Folder of the newest checkpoint that was not refused, empty if there is none.

        Warns of damaged ones that it passes over.
        """
        found = catalog.committed(self._root)
        ours = [info for info in found if self._run_id in (None, info.version.run)]
        usable = [info for info in ours if info.folder not in refused]
        damaged = self._damaged({info.folder for info in found}, usable[0].step if usable else 0)
        for folder, why in damaged.items():
            self._warn(folder, why)
        if usable:
            return usable[0].folder
        if found and not ours:
            raise CheckpointMismatch(
                f"the {len(found)} checkpoints are of run {found[0].version.run!r}, "
                f"this is run {self._run_id!r}",
                where=str(self._root),
                done="nothing was restored",
                advice="give the run its own folder, or use the id of the run that saved them",
            )
        if refused or damaged:
            raise CheckpointCorrupt(
                f"all {len(refused) + len(damaged)} checkpoints are damaged",
                where=str(self._root),
                done="nothing was restored and nothing was deleted",
                advice="see 'keepstep checkpoint verify'; to start anew give another folder",
            )
        return ""

    def _damaged(self, good: set[str], from_step: int) -> dict[str, str]:
        """Folders with a manifest, of ``from_step`` or newer, that the catalog does not offer."""
        result: dict[str, str] = {}
        for folder in catalog.published(self._root):
            name = layout.parse_folder(folder)
            if folder not in good and name is not None and name.step >= from_step:
                try:
                    catalog.load(self._root, folder)
                except (CheckpointError, OSError) as error:
                    result[folder] = str(error)
        return result

    def _warn(self, folder: str, why: str) -> None:
        if folder not in self._reported:
            self._reported.add(folder)
            warnings.warn(
                f"checkpoint {folder} cannot be used and an older one is tried: {why}",
                RuntimeWarning,
                stacklevel=3,
            )

    def latest(self) -> int:
        """Step of the newest committed checkpoint of this run; 0 if there is none."""
        info = catalog.newest(self._root, self._run_id)
        return 0 if info is None else info.step

    # --- the rest -----------------------------------------------------------------------------

    def _of_rank_0(self, rank: int, decide: Callable[[], T], kind: type[T]) -> T:
        """What ``decide`` returns (of type ``kind``) or raises on rank 0, on every rank."""
        if not _distributed():
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

    def close(self) -> None:
        """Finish the saves begun and end the writer process; later calls do nothing.

        Raises:
            SaveFailed: as ``finalize``; the process is ended all the same.
        """
        self._close(SAVE_LIMIT_S)

    def _close(self, limit_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        settled = False
        try:
            self.finalize(limit_s)
            settled = True
        finally:
            if self._session is not None:
                self._session.writer.close(abort=not settled)
                self._session = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            # The script's own error is the one to show; a save in flight still gets its chance.
            with contextlib.suppress(SaveFailed):
                self._close(EXIT_LIMIT_S)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the checkpointer is closed", advice="make a new one")


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if _distributed() else (0, 1)


def _settle(rank: int, error: Exception | None) -> str | None:
    """Tell the other ranks how it went: None if every rank can load, else what is damaged.

    Raises:
        Exception: this rank's error, if it is not damage.
        CheckpointError: another rank's, if it is not damage.
    """
    damaged = isinstance(error, CheckpointCorrupt | OSError)
    mine = _Verdict(ok=error is None, damaged=damaged, text="" if error is None else str(error))
    verdicts = [mine]
    if _distributed():
        heard = exchange.gather(msgspec.json.encode(mine))
        verdicts = [msgspec.json.decode(one, type=_Verdict) for one in heard]
    if error is not None and not damaged:
        raise error
    for other, verdict in enumerate(verdicts):
        if not verdict.ok and not verdict.damaged:
            raise CheckpointMismatch(
                f"rank {other} cannot restore: {verdict.text.rstrip('.')}",
                where=f"rank {rank}",
                done="nothing was restored",
            )
    return next((verdict.text for verdict in verdicts if verdict.damaged), None)


def _error(answer: _Said) -> KeepstepError:
    kind = getattr(errors, answer.error, None)
    if not (isinstance(kind, type) and issubclass(kind, KeepstepError)):
        kind = CheckpointError
    what, where, done, advice = answer.parts
    return kind(what, where=where, done=done, advice=advice)
