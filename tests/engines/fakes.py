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


class FakeControl:
    """What a rank is answered: nothing, unless it stands in ``answers`` by round and step."""

    def __init__(self) -> None:
        self.on_stop: object = None
        self.sent: list[object] = []
        self.answers: dict[tuple[int, int], str] = {}

    def send(self, message: object) -> None:
        """As the control's."""
        self.sent.append(message)

    def wait_answer(self, round: int, step: int) -> str | None:
        """As the control's; None: the round is aborted."""
        return self.answers.get((round, step))


class FakeRuntime:
    """``Runtime`` without board, socket or process."""

    def __init__(self, root: Path) -> None:
        checkpoint = CheckpointSettings(dir=str(root))
        self.config = dataclasses.replace(Config(), checkpoint=checkpoint)
        self.start = SimpleNamespace(run="demo", rank=1, inc=0)
        self.run_dir = root / "run"
        self.control = FakeControl()
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
        self.prepared: list[tuple[int, int]] = []
        self.settled = self.mutated = 0
        self._error = error

    def size_of(self, state: Mapping[str, object]) -> int:
        """As the native writer's."""
        return 40

    def prepare(self, size: int, slots: int) -> None:
        """As the native writer's."""
        self.prepared.append((size, slots))

    def settle(self) -> None:
        """As the native writer's."""
        self.settled += 1

    def mutates(self) -> None:
        """As the native writer's."""
        self.mutated += 1

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
