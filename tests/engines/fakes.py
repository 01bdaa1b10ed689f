"""A rank of the launcher as far as engines ask for it, and a shard writer that only remembers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

from keepstep.config import CheckpointSettings, Config
from keepstep.events import EventData
from keepstep.ports import PendingWrite
from keepstep.shm import Phase
from keepstep.wire.types import Version


class FakeRuntime:
    """``Runtime`` without board, socket or process."""

    def __init__(self, root: Path) -> None:
        checkpoint = CheckpointSettings(dir=str(root))
        self.config = dataclasses.replace(Config(), checkpoint=checkpoint)
        self.start = SimpleNamespace(run="demo", rank=1, inc=0)
        self.run_dir = root / "run"
        self.control = SimpleNamespace(on_stop=None)
        self.recorder = self
        self.driven = False
        self.emitted: list[tuple[str, int | None]] = []
        self.data: list[EventData] = []
        self.phases: list[Phase] = []

    def emit(self, data: EventData, *, step: int | None = None) -> None:
        """As the recorder's."""
        self.emitted.append((data.kind, step))
        self.data.append(data)

    def enter(self, phase: Phase, label: str = "") -> None:
        """As the runtime's."""
        self.phases.append(phase)


class Pending:
    """A save that is done."""

    def staged(self) -> bool:
        """Implements ``ports.PendingWrite``."""
        return True

    def done(self) -> bool:
        """Implements ``ports.PendingWrite``."""
        return True

    def wait(self, timeout_s: float) -> None:
        """Implements ``ports.PendingWrite``."""


class FakeShardWriter:
    """Remembers what it is asked for; ``error`` is raised instead if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.last_bytes = 40
        self.begun: list[tuple[Version, Path]] = []
        self.loaded: list[Path] = []
        self._error = error

    def begin(self, state: Mapping[str, object], version: Version, folder: Path) -> PendingWrite:
        """Implements ``ports.ShardWriter``."""
        if self._error is not None:
            raise self._error
        self.begun.append((version, folder))
        return Pending()

    def load(self, state: Mapping[str, object], folder: Path) -> int:
        """Implements ``ports.ShardWriter``."""
        if self._error is not None:
            raise self._error
        self.loaded.append(folder)
        return 40
