"""Lets the main thread run some Python code although it waits for something. Runs in the rank.

NVRx does two things in the main thread that wait for the interpreter to run Python code there: it
raises its exception, and it takes the time stamp by which it tells a live rank from a hung one. A
thread that waits for a lock, sleeps or polls runs none, until a signal with a handler comes.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

_SIGNAL = signal.SIGRTMIN + 4


def install() -> None:
    """Make ``wake`` work; the main thread. For the life of the process: a late signal must find
    its handler, or it would end the process."""
    signal.signal(_SIGNAL, _awake)


def wake() -> None:
    """Let the main thread run Python code soon, if it waits in a way that a signal interrupts; any
    thread. Does nothing before ``install``."""
    main = threading.main_thread().ident
    if main is not None and signal.getsignal(_SIGNAL) is _awake:
        signal.pthread_kill(main, _SIGNAL)


def _awake(number: int, frame: FrameType | None) -> None:
    """Nothing to do: that Python code runs here is all."""
