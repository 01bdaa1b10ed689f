"""Holds the lease of a folder of checkpoints for a job, and says how that goes.

Run as ``python -m keepstep.checkpoint.lease_process``, started by ``lease_keeper``. A process of
its own, because frozen storage blocks whoever touches it and cannot be interrupted. It lets go of
the lease when its owner closes the socket or is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from keepstep import linux
from keepstep.checkpoint import lease
from keepstep.checkpoint.lease import Lease, LeaseFiles, Store, Taker
from keepstep.clock import SYSTEM
from keepstep.errors import CheckpointNotWritable, FolderInUse, KeepstepError
from keepstep.wire.channel import Channel, Closed
from keepstep.wire.messages import FROM_LEASE, LeaseNews, Message


class Holder:
    """Claims a lease, renews it, and lets go of it.

    Args:
        store: Where leases are. me: what is claimed. tell: gets the news.
        idle: Sleeps so many seconds; True if the owner is gone.
        wall: Present wall time in seconds.
    """

    def __init__(
        self,
        store: Store,
        me: Lease,
        tell: Callable[[LeaseNews], None],
        idle: Callable[[float], bool],
        wall: Callable[[], float] = SYSTEM.wall,
    ) -> None:
        self._store = store
        self._me = me
        self._tell = tell
        self._idle = idle
        self._wall = wall

    def renew(self, number: int, beat_s: float) -> None:
        """Go on with a lease that was claimed before, by a process that has ended."""
        # Further than the other can have counted: others see that somebody lives.
        self._me = msgspec.structs.replace(self._me, beat=int(self._wall()))
        self._hold(number, beat_s)

    def serve(self, taker: Taker, beat_s: float, poll_s: float, where: str) -> None:
        """Hold the lease until the owner is gone or another job has taken it."""
        try:
            number = self._claim(taker, poll_s)
        except FolderInUse as error:
            self._tell(LeaseNews(kind="refused", parts=_parts(error, where)))
            return
        except OSError as problem:
            refused = CheckpointNotWritable(
                f"the lease of the checkpoint folder cannot be written: {problem.strerror}",
                done="nothing was started",
                advice="check that it is a folder, its rights and its space",
            )
            self._tell(LeaseNews(kind="failed", parts=_parts(refused, where)))
            return
        if number:
            self._tell(LeaseNews(kind="held", number=number))
            self._hold(number, beat_s)

    def _claim(self, taker: Taker, poll_s: float) -> int:
        """The number claimed; 0 if the owner was gone before."""
        steps = lease.claiming(self._store, taker, self._me, SYSTEM.mono, poll_s)
        told = False
        try:
            while True:
                pause = next(steps)
                if pause and not told:
                    told = True
                    self._tell_waiting()
                if self._idle(pause):
                    return 0
        except StopIteration as end:
            return int(end.value)

    def _tell_waiting(self) -> None:
        seen = self._store.newest()
        holder = None if seen is None else seen.lease
        who = "nobody knows whom"
        if holder is not None:
            since = self._wall() - holder.since
            who = f"run {holder.run!r} (process {holder.pid} on {holder.host}, {since:.0f} s ago)"
        text = f"the checkpoint folder was last used by {who}; looking whether that still lives"
        self._tell(LeaseNews(kind="waiting", text=text))

    def _hold(self, number: int, beat_s: float) -> None:
        while not self._idle(beat_s):
            # What storage refuses now is tried again; others wait much longer than one beat.
            with contextlib.suppress(OSError):
                highest = self._store.newest()
                if highest is not None and highest.number > number:
                    by = highest.lease
                    name = "another job" if by is None else f"run {by.run!r} on {by.host}"
                    text = f"the checkpoint folder was taken over by {name}"
                    self._tell(LeaseNews(kind="lost", number=highest.number, text=text))
                    return
                self._me = msgspec.structs.replace(self._me, beat=self._me.beat + 1)
                self._store.write(number, self._me)
        with contextlib.suppress(OSError):
            self._store.write(number, msgspec.structs.replace(self._me, released=True))


def _parts(error: KeepstepError, where: str) -> tuple[str, str, str, str]:
    return (error.what, error.where or where, error.done, error.advice)


def _idle(sock: socket.socket, owner: Lease, seconds: float) -> bool:
    """Sleep; True if the owner has hung up or is gone (a child of it may still have its end)."""
    readable, _, _ = select.select([sock], [], [], seconds)
    return bool(readable) or linux.started_ticks(owner.pid) != owner.started


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="keepstep.checkpoint.lease_process")
    parser.add_argument("--fd", type=int, required=True, help="connected unix socket")
    parser.add_argument("--root", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--run", default="", help="run id")
    parser.add_argument("--owner", type=int, required=True, help="process that the lease is for")
    parser.add_argument("--relieves", action="store_true", help="an older start of the run may go")
    parser.add_argument("--renew", type=int, default=0, help="the lease that is held already")
    parser.add_argument("--expiry-s", type=float, default=lease.EXPIRY_S)
    parser.add_argument("--beat-s", type=float, default=lease.BEAT_S)
    parser.add_argument("--poll-s", type=float, default=lease.POLL_S)
    told = parser.parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    channel: Channel[FROM_LEASE] = Channel(socket.socket(fileno=told.fd), LeaseNews, blocking=True)

    def tell(message: Message) -> None:
        with contextlib.suppress(Closed):  # the owner is gone, which ``idle`` sees
            channel.send(message)

    me = lease.of_process(told.run, told.owner, SYSTEM.wall())
    taker = Taker(
        me,
        relieves=told.relieves,
        lives=lease.lives,
        expiry_s=told.expiry_s,
        poll_s=told.poll_s,
    )
    holder = Holder(LeaseFiles(told.root), me, tell, partial(_idle, channel.sock, me))
    try:
        if told.renew:
            holder.renew(told.renew, told.beat_s)
            return 0
        holder.serve(taker, told.beat_s, told.poll_s, str(told.root))
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
