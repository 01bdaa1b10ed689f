"""NVRx's asynchronous checkpoints behind keepstep's seam. Runs in the ranks.

NVRx's files stay as NVRx writes them; keepstep copies what is to be saved, checks that the file has
just these bytes, and adds receipts and the manifest, without which the checkpoint does not exist.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from keepstep.checkpoint import torch_reader, typed_json
from keepstep.checkpoint.torch_state import flatten
from keepstep.clock import SYSTEM, Clock
from keepstep.engines.nvrx import library
from keepstep.engines.nvrx.dcp_writer import DcpWriting
from keepstep.engines.nvrx.library import Checkpointing
from keepstep.engines.nvrx.sealing import Follower, Guard, OnCommit, Save, Writing
from keepstep.engines.nvrx.staging import Staging
from keepstep.engines.nvrx.torch_writer import TorchWriting
from keepstep.errors import SaveFailed, UsageError
from keepstep.ports import PendingWrite
from keepstep.rank.checkpointer import Place
from keepstep.rank.local_writer import LocalWrite
from keepstep.wire.types import Version

Kind = Literal["torch", "dcp"]
"""``TorchAsyncCheckpoint``, or ``FileSystemWriterAsync`` with ``AsyncCallsQueue``."""

WRITE_LIMIT_S = 600.0
"""How long a save waits for NVRx to finish the one before."""
CLOSE_LIMIT_S = 600.0

_KINDS: dict[str, Callable[[Checkpointing, int], Writing]] = {
    "torch": TorchWriting,
    "dcp": DcpWriting,
}


def _unheard(version: Version, folder: str, nbytes: int, seconds: float) -> None:
    return None


class NvrxShardWriter:
    """Implements ``ports.ShardWriter``. Nothing is collective, and nothing needs polling.

    Args:
        kind: Which of NVRx's two ways to write.
        root: Folder of the checkpoints.
        rank: This rank; rank 0 commits. world: Number of ranks.
        keep_last: Committed checkpoints to keep; 0 or less keeps all.
        keep_every_steps: Also keep those of steps that are a multiple of it; 0: none.
        clock: Where time comes from.
        guard: Entered around each commit, on rank 0.
        on_commit: Told of each commit, on rank 0: version, folder, bytes, seconds since the copy.
        write_limit_s: How long ``begin`` waits for NVRx to finish the save before.
        nvrx: NVRx's names; None: those of the installed package.

    Attributes:
        slots: Saves that can be in work before the next one waits: NVRx writes one at a time.
        last_bytes: Bytes of the tensors copied last.
        last_copy_s: How long that copy took, in seconds.

    Raises:
        EngineUnavailable: NVRx is not installed.
        UsageError: there is no such kind.
    """

    slots = 1

    def __init__(
        self,
        kind: Kind,
        root: Path,
        *,
        rank: int,
        world: int,
        keep_last: int,
        keep_every_steps: int = 0,
        clock: Clock = SYSTEM,
        guard: Guard = contextlib.nullcontext,
        on_commit: OnCommit = _unheard,
        write_limit_s: float = WRITE_LIMIT_S,
        nvrx: Checkpointing | None = None,
    ) -> None:
        if kind not in _KINDS:
            raise UsageError(
                f"NVRx has no checkpoint of kind {kind!r}", advice='choose "torch" or "dcp"'
            )
        self._root = root
        self._rank = rank
        self._world = world
        self._clock = clock
        self._limit_s = write_limit_s
        self._staging = Staging()
        self._writing = _KINDS[kind](nvrx or library.checkpointing(), rank)
        self._follower = Follower(
            self._writing,
            root,
            rank=rank,
            keep_last=keep_last,
            keep_every_steps=keep_every_steps,
            clock=clock,
            guard=guard,
            on_commit=on_commit,
        )
        self._begun = False
        self._closed = False
        self.last_bytes = 0
        self.last_copy_s = 0.0

    @property
    def worker_pid(self) -> int | None:
        """Process id of NVRx's worker; None if none was started."""
        return self._writing.calls.pid

    def begin(self, state: Mapping[str, object], version: Version, folder: Path) -> PendingWrite:
        """Copy ``state`` as it is now and have NVRx write it; returns once the state may change.

        NVRx finalizes the save before first.

        Args:
            state: What to save, by name; see ``torch_state.flatten``.
            version: What the file belongs to.
            folder: Root of the checkpoints; not used, the writer was made for it.

        Raises:
            CheckpointError: something in ``state`` cannot be kept; the message names it.
            SaveFailed: the save before is not written yet.
            UsageError: the writer is closed.
        """
        if self._closed:
            raise UsageError("the checkpoint writer is closed", advice="make a new one")
        if not self._follower.wait_free(self._limit_s):
            raise SaveFailed(
                f"NVRx has not written the save before in {self._limit_s:g} s",
                where=f"rank {self._rank}, its worker is process {self.worker_pid}",
                done=f"step {version.step} was not saved",
                advice="storage is slower than the saves, or the worker is stuck: save less often",
            )
        snapshot = flatten(state, rank=self._rank, world=self._world)
        began = self._clock.mono()
        staged = self._staging.copy(snapshot)
        values = _frozen(snapshot.values)
        copied = self._clock.mono()
        self.last_copy_s, self.last_bytes = copied - began, staged.nbytes
        pending = LocalWrite(version, self._rank, self._root, self._clock)
        if not self._begun:
            # Without close, Python would wait for NVRx's worker for ever at its end.
            atexit.register(self._follower.stop)
            self._begun = True
        self._follower.submit(
            Save(
                version=version,
                staged=staged,
                values=values,
                pending=pending,
                began=copied,
            )
        )
        return pending

    def load(self, state: Mapping[str, object], folder: Path) -> int:
        """Fill ``state`` in place from the committed checkpoint ``folder``; returns bytes read.

        Raises:
            CheckpointCorrupt: bytes differ from what was committed; nothing was changed.
            CheckpointMismatch: it is another model's; nothing was changed.
        """
        report = torch_reader.load(
            state, folder.parent, folder.name, rank=self._rank, world=self._world
        )
        return report.bytes

    def close(self, *, abort: bool = False) -> None:
        """End NVRx's worker and give the memory back.

        Without ``abort`` the saves begun are waited for; with it they are dropped and the worker is
        killed at once.
        """
        if self._closed:
            return
        self._closed = True
        if not abort:
            self._follower.wait_settled(CLOSE_LIMIT_S)
        self._follower.stop()
        atexit.unregister(self._follower.stop)
        self._staging.close()


def _frozen(values: Mapping[str, object]) -> dict[str, object]:
    """A copy of ``values`` that later changes of the live objects do not reach."""
    return {
        key: typed_json.decode(typed_json.encode(value, key), key) for key, value in values.items()
    }


def writer_factory(
    kind: Kind = "torch", *, guard: Guard | None = None, on_commit: OnCommit | None = None
) -> Callable[[Place], NvrxShardWriter]:
    """Makes writers of ``kind`` for a ``Checkpointer``.

    Args:
        kind: Which of NVRx's two ways to write.
        guard: Entered around each commit, on rank 0.
        on_commit: Told of each commit, on rank 0; None: whom the place names.

    Raises:
        EngineUnavailable: NVRx is not installed.
    """
    nvrx = library.checkpointing()

    def make(place: Place) -> NvrxShardWriter:
        return NvrxShardWriter(
            kind,
            place.root,
            rank=place.rank,
            world=place.world,
            keep_last=place.keep_last,
            keep_every_steps=place.keep_every_steps,
            clock=place.clock,
            guard=guard or contextlib.nullcontext,
            on_commit=on_commit or place.on_commit,
            nvrx=nvrx,
        )

    return make
