"""The node's boards and the processes that take them, one after the other.

Nobody tells the observer that a rank was started: a new process shows itself by taking the board of
its local rank. Its end is seen by a pidfd, its events come out of the board's ring. Part of the
observer's one thread; every method returns at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from keepstep import linux
from keepstep.agent.files import EventFiles
from keepstep.agent.launch_spec import Launch
from keepstep.agent.observe.waiter import Waiter
from keepstep.agent.tail import Tails
from keepstep.clock import SYSTEM
from keepstep.events import Event
from keepstep.faults import cgroup
from keepstep.shm import Board, Phase
from keepstep.wire.types import ATTACH_VARIABLE, log_file

_STRAYS_S = 1.0
"""What left its rank's session gets so long after its death: NVRx's monitor tells the others."""
_CODE_S = 1.0
"""How long the launcher may take to name an exit code that was not seen."""


@dataclass(slots=True)
class Occupant:
    """A process that took a board: a rank. Has what ``agent.hangs.Watched`` names."""

    ticket: int
    rank: int
    inc: int
    pid: int
    board: Board
    file: str
    logs: dict[int, Path]
    """Log files by stream that are not followed yet."""
    adopted: bool = False
    resumed_at: int = 0
    pidfd: int = -1
    exited: bool = False
    code: int | None = None
    """How it ended; None while it lives, or where only the launcher saw it."""
    oom: bool = False
    gone_at: float = 0.0
    seq: int = 0
    step: int = 0
    progress: float = 0.0
    phase: Phase = Phase.PARKED
    round: int = 0
    """What its board showed last: step, time of the last progress, phase and round."""
    far: bool = False
    """Whether it runs on another node, which watches it; the board shows nothing then."""


class Started(NamedTuple):
    """A process took a board."""

    who: Occupant


class Told(NamedTuple):
    """A rank wrote an event."""

    who: Occupant
    event: Event


class Ended(NamedTuple):
    """A rank's process ended. ``seen``: its exit code is known."""

    who: Occupant
    code: int
    seen: bool


class Gone(NamedTuple):
    """A rank's process ended, and only the launcher may know how; ``Ended`` follows."""

    who: Occupant


Seen = Started | Told | Gone | Ended


@dataclass(slots=True)
class _Seat:
    local: int
    board: Board
    who: Occupant | None = None
    key: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class _Strays:
    """What a rank that died at ``uptime_s`` may have left outside its session; to be ended at
    ``at``."""

    at: float
    variables: dict[str, str]
    uptime_s: float


