"""Engines: who supplies restart, saving and heartbeat. ``choose`` picks one by setting."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Literal, Protocol

from keepstep.config import Config
from keepstep.ports import Restarter
from keepstep.rank.progress import Progress
from keepstep.rank.runtime import Runtime
from keepstep.rank.save import Save
from keepstep.wire.types import World

WhenBusy = Literal["skip", "wait"]
"""What becomes of a save for which there is no staging copy: it is skipped, or waits for one."""


class Ahead(Protocol):
    """What a saver is told before a save."""

    def prepare(self, state: dict[str, object]) -> None:
        """Saves of ``state`` will come: make the memory for them, in the background."""

    def expect(self, step: int) -> None:
        """A save that may be skipped is due at the end of ``step``, which begins now."""

    def mutates(self) -> None:
        """Return once the state may be changed by other means than an optimizer's step."""


class Saver(Ahead, Protocol):
    """Saves and loads a job's state in one round."""

    def save(self, state: dict[str, object], step: int, when_busy: WhenBusy = "wait") -> Save:
        """Copy ``state`` and write it in the background, or skip that.

        Raises:
            NotEnoughMemory: the copy does not fit into memory.
        """

    def load(self, state: dict[str, object], *, strict: bool = True) -> int:
        """Fill ``state`` in place; returns the step it belongs to (0: nothing to load).

        Without ``strict`` what only one side has keeps its value or is not read, with a warning.
        """

    def poll(self) -> None:
        """A step was completed; called on every rank at the same step.

        Raises:
            NotEnoughMemory: what ``prepare`` began has failed.
        """

    def finish(self, timeout_s: float) -> None:
        """``main`` has returned or stopped on notice: wait for the saves begun.

        Where the coordinator waits for them it does nothing.

        Raises:
            SaveFailed: the last one failed, or is not committed after ``timeout_s`` seconds.
        """


class Engine(abc.ABC):
    """What ``keepstep.run`` needs from an engine."""

    progress: Progress
    """Where jobs report to."""

    @property
    def exit_code(self) -> int:
        """What the process must end with after the run."""
        return 0

    @abc.abstractmethod
    def restarter(self, saving: Callable[[], int]) -> Restarter:
        """Calls the attempt once a round; ``saving`` gives the step of the last save asked for."""

    @abc.abstractmethod
    def saver(self, world: World) -> Saver:
        """Saving and loading in the round of ``world``."""

    @abc.abstractmethod
    def close(self) -> None:
        """End threads and processes that the engine started."""


def choose(config: Config, runtime: Runtime | None) -> Engine:
    """The engine that ``config`` names, for a rank of ``keepstep run`` or a plain script.

    Raises:
        EngineUnavailable: its package is missing.
    """
    parts = config.engine.parts
    if runtime is None:
        from keepstep.engines.standalone import StandaloneEngine

        return StandaloneEngine(config)
    if parts.restart == "native":
        from keepstep.engines.native import NativeEngine

        return NativeEngine(config, runtime)
    from keepstep.engines.nvrx.engine import NvrxEngine

    return NvrxEngine(config, runtime)
