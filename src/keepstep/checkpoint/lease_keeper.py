"""The owner's side of a lease: starts the process that holds it, and hears how that goes.

Used by the agent or observer of a run, and by rank 0 of a script without them.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from keepstep.checkpoint.lease import BEAT_S, EXPIRY_S, POLL_S
from keepstep.clock import SYSTEM, Clock
from keepstep.errors import CheckpointNotWritable, FolderInUse
from keepstep.wire.channel import Channel, pair
from keepstep.wire.messages import FROM_LEASE, LeaseNews

ANSWER_S = 30.0
"""How long storage may take to answer at all."""
_STARTS = 4
CLOSE_S = 5.0
"""How long letting go may take; then the lease ends with the life of its owner."""


class LeaseKeeper:
    """Holds the lease of ``root`` until ``close``.

    Args:
        root: Folder of the checkpoints. run: Run id, may be empty.
        relieves: Whether an older start of the same run, on another machine, is no conflict.
        say: Told that another holder is being watched, which takes a while.
        environ: Environment of the process; None: this one's. log: where its errors go; None:
            nowhere.
        expiry_s, beat_s, poll_s: As in ``lease``. answer_s: how long storage may take to answer.
    """

    def __init__(
        self,
        root: Path,
        run: str,
        *,
        relieves: bool,
        say: Callable[[str], None],
        environ: Mapping[str, str] | None = None,
        log: Path | None = None,
        expiry_s: float = EXPIRY_S,
        beat_s: float = BEAT_S,
        poll_s: float = POLL_S,
        answer_s: float = ANSWER_S,
        clock: Clock = SYSTEM,
    ) -> None:
        self._root = root
        self._arguments = [
            *("--root", str(root), "--run", run, "--owner", str(os.getpid())),
            *("--expiry-s", str(expiry_s), "--beat-s", str(beat_s), "--poll-s", str(poll_s)),
            *(["--relieves"] if relieves else []),
        ]
        self._say = say
        self._environ = environ
        self._log = log
        self._expiry_s = expiry_s
        self._answer_s = answer_s
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel[FROM_LEASE] | None = None
        self._lost = ""
        self._starts = 0
        self.number = 0
        """The lease that is held; 0 before ``claim``."""

    def begin(self) -> None:
        """Begin to claim the folder; ``claim`` says how it went.

        Raises:
            CheckpointNotWritable: no process could be started.
        """
        if self._process is None:
            self._start()

    def claim(self) -> int:
        """Claim the folder; returns the number of the lease.

        Raises:
            FolderInUse: another job, alive, saves into it.
            CheckpointNotWritable: storage refuses, or does not answer.
        """
        self.begin()
        try:
            self.number = self._await()
        except BaseException:
            self.close()
            raise
        return self.number

    def _start(self) -> None:
        self._starts += 1
        ours, theirs = pair()
        renew = ["--renew", str(self.number)] if self.number else []
        command = [sys.executable, "-m", "keepstep.checkpoint.lease_process"]
        try:
            with theirs, contextlib.ExitStack() as files:
                # Not the script's own output: whoever reads that to its end must not have to wait
                # for a process that storage does not let end.
                log = files.enter_context(self._log.open("ab")) if self._log else None
                self._process = subprocess.Popen(
                    [*command, "--fd", str(theirs.fileno()), *self._arguments, *renew],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=log or subprocess.DEVNULL,
                    stderr=log or subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C must not end it before its owner
                    env=None if self._environ is None else dict(self._environ),
                )
        except OSError as error:
            ours.close()
            raise CheckpointNotWritable(
                f"the process that holds the folder's lease could not be started: {error}",
                where=str(self._root),
                done="nothing was started",
                advice="check memory and the limit on processes",
            ) from error
        self._channel = Channel(ours, FROM_LEASE, blocking=False)

    def _await(self) -> int:
        deadline = self._clock.mono() + self._answer_s
        while True:
            for news in self._hear(max(0.0, deadline - self._clock.mono())):
                if news.kind == "held":
                    return news.number
                if news.kind == "waiting":
                    deadline += self._expiry_s
                    self._say(f"{news.text} (at most {self._expiry_s:.0f} s)")
                    continue
                what, where, done, advice = news.parts
                kind = FolderInUse if news.kind == "refused" else CheckpointNotWritable
                raise kind(what, where=where, done=done, advice=advice)
            if self._clock.mono() >= deadline:
                raise CheckpointNotWritable(
                    f"storage gave no answer for the folder's lease in {self._answer_s:.0f} s",
                    where=str(self._root),
                    done="nothing was started",
                    advice="look at the state of the file system",
                )

    def _hear(self, limit_s: float) -> list[LeaseNews]:
        channel = self._channel
        if channel is None:
            return []
        if limit_s > 0.0:
            select.select([channel], [], [], limit_s)
        alive = channel.read()
        news = list(channel.messages())
        if not alive and self.number and not any(one.kind == "lost" for one in news):
            self._replace()
        if not alive and not news and not self.number:
            raise CheckpointNotWritable(
                "the process that holds the folder's lease ended before it had it",
                where=str(self._root),
                done="nothing was started",
                advice=f"see {self._log}" if self._log else "look for kills for lack of memory",
            )
        return news

    def _replace(self) -> None:
        """The process was killed: another one goes on with the same lease."""
        channel, self._channel = self._channel, None
        process, self._process = self._process, None
        if channel is not None:
            channel.close()
        if process is not None:
            process.kill()
            process.wait()
        if self._lost or self._starts >= _STARTS:
            return  # others take the folder for free in the end
        with contextlib.suppress(CheckpointNotWritable):
            self._start()

    def lost(self) -> str:
        """Who has taken the folder over, as a sentence; empty while the lease is held.

        To be called now and then: a process that was killed is replaced here.
        """
        for news in self._hear(0.0):
            if news.kind == "lost":
                self._lost = news.text
        return self._lost

    def close(self) -> None:
        """Let go of the lease; waits a short time only. Can be called twice."""
        channel, self._channel = self._channel, None
        if channel is not None:
            with contextlib.suppress(OSError):  # a forked child may have a copy of our end
                channel.sock.shutdown(socket.SHUT_RDWR)
            channel.close()
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # blocked by storage: it ends when that answers
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
