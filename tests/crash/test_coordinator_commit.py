"""The coordinator's commit, killed or refused by storage at any system call."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import signal
from pathlib import Path

import pytest

from keepstep.checkpoint import catalog
from keepstep.wire.types import Version
from tests.checkpoint.shards import write
from tests.crash import saves, tracing
from tests.crash.commits import PRELOAD, Coordinator
from tests.crash.forks import Forks
from tests.crash.saves import NEW, OLD
from tests.crash.strikes import CHANGES, READS, Range, Struck, every, missed
from tests.crash.tracing import Call, Point, Strace

pytestmark = [pytest.mark.process, pytest.mark.needs("strace")]

_KEPT = 1
_REASONS = {name: os.strerror(getattr(errno, name)) for name in ("ENOSPC", "EIO")}


def _written(root: Path, version: Version) -> str:
    """Write all shards of ``version``; returns its folder."""
    for rank in range(version.world):
        _, folder = write(root, version, rank, saves.shard(version, rank))
    return folder


def _commit(shots: Range, root: Path, strike: str) -> tuple[list[Call], str | None, int]:
    """Commit ``NEW`` with a traced coordinator: what it called and answered, and its status."""
    folder = _written(root, NEW)
    coordinator = Coordinator(shots.forks, root, _KEPT)
    strace = Strace(coordinator.committer, root.parent / "log", strike=strike, follow=False)
    answer = coordinator.commit(NEW, folder)
    status = coordinator.close()  # it removes what is old after it has answered
    strace.wait()
    return strace.calls(root), answer, status


def _next(forks: Forks, root: Path, version: Version) -> None:
    """The next save, with other coordinator: it is the newest, and the folder is clean."""
    folder = _written(root, version)
    coordinator = Coordinator(forks, root, 2)
    assert coordinator.commit(version, folder) == ""
    assert coordinator.close() == 0
    assert saves.newest(root) == version
    assert not saves.leftovers(root), saves.leftovers(root)


def _strike(shots: Range, error: str, point: Point) -> Struck:
    """Kill the coordinator at ``point``, or have the call there fail with ``error``."""
    root = shots.copy(f"{error}-{point.name}-{point.ordinal}")
    strike = point.fail(error) if error else point.kill()
    calls, answer, status = _commit(shots, root, strike)
    call = point.hit(calls)
    shown = f"{error or 'killed'} at {call}, {answer!r}"
    assert status == (-signal.SIGKILL if call is not None and not error else 0), shown
    found = saves.newest(root)
    assert found in (OLD, NEW), shown
    if error and answer:
        assert _REASONS[error] in answer and "could not be published" in answer, shown
        assert OLD in [info.version for info in catalog.committed(root)], shown
    else:
        assert found == NEW or answer is None, shown
    # Another coordinator commits the same save, or a restarted job makes another.
    again = root.with_name("again")
    shutil.copytree(root, again)
    _next(shots.forks, root, saves.next_after(found))
    coordinator = Coordinator(shots.forks, again, 2)
    folder = next(i.folder for i in _infos(again, NEW)) if found == NEW else _written(again, NEW)
    assert coordinator.commit(NEW, folder) == "", shown
    assert coordinator.close() == 0
    assert saves.newest(again) == NEW, shown
    _next(shots.forks, again, saves.next_after(NEW))
    shots.drop(root)
    return Struck(point, call, answer)


def _infos(root: Path, version: Version) -> list[catalog.CheckpointInfo]:
    return [info for info in catalog.committed(root) if info.version == version]


def _strike_all(tmp_path: Path, error: str, names: frozenset[str] | None) -> None:
    with Forks(PRELOAD) as forks:
        shots = Range(forks, tmp_path)
        recorded, answer, status = _commit(shots, shots.copy("record"), "")
        assert (answer, status) == ("", 0)
        points = tracing.points(recorded, on_storage=bool(error))
        jobs = [p for p in points if names is None or p.name in names]
        done = every(functools.partial(_strike, shots, error, point) for point in jobs)
    lost = missed(recorded, done, names)
    assert not lost, "\n".join(lost)


def test_a_coordinator_killed_at_any_call_of_a_commit_leaves_the_old_step_or_the_new(
    tmp_path: Path,
) -> None:
    _strike_all(tmp_path, "", CHANGES)


def test_a_call_of_a_commit_that_storage_refuses_fails_it_or_changes_nothing(
    tmp_path: Path,
) -> None:
    _strike_all(tmp_path, "EIO", CHANGES | READS)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("error", ["", *_REASONS])
def test_any_call_at_all_of_a_commit_may_fail_or_be_the_last(tmp_path: Path, error: str) -> None:
    _strike_all(tmp_path, error, None)
