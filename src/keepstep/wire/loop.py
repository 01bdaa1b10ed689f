"""One thread, one selector, many channels: the main loop of agent, coordinator and zygote."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keepstep.wire.channel import Channel, Closed


@dataclass(frozen=True, slots=True)
class _Served:
    channel: Channel[Any]
    handler: Callable[[Any], None]
    lost: Callable[[], None]


class Loop:
    """Serves non-blocking channels; a frozen peer holds up nobody else."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)

    @property
    def wake_fd(self) -> int:
        """Write end of the wake-up pipe, for ``signal.set_wakeup_fd``."""
        return self._wake_write

    def wake(self) -> None:
        """Let ``turn`` return soon; any thread, and signal handlers."""
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            return  # enough wake-ups wait already

    def add(
        self, channel: Channel[Any], handler: Callable[[Any], None], lost: Callable[[], None]
    ) -> None:
        """Call ``handler`` for each message, and ``lost`` once when the other end is gone."""
        served = _Served(channel, handler, lost)
        self._selector.register(channel, selectors.EVENT_READ, served)

    def remove(self, channel: Channel[Any]) -> None:
        """Serve ``channel`` no longer; it is not closed."""
        try:
            self._selector.unregister(channel)
        except (KeyError, ValueError):
            return  # it was removed before

    def turn(self, timeout_s: float | None) -> None:
        """Serve what is ready; waits at most ``timeout_s`` seconds (None: until something is)."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                write = selectors.EVENT_WRITE if key.data.channel.wants_write else 0
                if key.events != selectors.EVENT_READ | write:
                    self._selector.modify(key.fileobj, selectors.EVENT_READ | write, key.data)
        for key, mask in self._selector.select(timeout_s):
            if key.data is None:
                os.read(self._wake_read, 4096)
            elif key.data.channel.fileno() >= 0:
                self._serve(key.data, mask)

    def _serve(self, served: _Served, mask: int) -> None:
        channel = served.channel
        if mask & selectors.EVENT_WRITE:
            # What the peer sent before it went can still be read; reading says when it ends.
            with contextlib.suppress(Closed):
                channel.flush()
        alive = not mask & selectors.EVENT_READ or channel.read()
        for message in channel.messages():
            with contextlib.suppress(Closed):  # of another channel, which tells of its own end
                served.handler(message)
        if not alive:
            self.remove(channel)
            served.lost()

    def close(self) -> None:
        """Release the selector and the pipe; channels stay open."""
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
