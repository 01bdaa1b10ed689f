"""From a parked process to a running script: the main function of every rank's process.

Reached in two ways: called by the zygote after a fork, or as ``python -m keepstep.rank.bootstrap``.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import faulthandler
import importlib.util
import os
import runpy
import socket
import sys
import threading
import traceback
from collections.abc import Callable

from keepstep import linux
from keepstep.clock import SYSTEM
from keepstep.config import env
from keepstep.config.load import decode
from keepstep.rank.control import Control
from keepstep.rank.failure import describe
from keepstep.rank.runtime import Runtime, set_current
from keepstep.shm import Board, Phase
from keepstep.wire.channel import Channel, Closed
from keepstep.wire.messages import TO_RANK, Failed, Hello, Start
from keepstep.wire.types import STACK_SIGNAL, STORE_VARIABLE, stack_file


def serve(control_fd: int, board_fd: int) -> int:
    """Park until the agent names a rank, then run the script; returns the exit code."""
    channel: Channel[TO_RANK] = Channel(socket.socket(fileno=control_fd), TO_RANK, blocking=True)
    board = Board(board_fd)
    os.close(board_fd)
    try:
        channel.send(Hello(pid=os.getpid()))
        start = channel.receive()
    except Closed:
        return 0
    if not isinstance(start, Start):
        return 70
    env.apply({**start.env, linux.OWNER: str(os.getpid())})
    board.enter(Phase.START, SYSTEM.mono())
    if start.mode == "program":
        # The control socket stays open so that the agent sees one life from park to exit.
        os.set_inheritable(control_fd, True)
        os.execvp(start.target, [start.target, *start.args])
    runtime = Runtime(start, decode(start.config), Control(channel), board)
    runtime.store = env.read(STORE_VARIABLE)
    set_current(runtime)
    return run_script(runtime)


def run_script(runtime: Runtime) -> int:
    """Run the user's script as ``__main__``; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)
    _answer_stack_signal(runtime)
    runtime.control.start()
    _install_hooks(runtime)
    runtime.start_beating()
    runtime.enter(Phase.SCRIPT)
    code = _run(runtime)
    runtime.enter(Phase.EXIT)
    _exit_functions()
    return code


def _answer_stack_signal(runtime: Runtime) -> None:
    path = stack_file(runtime.run_dir, runtime.start.rank, runtime.start.inc)
    try:
        # Kept open for the life of the process: the handler writes to the descriptor.
        runtime.stack_file = path.open("w")
    except OSError:
        return  # the agent asks only ranks whose file is there
    faulthandler.register(STACK_SIGNAL, file=runtime.stack_file, all_threads=True)


def _install_hooks(runtime: Runtime) -> None:
    wanted = "torch" in runtime.config.rank.preload.split(",")
    if "torch" in sys.modules or (wanted and importlib.util.find_spec("torch")):
        from keepstep.rank import torch_private
        from keepstep.rank.hooks import StepHooks

        StepHooks(runtime).install()
        runtime.sequence_numbers = torch_private.sequence_numbers
        torch_private.wrap_init(runtime.accepts_init)


def _script(start: Start) -> Callable[[], object]:
    sys.argv = [start.target, *start.args]
    if start.mode == "module":
        return lambda: runpy.run_module(start.target, run_name="__main__", alter_sys=True)
    sys.path[0] = os.path.dirname(os.path.abspath(start.target))
    return lambda: runpy.run_path(start.target, run_name="__main__")


def _run(runtime: Runtime) -> int:
    try:
        _script(runtime.start)()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        sys.stderr.write(f"{stop.code}\n")
        return 1
    except BaseException as error:  # noqa: BLE001 - whatever ends the script is reported
        report(runtime, error)
        return 1
    return 0


def report(runtime: Runtime, error: BaseException) -> None:
    """Tell the agent about an exception that ends the script, and print it."""
    about = describe(error)
    runtime.control.send(
        Failed(
            inc=runtime.start.inc,
            round=runtime.recorder.round or 0,
            failure="exception",
            error=about.error,
            location=about.location,
            step=runtime.step,
            t=SYSTEM.mono(),
            stack=about.stack,
            fatal=about.fatal if about.kind == "usage" else 0,
            fresh=True,
        )
    )
    sys.stderr.write(about.shown or about.stack)


def _exit_functions() -> None:
    """What the interpreter does at its end; a forked child must not unwind into the zygote."""
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    try:
        atexit._run_exitfuncs()
    except Exception:  # noqa: BLE001 - a user's exit function; the process ends anyway
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def main() -> None:
    """Entry point of a spawned (not forked) parked process."""
    parser = argparse.ArgumentParser()
    for name in ("--control", "--board", "--parent"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    linux.die_with_parent(options.parent)
    code = serve(options.control, options.board)
    os._exit(code)


if __name__ == "__main__":
    main()