class Seats:
    """All boards of the node.

    Args:
        spec: What is launched. boards: by local rank. waiter, files, tails: the observer's.
        attach: The value of ``ATTACH_VARIABLE``, by which this run's processes are known.
        codes: Exit codes that the launcher named, by process.
    """

    def __init__(
        self,
        spec: Launch,
        boards: list[Board],
        waiter: Waiter,
        files: EventFiles,
        tails: Tails,
        attach: str,
        codes: dict[int, int],
    ) -> None:
        self._spec = spec
        self._waiter = waiter
        self._files = files
        self._tails = tails
        self._attach = attach
        self._codes = codes
        self._seats = [_Seat(local, board) for local, board in enumerate(boards)]
        self._tickets = 0
        self._unsure: list[Occupant] = []
        self._strays: list[_Strays] = []
        self._decoder = msgspec.json.Decoder(Event)
        # An earlier launch may have used the same names.
        self._sizes = {path: path.stat().st_size for path in spec.log_dir.glob("rank-*.log")}
        self.last: dict[int, Occupant] = {}
        """By rank, the newest process."""

    @property
    def living(self) -> list[Occupant]:
        """Ranks whose process has not been seen to end, by rank."""
        found = [seat.who for seat in self._seats if seat.who is not None and not seat.who.exited]
        return sorted(found, key=lambda who: who.rank)

    # --- looking ----------------------------------------------------------------------------------

    def look(self, now: float) -> list[Seen]:
        """Everything that happened since the last call, in the order in which it happened."""
        found: list[tuple[float, Seen]] = []
        for seat in self._seats:
            found += _in_order(list(self._look(seat, now)))
        found += self._sure(now)
        found.sort(key=lambda one: one[0])
        self._follow_logs()
        self._end_strays(now)
        return [seen for _, seen in found]

    def _look(self, seat: _Seat, now: float) -> Iterator[tuple[float, Seen]]:
        lines = seat.board.take_lines()  # before the key: no line is of a process not known yet
        key = (seat.board.pid, seat.board.incarnation)
        told = [(line, self._decode(line)) for line in lines]
        who = seat.who
        split = len(told)
        if key != seat.key and key[0]:
            split = 0 if who is None or who.gone_at else _first_of_next(told, who.seq)
        if who is not None:
            yield from self._lines(who, told[:split], now)
            if not who.exited and key != seat.key and key[0]:
                who.exited, who.code = True, linux.exit_code(who.pid)
            if key == seat.key and not who.gone_at:
                _note(who)
            if who.exited and not who.gone_at:
                yield from self._ended(who, now)
        if key != seat.key and key[0]:
            seat.key = key
            seat.who = who = self._start(seat)
            first = next((event.mono for _, event in told[split:] if event is not None), now)
            yield min(first, now), Started(who)
            yield from self._lines(who, told[split:], now)

    def _decode(self, line: bytes) -> Event | None:
        try:
            return self._decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def _lines(
        self, who: Occupant, told: list[tuple[bytes, Event | None]], now: float
    ) -> Iterator[tuple[float, Seen]]:
        if told:
            self._files.append(who.file, [line for line, _ in told])
        for _, event in told:
            if event is not None:
                who.seq = event.seq
                yield min(event.mono, now), Told(who, event)

    def _start(self, seat: _Seat) -> Occupant:
        pid, inc = seat.key
        self._tickets += 1
        named = linux.started_with(pid, "RANK")
        spec = self._spec
        rank = int(named) if named.isdecimal() else (spec.node_rank or 0) * spec.nproc + seat.local
        who = Occupant(
            ticket=self._tickets,
            rank=rank,
            inc=inc,
            pid=pid,
            board=seat.board,
            file=f"rank-{rank:05d}-{int(SYSTEM.wall())}-{pid}.jsonl",
            logs=self._logs(seat.local, rank, inc),
        )
        self.last[rank] = who
        try:
            who.pidfd = os.pidfd_open(pid)
        except OSError:
            who.exited = True  # it has ended already, and the launcher has waited for it
            return who
        self._waiter.add(who.pidfd, lambda: self._exited(who))
        return who

    def _exited(self, who: Occupant) -> None:
        """Its pidfd can be read: look for its exit code before the launcher takes it away."""
        who.code = linux.exit_code(who.pid)
        who.exited = True
        self._drop_pidfd(who)

    def _drop_pidfd(self, who: Occupant) -> None:
        if who.pidfd >= 0:
            self._waiter.remove(who.pidfd)
            os.close(who.pidfd)
            who.pidfd = -1

    # --- ends -------------------------------------------------------------------------------------

    def _ended(self, who: Occupant, now: float) -> Iterator[tuple[float, Seen]]:
        who.gone_at = now
        self._drop_pidfd(who)
        self._follow_logs()
        who.logs.clear()
        self._tails.end(who.ticket)
        self._files.finish(who.file)
        linux.end_owned(who.pid)
        local = next(seat.local for seat in self._seats if seat.board is who.board)
        mark = {ATTACH_VARIABLE: self._attach, "LOCAL_RANK": str(local)}
        self._strays.append(_Strays(now + _STRAYS_S, mark, linux.uptime()))
        who.oom = bool(cgroup.collect(self._spec.run_id, who.pid)) and who.code in (-9, None)
        if who.code is None:
            self._unsure.append(who)
            yield now, Gone(who)
        else:
            yield now, Ended(who, who.code, True)

    def _sure(self, now: float) -> Iterator[tuple[float, Seen]]:
        """Ends whose code only the launcher saw: it names every one that is not 0."""
        for who in list(self._unsure):
            code = self._codes.get(who.pid)
            if code is not None or now - who.gone_at >= _CODE_S:
                self._unsure.remove(who)
                who.code = code or 0
                yield now, Ended(who, who.code, code is not None)

    def end_all(self, now: float) -> list[Seen]:
        """The launcher is gone, and so is every rank: what is left to be said of them."""
        for seat in self._seats:
            if seat.who is not None and not seat.who.exited:
                self._exited(seat.who)
        return [*self.look(now), *(seen for _, seen in self._sure(now + _CODE_S))]

    def kill(self) -> None:
        """SIGKILL every rank with all that it started."""
        for who in self.living:
            linux.kill_tree(who.pid)
            linux.end_owned(who.pid)

    def _end_strays(self, now: float) -> None:
        for strays in [one for one in self._strays if one.at <= now]:
            self._strays.remove(strays)
            linux.end_older(strays.variables, strays.uptime_s)

    # --- output -----------------------------------------------------------------------------------

    def _logs(self, local: int, rank: int, inc: int) -> dict[int, Path]:
        """The logs of a new process that are to be shown."""
        spec = self._spec
        chosen = spec.local_ranks_filter
        if chosen is not None and local not in chosen:
            return {}
        hidden = spec.redirects.get(local, 0)
        names = {1: "stdout", 2: "stderr"}
        return {
            stream: spec.log_dir / log_file(rank, inc, name)
            for stream, name in names.items()
            if not hidden & stream
        }

    def _follow_logs(self) -> None:
        """Begin with the log files that are there by now; ranks make them themselves."""
        for who in self.last.values():
            prefix = f"[rank {who.rank}] " if self._spec.world > 1 else ""
            for stream, path in list(who.logs.items()):
                with contextlib.suppress(OSError):
                    start = self._sizes.get(path, 0)
                    self._tails.add(who.ticket, stream, path, prefix, start)
                    del who.logs[stream]

    def close(self) -> None:
        """Watch nobody any more."""
        for seat in self._seats:
            if seat.who is not None:
                self._drop_pidfd(seat.who)


def _in_order(seen: list[tuple[float, Seen]]) -> list[tuple[float, Seen]]:
    """What happened at one seat, with times that keep its order: an end is seen late."""
    latest = float("inf")
    for at, (t, one) in reversed(list(enumerate(seen))):
        latest = min(t, latest)
        seen[at] = latest, one
    return seen


def _note(who: Occupant) -> None:
    board = who.board
    who.step, who.progress = board.step, board.last_progress
    who.phase, who.round = board.phase, board.round


def _first_of_next(told: list[tuple[bytes, Event | None]], seq: int) -> int:
    """Where the lines of the next process begin: its numbers start again."""
    for at, (_, event) in enumerate(told):
        if event is None:
            continue
        if event.seq <= seq:
            return at
        seq = event.seq
    return len(told)
