"""A writer process that is killed at any system call of a save leaves the old step or the new."""

from __future__ import annotations

import functools
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.crash import saves, tracing
from tests.crash.forks import Forks
from tests.crash.saves import NEW, OLD, PRELOAD
from tests.crash.strikes import CHANGES, VIEWS, Range, Struck, View, every, missed
from tests.crash.tracing import Point

pytestmark = [pytest.mark.process, pytest.mark.needs("strace")]


def _kill(shots: Range, view: View, point: Point) -> Struck:
    """Kill the writer at ``point``; then save the same again, and what a restarted job saves."""
    root = shots.copy(f"{view.name}-{point.name}-{point.ordinal}")
    shot = shots.shoot(root, view, point.kill())
    call, answer = point.hit(shot.calls), shot.answer
    assert shot.status == (0 if call is None else -signal.SIGKILL), (point, shot.status)
    found = saves.newest(root)
    assert found in (OLD, NEW), point
    # Whoever was told of the commit must find it.
    assert found == NEW or answer is None, point

    replaced = root.with_name("replaced")
    shutil.copytree(root, replaced)
    saves.save_again(shots.forks, replaced, NEW, saves.next_after(NEW))
    saves.save_again(shots.forks, root, saves.next_after(found))
    shots.drop(root)
    return Struck(point, call, answer)


def _kill_all(tmp_path: Path, trace: str, names: frozenset[str] | None) -> list[Struck]:
    done: list[Struck] = []
    with Forks(PRELOAD) as forks:
        shots = Range(forks, tmp_path, trace=trace)
        recorded = {view: shots.record(view) for view in VIEWS}
        for view, calls in recorded.items():
            points = [
                point for point in tracing.points(calls) if names is None or point.name in names
            ]
            done += every(functools.partial(_kill, shots, view, point) for point in points)
    everything = [call for calls in recorded.values() for call in calls]
    lost = missed(everything, done, names)
    assert not lost, "\n".join(lost)
    return done


def test_a_writer_killed_at_any_call_that_changes_something_leaves_the_old_step_or_the_new(
    tmp_path: Path,
) -> None:
    done = _kill_all(tmp_path, tracing.STORAGE, CHANGES)
    outcomes = Counter(one.answer is None for one in done)
    assert outcomes[True] > 60, outcomes


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_writer_killed_at_any_call_at_all_leaves_the_old_step_or_the_new(tmp_path: Path) -> None:
    _kill_all(tmp_path, tracing.ALL, None)
