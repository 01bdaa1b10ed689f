"""One selector over bare descriptors: the observer's loop waits in it."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Callable


class Waiter:
    """Calls a function for each descriptor that can be read."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)

    def add(self, fd: int, ready: Callable[[], None]) -> None:
        """Call ``ready`` whenever ``fd`` can be read."""
        self._selector.register(fd, selectors.EVENT_READ, ready)

    def remove(self, fd: int) -> None:
        """Watch ``fd`` no longer; it is not closed."""
        self._selector.unregister(fd)

    def wake(self) -> None:
        """Let ``turn`` return soon; any thread, and signal handlers."""
        with contextlib.suppress(BlockingIOError):  # enough wake-ups wait already
            if self._wake_write >= 0:
                os.write(self._wake_write, b"x")

    def _woken(self) -> None:
        os.read(self._wake_read, 4096)

    def turn(self, timeout_s: float) -> None:
        """Serve what is ready; waits at most ``timeout_s`` seconds."""
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def close(self) -> None:
        """Release the selector and the pipe; the descriptors stay open. A signal that comes after
        this wakes nobody."""
        wake_write, self._wake_write = self._wake_write, -1
        self._selector.close()
        os.close(self._wake_read)
        os.close(wake_write)
