"""A main thread that waits runs Python code when it is woken, and only then."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

from keepstep.engines.nvrx import waking


def test_waking_does_nothing_before_it_is_installed() -> None:
    assert signal.getsignal(signal.SIGRTMIN + 4) is signal.SIG_DFL
    waking.wake()  # the signal's default would end this process


def test_a_main_thread_that_waits_runs_what_was_to_run_there() -> None:
    code = """
    import ctypes, threading
    from keepstep.engines.nvrx import waking

    ran = threading.Event()
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: ran.set() or 0)
    end = threading.Event()

    def other():
        # What NVRx does for its time stamp: it waits until Python code runs in the main thread.
        ctypes.pythonapi.Py_AddPendingCall(callback, None)
        while not ran.wait(0.05):
            waking.wake()
        end.set()

    waking.install()
    threading.Thread(target=other).start()
    assert end.wait(30), "the call never ran"
    """
    begun = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], timeout=60, capture_output=True, text=True
    )
    assert begun.returncode == 0, begun.stderr
