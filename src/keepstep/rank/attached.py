"""A rank of another launcher (NVRx's ``ft_launcher``) under a watching ``keepstep run``.

Run by that launcher as ``python -m keepstep.rank.attached [ARGUMENTS...]``: it takes the board that
``keepstep run`` has for its local rank, sends its output to the run's logs, and runs the script. It
has no control channel: nobody can tell it anything but by the board's stop word.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, cast

import msgspec

from keepstep import events, linux
from keepstep.clock import SYSTEM
from keepstep.config import env
from keepstep.config.load import decode
from keepstep.errors import UsageError
from keepstep.rank.bootstrap import run_script
from keepstep.rank.control import Control
from keepstep.rank.runtime import Runtime, set_current
from keepstep.shm import Board, Phase
from keepstep.wire.messages import FROM_RANK, Attach, Failed, Start
from keepstep.wire.types import ATTACH_VARIABLE, log_file


class Detached(Control):
    """Stands where a native rank has its control channel; nobody is at the other end."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None))
        self.recorder: events.Recorder | None = None

    def start(self) -> None:
        """Nothing is received."""

    def send(self, message: FROM_RANK) -> None:
        """A failure becomes an event, which the watching process reads; the rest is dropped."""
        if isinstance(message, Failed) and self.recorder is not None:
            self.recorder.emit(failure_event(message), step=message.step)


def failure_event(failed: Failed) -> events.RankFailed:
    """The event that tells a watching process what a coordinator would be told."""
    return events.RankFailed(
        failure=failed.failure,
        error=failed.error,
        location=failed.location,
        stack=failed.stack,
        fatal=failed.fatal,
        fresh=failed.fresh,
        seqs=failed.seqs,
    )


def attach(arguments: list[str]) -> Runtime:
    """Become the rank that the launcher's environment names.

    Raises:
        UsageError: this process was not started below ``keepstep run``.
    """
    text = env.read(ATTACH_VARIABLE)
    try:
        told = msgspec.json.decode(text, type=Attach)
        number = {name: int(env.read(name)) for name in _NUMBERS}
        fd = os.open(told.boards[number["LOCAL_RANK"]], os.O_RDWR | os.O_CLOEXEC)
    except (msgspec.DecodeError, ValueError, IndexError, OSError) as error:
        raise UsageError(
            f"this process cannot be a rank of keepstep run: {error}",
            done="nothing was run",
            advice="start the script with keepstep run --engine nvrx",
        ) from error
    board = Board(fd)
    os.close(fd)
    incarnation = board.take(os.getpid())
    board.enter(Phase.START, SYSTEM.mono())
    start = Start(
        run=told.run,
        rank=number["RANK"],
        local_rank=number["LOCAL_RANK"],
        world=number["WORLD_SIZE"],
        local_world=number["LOCAL_WORLD_SIZE"],
        node=told.node,
        inc=incarnation,
        round=0,
        env={},
        mode=told.mode,
        target=told.target,
        args=arguments,
        config=told.config,
        run_dir=told.run_dir,
    )
    _redirect(Path(told.log_dir), start.rank, incarnation)
    control = Detached()
    runtime = Runtime(start, decode(told.config), control, board)
    control.recorder = runtime.recorder
    runtime.store = told.store
    set_current(runtime)
    return runtime


_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def _redirect(folder: Path, rank: int, incarnation: int) -> None:
    for stream, name in ((1, "stdout"), (2, "stderr")):
        path = folder / log_file(rank, incarnation, name)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o644)
        except OSError:
            continue  # a full disk costs the log, not the run
        os.dup2(fd, stream)
        os.close(fd)


def main() -> None:
    """Entry point. Leaves by ``os._exit`` as every rank does: torch with gloo can abort a process
    that ends in the interpreter's own way."""
    try:
        runtime = attach(sys.argv[1:])
    except UsageError as error:
        sys.stderr.write(f"keepstep: {error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)
    env.update({linux.OWNER: str(os.getpid())})
    os._exit(run_script(runtime))


if __name__ == "__main__":
    main()
