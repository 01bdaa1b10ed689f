"""Imports that NVRx's interruption meets: waited for if possible, noticed otherwise. In the rank.

An exception in the middle of an import takes the module back out of ``sys.modules``, but not the
parts of it that were imported by then. Every later import of it in this process fails: parts that
are there already are not bound to the new module ("partially initialized module").
"""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType

from keepstep.clock import SYSTEM

_MACHINERY = "<frozen importlib"
_MODULE = "<module>"
_TURN_S = 0.005


def wait_for_imports(outermost: CodeType, limit_s: float) -> bool:
    """Wait until the main thread imports nothing, ``limit_s`` seconds at most; another thread.

    Args:
        outermost: The function above which imports do not count.

    Returns:
        Whether it imports nothing now.
    """
    end = SYSTEM.mono() + limit_s
    while _importing(outermost):
        if SYSTEM.mono() >= end:
            return False
        SYSTEM.sleep(_TURN_S)
    return True


def _importing(outermost: CodeType) -> bool:
    main = threading.main_thread().ident or 0
    frame: FrameType | None = sys._current_frames().get(main)
    while frame is not None and frame.f_code is not outermost:
        if frame.f_code.co_filename.startswith(_MACHINERY):
            return True
        frame = frame.f_back
    return False


def cut_import(error: BaseException) -> bool:
    """Whether ``error`` came up through an import. Python takes most frames of its own machinery
    out of a traceback; those of the module stay."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == _MODULE or code.co_filename.startswith(_MACHINERY):
            return True
        trace = trace.tb_next
    return False
