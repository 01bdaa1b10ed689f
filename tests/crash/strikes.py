"""Strikes a writer process at one point after the other, each time on a fresh copy of a folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from keepstep.checkpoint.commit import commit
from keepstep.wire.channel import Closed
from tests.checkpoint.shards import write
from tests.crash import tracing
from tests.crash.forks import Forks
from tests.crash.saves import NEW, OLD, Writer, shard
from tests.crash.tracing import Call, Point, Strace

# fmt: off
CHANGES = frozenset(
    {
        "openat", "creat", "close", "mkdir", "mkdirat", "rmdir",
        "write", "writev", "pwrite64", "pwritev", "pwritev2", "io_submit",
        "ftruncate", "fallocate", "copy_file_range",
        "fsync", "fdatasync", "sync_file_range",
        "link", "linkat", "rename", "renameat", "renameat2", "unlink", "unlinkat",
        "sendto", "sendmsg",
    }
)
# fmt: on
"""Calls after which storage, or what another process knows, may be different."""
READS = frozenset({"read", "pread64", "preadv", "preadv2", "getdents64"})
AT_ONCE = 6
_COMMITTER = 1
"""The writer's thread that commits is the first that it starts."""


@dataclass(frozen=True)
class View:
    """Which threads of the writer are traced: all, or only the one that commits."""

    name: str
    thread: int | None


VIEWS = (View("all", None), View("commit", _COMMITTER))


@dataclass(frozen=True)
class Struck:
    """What became of a save: the call that was struck (None: it was never made), and the answer.

    ``answer`` is None if the writer was killed, the error if the save failed, else empty.
    """

    point: Point
    call: Call | None
    answer: str | None


@dataclass(frozen=True)
class Shot:
    """What a writer called and answered (None: it was killed before), and its exit status."""

    calls: list[Call]
    answer: str | None
    status: int
    committer: int


class Range:
    """Prepared folders, and a writer process for each shot.

    Args:
        forks: Where writers come from; ``saves`` is preloaded there.
        folder: A folder for everything.
        trace: Which calls strace looks at.
    """

    def __init__(self, forks: Forks, folder: Path, *, trace: str = tracing.STORAGE) -> None:
        self.forks = forks
        self._folder = folder
        self._trace = trace
        self._template = folder / "template"
        for rank in range(OLD.world):
            _, name = write(self._template, OLD, rank, shard(OLD, rank))
        commit(self._template, name, OLD)

    def copy(self, name: str) -> Path:
        """A folder of checkpoints that holds ``OLD``."""
        root = self._folder / name / "root"
        shutil.copytree(self._template, root)
        return root

    def drop(self, root: Path) -> None:
        """Remove what ``copy`` made."""
        shutil.rmtree(root.parent)

    def shoot(
        self,
        root: Path,
        view: View,
        strike: str = "",
        *,
        retries: int = 0,
        refused: Callable[[Writer], None] | None = None,
    ) -> Shot:
        """Save ``NEW`` into ``root`` with a traced writer, which ends then.

        It tells of a commit before it removes old checkpoints; only its end says that it has.

        Args:
            root: From ``copy``.
            view: Which threads are traced.
            strike: From ``Point``.
            retries: How often the writer tries again.
            refused: Called with the writer if the save failed; it is not traced any more.
        """
        writer = Writer(self.forks, root)
        committer = writer.thread(_COMMITTER)
        target = writer.pid if view.thread is None else writer.thread(view.thread)
        log = root.parent / "log"
        strace = Strace(target, log, trace=self._trace, strike=strike, follow=view.thread is None)
        answer: str | None = None
        try:
            answer = writer.save(NEW, keep=1, retries=retries)
            if answer and refused is not None:
                strace.detach()
                refused(writer)
        except Closed:
            pass  # the status says so
        finally:
            status = writer.close()
            strace.wait()
        return Shot(strace.calls(root, committer), answer, status, committer)

    def record(self, view: View) -> list[Call]:
        """What an undisturbed save calls; the committer's calls only where it is looked at alone.

        In the view of all threads the others hide it: they come to the same number of calls first.
        """
        root = self.copy(f"record-{view.name}")
        shot = self.shoot(root, view)
        assert (shot.answer, shot.status) == ("", 0)
        return [call for call in shot.calls if call.thread != shot.committer]


def every(jobs: Iterable[Callable[[], Struck]]) -> list[Struck]:
    """Do all jobs, a few at once; the first that fails is raised."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


def missed(
    recorded: Sequence[Call], struck: Iterable[Struck], names: frozenset[str] | None
) -> list[str]:
    """Recorded calls below the folder that no shot has hit."""
    hit = {one.call.place for one in struck if one.call is not None}
    return [
        f"{call.name} {' '.join(call.paths)} ({call.repeat})"
        for call in recorded
        if call.paths and call.place not in hit and (names is None or call.name in names)
    ]
