"""A thread that publishes manifests: storage may be slow or frozen, the coordinator must not be.

It also applies retention, only after a newer commit is durable.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from keepstep.checkpoint.commit import commit, not_published
from keepstep.checkpoint.lease import check
from keepstep.checkpoint.retention import Keep, apply, sweep
from keepstep.coordinator.saves import Ready
from keepstep.errors import KeepstepError
from keepstep.wire.types import Version

Done = tuple[Version, str]


class Committer:
    """Commits what is put in; results are taken out by the coordinator's loop.

    Args:
        root: Folder of the checkpoints. keep: commits to keep.
        wake: Called from the thread when a result is there.
        terms: Where the run's rounds are written down; None: beside ``root``.
        lease: Number under which ``root`` is held; once it is lost nothing is committed any more.
    """

    def __init__(
        self,
        root: Path,
        keep: Keep,
        wake: Callable[[], None],
        terms: Path | None = None,
        lease: int = 0,
    ) -> None:
        self._root = root
        self._lease = lease
        self._keep = keep
        self._terms = terms
        self._wake = wake
        self.at: tuple[int, int] | None = None
        """The commit in progress: which one it is, counted from 1, and its step."""
        self._begun = 0
        self._todo: queue.SimpleQueue[Ready | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="keepstep-commit", daemon=True)
        self._thread.start()

    def put(self, ready: Ready) -> None:
        """Publish this version's manifest."""
        self._todo.put(ready)

    def take(self) -> list[Done]:
        """Versions that were committed, with an error or an empty text."""
        taken: list[Done] = []
        while not self._done.empty():
            taken.append(self._done.get())
        return taken

    def close(self) -> None:
        """Finish what is queued."""
        self._todo.put(None)
        self._thread.join(timeout=30.0)

    def _run(self) -> None:
        while (ready := self._todo.get()) is not None:
            error = ""
            self._begun += 1
            self.at = (self._begun, ready.version.step)
            try:
                check(self._root, self._lease)
                commit(self._root, ready.folder, ready.version)
            except KeepstepError as problem:
                error = str(problem)
            except OSError as problem:
                error = not_published(problem, self._root / ready.folder)
            self.at = None
            self._done.put((ready.version, error))
            self._wake()
            if not error:
                self._retain(ready)

    def _retain(self, ready: Ready) -> None:
        # An old folder that cannot be removed costs space, not safety; the next commit tries again
        # and `keepstep checkpoint ls` shows it.
        with contextlib.suppress(OSError, KeepstepError):
            apply(self._root, self._keep, ready.version, exclude=ready.in_flight, terms=self._terms)
            sweep(self._root, exclude=ready.in_flight)
