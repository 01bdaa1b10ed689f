"""A save whose copy may be in progress, and who is told how the copy went. Runs in the rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from keepstep.clock import Clock
from keepstep.errors import SaveFailed
from keepstep.policy.copying import Mode
from keepstep.ports import PendingWrite
from keepstep.wire.types import Version


@dataclass(frozen=True, slots=True)
class Copied:
    """What the copy of one save was like; times in seconds.

    ``boundary_s`` training stood still at the call, ``waited_s`` an optimizer waited for the copy,
    ``copy_s`` from the call until the copy was complete.
    """

    version: Version
    mode: Mode
    reason: str
    bytes: int
    boundary_s: float
    copy_s: float
    waited_s: float


def _ignore(*_: object) -> None:
    return None


def _always(_: Version) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class CopyWatch:
    """Who is told about copies; called by any thread.

    ``copied`` of each copy that was handed on, ``failed`` of each that was not. ``trusted`` is
    asked once a copy from a GPU is complete: False if its round was aborted meanwhile. Kernels that
    were cut short leave anything behind, so such a copy is not handed on.
    """

    copied: Callable[[Copied], object] = _ignore
    failed: Callable[[Version, SaveFailed], object] = _ignore
    trusted: Callable[[Version], bool] = _always


class CopiedWrite:
    """A save whose copy may be in progress; implements ``ports.PendingWrite``."""

    def __init__(self, version: Version, call_off: Callable[[], object], clock: Clock) -> None:
        self.version = version
        self._call_off = call_off
        self._clock = clock
        self._copied = threading.Event()
        self._settled = threading.Event()
        self._error: SaveFailed | None = None
        self._inner: PendingWrite | None = None

    def complete(self) -> None:
        """The copy is complete: the state may change."""
        self._copied.set()

    def handed_on(self, inner: PendingWrite) -> None:
        """Storage has it now; ``inner`` is the rest of the save."""
        self._inner = inner
        self._settled.set()

    def failed(self, error: SaveFailed) -> None:
        """It will never be committed; a copy in progress is called off."""
        self._error = self._error or error
        if self._inner is None:
            self._call_off()
        elif hasattr(self._inner, "failed"):
            self._inner.failed(error)

    def give_up(self, error: SaveFailed) -> None:
        """The copy is over and leads to nothing."""
        self._error = self._error or error
        self._copied.set()
        self._settled.set()

    def staged(self) -> bool:
        """Whether the state may change again."""
        return self._copied.is_set()

    def wait_staged(self) -> None:
        """Return when the state may change again."""
        self._copied.wait()

    def settle(self) -> None:
        """Return when the copy is handed on or has failed."""
        self._settled.wait()

    def done(self) -> bool:
        """Whether it is committed or has failed."""
        if not self._settled.is_set():
            return False
        return self._inner is None or self._inner.done()

    def wait(self, timeout_s: float) -> None:
        """Return when committed.

        Raises:
            SaveFailed: it failed, or is not committed after ``timeout_s`` seconds.
        """
        deadline = self._clock.mono() + timeout_s
        if not self._settled.wait(timeout_s):
            raise SaveFailed(
                f"the state of step {self.version.step} is not copied after {timeout_s:g} s",
                done="it goes on in the background",
                advice="look at the load of the machine",
            )
        if self._error is not None:
            raise self._error
        assert self._inner is not None
        self._inner.wait(max(0.0, deadline - self._clock.mono()))

    @property
    def writing(self) -> bool:
        """Whether this rank has still to do something for it."""
        if not self._settled.is_set():
            return True
        return self._inner is not None and bool(
            getattr(self._inner, "writing", not self._inner.done())
        )

    @property
    def error(self) -> SaveFailed | None:
        """Why it will never be committed, as far as this rank knows."""
        return self._error or getattr(self._inner, "error", None)
