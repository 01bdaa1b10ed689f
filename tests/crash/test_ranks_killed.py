"""A rank that is killed at any system call of its own part of a save: the old step or the new."""

from __future__ import annotations

import contextlib
import functools
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from keepstep.checkpoint import catalog, layout
from keepstep.checkpoint.verify import verify
from tests.crash import tracing
from tests.crash.forks import Forks
from tests.crash.strikes import Struck, every
from tests.crash.tracing import Call, Point, Strace
from tests.crash.training import NEW, OLD, PRELOAD, Rank

pytestmark = [pytest.mark.process, pytest.mark.needs("strace")]

_WRITER_S = 0.5
"""How long writers without ranks may go on; one that waits for a lost rank's shard is killed."""


@dataclass(frozen=True)
class Scene:
    """A world of which one rank is struck. ``first``: in the first save of its process."""

    world: int
    rank: int
    first: bool

    @property
    def name(self) -> str:
        return f"{self.world}-{self.rank}-{'first' if self.first else 'later'}"


def _writers(pids: list[int]) -> list[psutil.Process]:
    """Processes that ranks have started."""
    found: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += psutil.Process(pid).children(recursive=True)
    return found


def _save(
    forks: Forks, root: Path, scene: Scene, strike: str
) -> tuple[list[Call], str | None, int]:
    """Save ``NEW`` with one rank traced: its calls, its answer, its status."""
    ranks = [Rank(forks, root, rank, scene.world, first=scene.first) for rank in range(scene.world)]
    for rank in ranks:
        rank.ready()
    struck = ranks[scene.rank]
    writers = _writers([rank.pid for rank in ranks])
    # In a first save the writer process is started: it is not a part of the rank.
    log = root.parent / "log"
    strace = Strace(struck.pid, log, trace=tracing.ALL, strike=strike, follow=not scene.first)
    for rank in ranks:
        rank.save()
    answer = struck.answer()
    if answer is None:
        for rank in ranks:
            writers += _writers([rank.pid])
            if rank is not struck:
                rank.kill()
    else:
        strace.detach()
        assert all(rank is struck or rank.answer() == answer for rank in ranks)
    status = [rank.close() for rank in ranks][scene.rank]
    strace.detach()
    _, alive = psutil.wait_procs(set(writers), timeout=_WRITER_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive)
    return strace.calls(root), answer, status


class Range:
    """Folders in which ``OLD`` is committed by a world of each size."""

    def __init__(self, forks: Forks, folder: Path) -> None:
        self.forks = forks
        self._folder = folder

    def root(self, scene: Scene, name: str) -> Path:
        """A folder for one shot; in a first save ``OLD`` is there before."""
        root = self._folder / scene.name / name / "root"
        if scene.first:
            shutil.copytree(self._template(scene.world), root)
        else:
            root.parent.mkdir(parents=True)
        return root

    @functools.cache  # noqa: B019 - as long as the test
    def _template(self, world: int) -> Path:
        root = self._folder / f"template-{world}" / "root"
        root.parent.mkdir()
        ranks = [Rank(self.forks, root, rank, world, first=False) for rank in range(world)]
        for rank in ranks:
            rank.ready()
        assert [rank.close() for rank in ranks] == [0] * world
        return root


def _kill(shots: Range, scene: Scene, point: Point) -> Struck:
    root = shots.root(scene, f"{point.name}-{point.ordinal}")
    calls, answer, status = _save(shots.forks, root, scene, point.kill())
    call = point.hit(calls)
    shown = f"{scene.name} killed at {call}, {answer!r}, {status}"
    assert status == (0 if call is None else -signal.SIGKILL), shown
    infos = catalog.committed(root)
    assert all(verify(root, info.folder) == [] for info in infos), shown
    assert [info.step for info in infos] in ([OLD], [NEW], [NEW, OLD]), shown
    assert answer is None or infos[0].step == NEW, shown
    resumed = shots.forks.wait(shots.forks.start(f"{PRELOAD}:resume", str(root)))
    assert resumed == infos[0].step, shown
    assert not _leftovers(root), f"{shown}: {_leftovers(root)}"
    shutil.rmtree(root.parent)
    return Struck(point, call, answer)


def _leftovers(root: Path) -> list[str]:
    """What belongs to no checkpoint, but for the records of who saved here."""
    good = {info.folder for info in catalog.committed(root)}
    folders = [name for name in layout.list_folders(root) if name not in good]
    return folders + [str(path) for path in root.rglob(".*.tmp")]


def _kill_all(
    tmp_path: Path, scenes: list[Scene], wanted: Callable[[Sequence[Point]], Sequence[Point]]
) -> list[Struck]:
    done: list[Struck] = []
    with Forks(PRELOAD) as forks:
        shots = Range(forks, tmp_path)
        for scene in scenes:
            recorded, answer, status = _save(forks, shots.root(scene, "record"), scene, "")
            assert (answer, status) == ("", 0)
            points = wanted(tracing.points(recorded))
            done += every([functools.partial(_kill, shots, scene, point) for point in points])
    assert any(one.answer is None for one in done)
    return done


def _all(points: Sequence[Point]) -> Sequence[Point]:
    return points


def _handing_over(points: Sequence[Point]) -> Sequence[Point]:
    return [point for point in points if point.name in ("sendmsg", "sendto")]


def test_a_rank_alone_killed_at_any_call_of_a_save_leaves_the_old_step_or_the_new(
    tmp_path: Path,
) -> None:
    _kill_all(tmp_path, [Scene(1, 0, first=False)], _all)


def test_one_of_two_ranks_killed_as_it_hands_over_its_shard_leaves_the_old_step_or_the_new(
    tmp_path: Path,
) -> None:
    _kill_all(tmp_path, [Scene(2, rank, first=False) for rank in range(2)], _handing_over)


def test_a_rank_killed_here_and_there_in_its_first_save_leaves_the_old_step_or_the_new(
    tmp_path: Path,
) -> None:
    _kill_all(tmp_path, [Scene(1, 0, first=True)], lambda points: points[::14])


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
@pytest.mark.parametrize(("world", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_rank_killed_at_any_call_of_a_save_leaves_the_old_step_or_the_new(
    tmp_path: Path, world: int, rank: int, first: bool
) -> None:
    _kill_all(tmp_path, [Scene(world, rank, first)], _all)
