"""Ranks' processes as the agent sees them: made parked, given a rank number, watched, gone."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep import shm
from keepstep.wire.channel import Channel, pair
from keepstep.wire.messages import FROM_RANK, Go, Spawn
from keepstep.wire.types import log_file


@dataclass(slots=True)
class RankProcess:
    """One process under the zygote.

    ``state``: forking, parked (said hello), rank, gone.
    """

    ticket: int
    channel: Channel[FROM_RANK]
    board: shm.Board
    logs: dict[int, Path]
    pid: int = 0
    state: str = "forking"
    rank: int = -1
    inc: int = -1
    round: int = 0
    ended_by_us: bool = False
    adopted: bool = False
    stepped_round: int = 0
    resumed_at: int = 0

    def note(self, body: object) -> None:
        """Remember what the coordinator tells this rank."""
        if isinstance(body, Go):
            self.resumed_at = body.resume

    def first_step_done(self) -> int:
        """The step, once, when the process has completed its first step of a round; else 0."""
        number = self.board.round if self.adopted else self.round
        done = self.board.done
        if number == self.stepped_round or not self.board.steps:
            return 0
        if self.adopted and done <= self.resumed_at:
            return 0
        self.stepped_round = number
        return done

    @property
    def lives(self) -> bool:
        """Whether the process has not been seen to end."""
        return self.state != "gone"


def make(ticket: int, logs: Path, zygote: Channel[Any]) -> RankProcess:
    """Ask the zygote for a parked process with its own control socket, board and log files."""
    ours, theirs = pair()
    board_fd = shm.create()
    paths = {
        1: logs / f"parked-{ticket:04d}.stdout.log",
        2: logs / f"parked-{ticket:04d}.stderr.log",
    }
    files = [_log(paths[stream]) for stream in (1, 2)]
    with theirs:
        zygote.send(Spawn(ticket=ticket), (theirs.fileno(), board_fd, *files))
    board = shm.Board(board_fd)
    for fd in (board_fd, *files):
        os.close(fd)
    channel: Channel[FROM_RANK] = Channel(ours, FROM_RANK, blocking=False)
    return RankProcess(ticket=ticket, channel=channel, board=board, logs=paths)


def _log(path: Path) -> int:
    """A new log file, open for appending; nowhere if the disk has no room for it."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_CREAT, 0o644)
    except OSError:
        return os.open(os.devnull, flags)


def name_logs(process: RankProcess, folder: Path) -> None:
    """Rename the log files after the rank and incarnation that the process has now."""
    for stream, name in ((1, "stdout"), (2, "stderr")):
        path = folder / log_file(process.rank, process.inc, name)
        with contextlib.suppress(OSError):  # a full disk costs the log, not the run
            os.replace(process.logs[stream], path)
            process.logs[stream] = path


def drop_parked_logs(process: RankProcess) -> None:
    """A process that never became a rank leaves no empty log files."""
    for path in process.logs.values():
        if path.name.startswith("parked-") and path.exists() and path.stat().st_size == 0:
            path.unlink()


def state_letter(pid: int) -> str:
    """State of the process as in /proc/PID/stat (R, S, D, T, t, Z); X if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return "X"
    return chr(stat[stat.rindex(b")") + 2])


def traced(pid: int) -> bool:
    """Whether a debugger is attached: hang detection is off then."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in lines)
