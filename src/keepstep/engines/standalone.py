"""The native engine without launcher: a plain ``python`` or ``torchrun`` script.

Saving works (each rank has its own writer process); there is nobody to restart, so an exception
ends the script as it always did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, TypeVar

from keepstep.config import Config, env
from keepstep.engines import Engine, Saver, WhenBusy
from keepstep.errors import UsageError
from keepstep.ports import Restarter
from keepstep.rank.checkpointer import Checkpointer, WriterFactory, native_writer
from keepstep.rank.plain_group import PlainGroup
from keepstep.rank.progress import NoProgress
from keepstep.rank.save import Save
from keepstep.wire.types import World

T = TypeVar("T")


def chosen_writer(
    engine: str,
    kind: Literal["torch", "dcp"] = "torch",
    guard: Callable[[], AbstractContextManager[None]] | None = None,
) -> WriterFactory:
    """What makes the shard writers of ``engine``.

    Args:
        engine: native or nvrx. kind: which of NVRx's two. guard: entered around NVRx's commits.

    Raises:
        EngineUnavailable: the engine's package is not installed.
        UsageError: there is no such engine.
    """
    if engine == "native":
        return native_writer
    if engine == "nvrx":
        from keepstep.engines.nvrx.shards import writer_factory

        return writer_factory(kind, guard=guard) if guard else writer_factory(kind)
    raise UsageError(f"there is no engine {engine!r}", advice='choose "native" or "nvrx"')


class StandaloneEngine(Engine):
    """One attempt, in the world that the environment describes."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.progress = NoProgress()
        self._checkpointer: Checkpointer | None = None

    def restarter(self, saving: Callable[[], int]) -> Restarter:
        """Calls the attempt once."""
        return Once(self._config)

    def saver(self, world: World) -> Saver:
        """Saves with a writer process of this rank, keepstep's or NVRx's.

        Raises:
            EngineUnavailable: NVRx is chosen and not installed.
        """
        root = self._config.checkpoint.dir or str(
            Path(self._config.run.dir or "runs/plain") / "checkpoints"
        )
        settings = self._config.checkpoint
        self._checkpointer = Checkpointer(
            root,
            keep_last=settings.keep_last,
            keep_every_steps=settings.keep_every_steps,
            copy=settings.copy,
            check_copy=settings.check_copy,
            when_busy=settings.when_busy,
            retries=settings.retries,
            slots=settings.slots,
            resume_from=settings.resume_from or None,
            writer=chosen_writer(
                self._config.engine.parts.checkpoint, self._config.nvrx.checkpoint
            ),
        )
        return StandaloneSaver(self._checkpointer)

    def close(self) -> None:
        """Wait for the last save, then end the writer.

        While an exception of the script is under way a save in flight gets only a short time, and
        its failure does not hide that exception.

        Raises:
            SaveFailed: the last save did not commit; the writer is ended all the same.
        """
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is None:
            return
        try:
            if sys.exc_info()[0] is None:
                checkpointer.finalize(self._config.checkpoint.write_limit_s)
        finally:
            checkpointer.__exit__(*sys.exc_info())


class StandaloneSaver:
    """Implements ``engines.Saver`` with a ``Checkpointer``."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer

    def prepare(self, state: dict[str, object]) -> None:
        """Make the memory for saves."""
        self._checkpointer.prepare(state)

    def expect(self, step: int) -> None:
        """The ranks decide when the save comes."""

    def mutates(self) -> None:
        """Return once the state may be changed by other means than an optimizer's step."""
        self._checkpointer.mutates()

    def save(self, state: dict[str, object], step: int, when_busy: WhenBusy = "wait") -> Save:
        """Copy ``state`` and write it in the background, or skip that on all ranks."""
        return self._checkpointer.async_save(state, step, when_busy=when_busy)

    def load(self, state: dict[str, object], *, strict: bool = True) -> int:
        """Load the newest committed checkpoint, if there is one."""
        return self._checkpointer.restore(state, strict=strict)

    def poll(self) -> None:
        """A step was completed."""
        self._checkpointer.poll()

    def finish(self, timeout_s: float) -> None:
        """Wait for the saves begun, while the ranks can still talk to each other.

        Raises:
            SaveFailed: one failed, or is not committed after ``timeout_s`` seconds.
        """
        self._checkpointer.finalize(timeout_s)


class Once:
    """Implements ``ports.Restarter`` by calling the attempt once."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def run(self, attempt: Callable[[World], T]) -> T:
        """Initialise the process group if the environment names a world, and call ``attempt``."""
        settings = self._config.restart
        with PlainGroup(env.snapshot(), settings.backend, settings.pg_timeout_s) as world:
            return attempt(world)
