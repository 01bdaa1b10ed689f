"""Storage that refuses one call of a save: the save fails and says so, or it is committed."""

from __future__ import annotations

import errno
import functools
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.checkpoint import catalog
from tests.checkpoint.shards import make_version
from tests.crash import saves, tracing
from tests.crash.forks import Forks
from tests.crash.saves import NEW, OLD, PRELOAD, WORLD, Writer
from tests.crash.strikes import CHANGES, READS, VIEWS, Range, Struck, View, every, missed
from tests.crash.tracing import Point

pytestmark = [pytest.mark.process, pytest.mark.needs("strace")]

_LATER = make_version(15, world=WORLD)
_REASONS = {name: os.strerror(getattr(errno, name)) for name in ("ENOSPC", "EIO")}


def _refuse(shots: Range, error: str, view: View, point: Point) -> Struck:
    """Have the call at ``point`` fail; then the writer makes the next save, if that save failed, or
    another one does."""
    root = shots.copy(f"{error}-{view.name}-{point.name}-{point.ordinal}")

    def save_later(writer: Writer) -> None:
        assert OLD in [info.version for info in catalog.committed(root)]
        assert saves.newest(root) in (OLD, NEW)
        assert writer.save(_LATER) == ""

    try:
        shot = shots.shoot(root, view, point.fail(error), refused=save_later)
        call, answer = point.hit(shot.calls), shot.answer
        assert answer is not None, shot.status  # of threads that end, a call may be struck as well
        if answer:
            assert _REASONS[error] in answer
        else:
            assert saves.newest(root) == NEW
            with saves.writer(shots.forks, root) as other:
                assert other.save(_LATER) == ""
    except AssertionError as failure:
        raise AssertionError(f"{error} in {view.name} {point}: {failure}") from failure
    shown = f"{error} in {view.name}: {call}, {answer!r}"
    assert saves.newest(root) == _LATER
    assert not saves.leftovers(root), f"{shown}: {saves.leftovers(root)}"
    shots.drop(root)
    return Struck(point, call, answer)


def _refuse_all(
    tmp_path: Path, errors: Callable[[Point], str], names: frozenset[str] | None
) -> list[Struck]:
    done: list[Struck] = []
    with Forks(PRELOAD) as forks:
        shots = Range(forks, tmp_path)
        recorded = {view: shots.record(view) for view in VIEWS}
        for view, calls in recorded.items():
            points = [
                point
                for point in tracing.points(calls, on_storage=True)
                if names is None or point.name in names
            ]
            done += every(functools.partial(_refuse, shots, errors(p), view, p) for p in points)
    everything = [call for calls in recorded.values() for call in calls]
    lost = missed(everything, done, names)
    assert not lost, "\n".join(lost)
    return done


def test_a_call_that_storage_refuses_fails_the_save_or_changes_nothing(tmp_path: Path) -> None:
    reasons = list(_REASONS)
    done = _refuse_all(
        tmp_path, lambda point: reasons[point.ordinal % len(reasons)], CHANGES | READS
    )
    outcomes = Counter(bool(one.answer) for one in done)
    assert outcomes[True] > 40, outcomes


def _pass(shots: Range, point: Point) -> Struck:
    """Have the call at ``point`` fail once, where a shard may be tried again."""
    root = shots.copy(f"again-{point.name}-{point.ordinal}")
    shot = shots.shoot(root, VIEWS[0], point.fail("EIO"), retries=1)
    assert (shot.answer, shot.status) == ("", 0), f"{point}: {shot.answer}"
    assert saves.newest(root) == NEW
    assert not saves.leftovers(root), f"{point}: {saves.leftovers(root)}"
    return Struck(point, point.hit(shot.calls), shot.answer)


def test_a_shard_that_storage_refuses_once_is_written_at_the_second_attempt(tmp_path: Path) -> None:
    # Each thread's call of this number is struck: these are of the one that writes alone.
    calls = {"mkdir": 1, "pwrite64": 1, "ftruncate": 1, "fsync": 6, "rename": 1, "link": 2}
    with Forks(PRELOAD) as forks:
        shots = Range(forks, tmp_path)
        points = [Point(name, ordinal) for name, ordinal in calls.items()]
        done = every(functools.partial(_pass, shots, point) for point in points)
    assert all(one.call is not None and one.call.paths for one in done)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("error", _REASONS)
def test_any_call_at_all_that_storage_refuses_fails_the_save_or_changes_nothing(
    tmp_path: Path, error: str
) -> None:
    _refuse_all(tmp_path, lambda point: error, None)
