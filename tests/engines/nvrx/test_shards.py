"""NVRx's shard writers with real workers, of the installed release and of the stand-in for 0.6."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest
import torch

from keepstep.checkpoint import catalog
from keepstep.checkpoint.verify import verify
from keepstep.clock import SYSTEM
from keepstep.engines.nvrx import library
from keepstep.engines.nvrx.shards import Kind, NvrxShardWriter, writer_factory
from keepstep.errors import CheckpointError, SaveFailed, UsageError
from keepstep.rank.checkpointer import Place
from tests.checkpoint.torch_worlds import version
from tests.engines.nvrx import ranks
from tests.engines.nvrx.ranks import HEAD, LIMIT_S
from tests.process.job import lives, wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.needs("nvrx")]
KINDS: list[Kind] = ["torch", "dcp"]
Make = Callable[..., NvrxShardWriter]


@pytest.fixture(autouse=True, scope="module")
def _what_stays_with_the_process() -> None:
    resource_tracker.ensure_running()
    _standins()  # NVRx opens a file when it is imported, and never closes it


def _standins() -> library.Checkpointing:
    from tests.engines.nvrx.standins import checkpointing_06

    return checkpointing_06()


@pytest.fixture(params=["installed", "0.6"])
def nvrx(request: pytest.FixtureRequest) -> library.Checkpointing:
    return library.checkpointing() if request.param == "installed" else _standins()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def make(tmp_path: Path, kind: Kind) -> Iterator[Make]:
    made: list[NvrxShardWriter] = []

    def build(**options: object) -> NvrxShardWriter:
        given = {"rank": 0, "world": 1, "keep_last": 3, **options}
        made.append(NvrxShardWriter(kind, tmp_path, **given))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for writer in made:
        writer.close(abort=True)


def state(value: float, size: int = 1000) -> dict[str, object]:
    return {"w": torch.full((size,), value), "data": {"value": value}}


def worker_of(writer: NvrxShardWriter) -> int:
    return wait_until(lambda: writer.worker_pid, "NVRx's worker is there") or 0


def test_saves_are_committed_and_restored_and_a_dead_worker_is_named_and_replaced(
    make: Make, nvrx: library.Checkpointing, tmp_path: Path
) -> None:
    writer = make(nvrx=nvrx)
    assert writer.worker_pid is None  # nothing is started before the first save
    for step in (1, 2):
        live = state(float(step))
        pending = writer.begin(live, version(step), tmp_path)
        live["w"].fill_(-1)  # type: ignore[attr-defined]
        live["data"]["value"] = -1  # type: ignore[index]
        pending.wait(LIMIT_S)
    first = worker_of(writer)

    os.kill(first, signal.SIGSTOP)  # so that the save is in flight for sure
    pending = writer.begin(state(3.0), version(3), tmp_path)
    os.kill(first, signal.SIGKILL)
    began = SYSTEM.mono()
    with pytest.raises(SaveFailed, match=rf"worker process {first} was ended by signal 9 \(SIGK"):
        pending.wait(LIMIT_S)
    assert SYSTEM.mono() - began < LIMIT_S / 2

    writer.begin(state(4.0), version(4), tmp_path).wait(LIMIT_S)
    assert worker_of(writer) != first
    assert [info.step for info in catalog.committed(tmp_path)] == [4, 2, 1]
    for step in (1, 2, 4):
        assert verify(tmp_path, f"step-{step:08d}") == []
        restored = state(0.0)
        writer.load(restored, tmp_path / f"step-{step:08d}")
        assert torch.equal(restored["w"], torch.full((1000,), float(step)))  # type: ignore[arg-type]
        assert restored["data"] == {"value": float(step)}
    second = worker_of(writer)
    writer.close()
    assert not lives(second)
    with pytest.raises(UsageError, match="closed"):
        writer.begin(state(5.0), version(5), tmp_path)


@pytest.mark.parametrize("kind", ["torch"])
def test_a_worker_that_died_while_idle_costs_no_save(make: Make, tmp_path: Path) -> None:
    writer = make()
    writer.begin(state(1.0), version(1), tmp_path).wait(LIMIT_S)
    first = worker_of(writer)
    end = os.pidfd_open(first)
    try:
        os.kill(first, signal.SIGKILL)
        assert select.select([end], [], [], LIMIT_S)[0]  # all its threads are gone
    finally:
        os.close(end)
    writer.begin(state(2.0), version(2), tmp_path).wait(LIMIT_S)
    assert worker_of(writer) != first


@pytest.mark.parametrize("kind", ["torch"])
def test_a_stuck_worker_is_named_by_the_next_save_and_ended_by_abort(
    make: Make, tmp_path: Path
) -> None:
    writer = make(write_limit_s=0.05)
    writer.begin(state(1.0), version(1), tmp_path).wait(LIMIT_S)
    pid = worker_of(writer)
    os.kill(pid, signal.SIGSTOP)
    waiting = writer.begin(state(2.0), version(2), tmp_path)
    with pytest.raises(SaveFailed, match=rf"has not written .* in 0.05 s .*process {pid}"):
        writer.begin(state(3.0), version(3), tmp_path)
    writer.close(abort=True)
    assert not lives(pid)
    with pytest.raises(SaveFailed):
        waiting.wait(0.0)


@pytest.mark.parametrize("kind", ["torch"])
def test_signals_for_the_job_do_not_end_a_save(make: Make, tmp_path: Path) -> None:
    writer = make()
    writer.begin(state(1.0), version(1), tmp_path).wait(LIMIT_S)
    pid = worker_of(writer)
    os.kill(pid, signal.SIGSTOP)
    pending = writer.begin(state(2.0), version(2), tmp_path)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    os.kill(pid, signal.SIGCONT)
    pending.wait(LIMIT_S)
    assert writer.worker_pid == pid


@pytest.mark.parametrize("kind", ["torch"])
def test_a_folder_that_cannot_be_written_fails_the_save(tmp_path: Path, kind: Kind) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    writer = NvrxShardWriter(kind, file / "checkpoints", rank=0, world=1, keep_last=1)
    try:
        with pytest.raises(SaveFailed, match=r"the save of step 1 failed: .*Not a directory"):
            writer.begin(state(1.0), version(1), tmp_path).wait(LIMIT_S)
        with pytest.raises(CheckpointError, match="thin"):
            writer.begin({"thin": torch.ones(2).to_sparse()}, version(2), tmp_path)
        assert writer.worker_pid is None
    finally:
        writer.close()


@pytest.mark.parametrize("kind", ["torch"])
def test_the_factory_makes_writers_of_a_kind(tmp_path: Path, kind: Kind) -> None:
    place = Place(tmp_path, 2, 4, 3, SYSTEM)
    writer = writer_factory(kind)(place)
    writer.close()
    with pytest.raises(UsageError, match="no checkpoint of kind 'zip'"):
        writer_factory("zip")(place)  # type: ignore[arg-type]


KILLED = (
    HEAD
    + """
kind, root = sys.argv[1], Path(sys.argv[2])
writer = NvrxShardWriter(kind, root, rank=0, world=1, keep_last=3)
state = {f"t{number}": torch.ones(100_000) for number in range(20)}
if "second" in sys.argv:
    writer.begin(state, version(1), root).wait(60)
    print(writer.worker_pid, flush=True)
    sys.stdin.readline()
writer.begin(state, version(2), root)
print("begun", flush=True)
sys.stdin.read()
"""
)


@pytest.mark.parametrize(("kind", "moment"), [("torch", "first"), ("dcp", "second")])
def test_nothing_outlives_a_rank_that_is_killed_with_a_save_in_flight(
    tmp_path: Path, kind: Kind, moment: str
) -> None:
    before, shared = ranks.family(), set(os.listdir("/dev/shm"))
    with ranks.start(tmp_path, KILLED, [kind, tmp_path / "root", moment]) as rank:
        if moment == "second":
            worker = psutil.Process(int(ranks.shown(rank)))
            worker.suspend()  # the save cannot end
            assert rank.stdin is not None
            rank.stdin.write("\n")
            rank.stdin.flush()
        assert ranks.shown(rank) == "begun"
        rank.kill()
    wait_until(lambda: ranks.family() <= before, "every process of the rank is gone", LIMIT_S)
    for name in set(os.listdir("/dev/shm")) - shared:
        # Python tells its tracker of a semaphore after it has made it: a kill in between leaves it.
        assert name.startswith("sem.mp-")
        os.unlink(f"/dev/shm/{name}")
    assert [info.step for info in catalog.committed(tmp_path / "root")] == (
        [1] if moment == "second" else []
    )


UNGUARDED = (
    HEAD
    + """
print("the script runs", flush=True)
root = Path(sys.argv[2])
writer = NvrxShardWriter(sys.argv[1], root, rank=0, world=1, keep_last=3)
writer.begin({"t": torch.ones(10)}, version(1), root).wait(60)
assert Path(__file__).name == "script.py"
"""
)


@pytest.mark.parametrize("kind", ["torch"])
def test_a_script_without_a_guard_is_not_run_again_and_one_without_close_ends(
    tmp_path: Path, kind: Kind
) -> None:
    printed = ranks.run(tmp_path, UNGUARDED, [kind, tmp_path / "root"])
    assert printed == "the script runs\n"
    assert [info.step for info in catalog.committed(tmp_path / "root")] == [1]


@pytest.mark.parametrize("kind", ["torch"])
def test_a_writer_that_is_closed_leaves_no_thread(make: Make, tmp_path: Path) -> None:
    writer = make()
    writer.begin(state(1.0), version(1), tmp_path)
    writer.close()
    assert [info.step for info in catalog.committed(tmp_path)] == [1]  # close has waited
    assert not [one for one in threading.enumerate() if one.name == "keepstep-nvrx"]
    writer.close(abort=True)  # later calls do nothing
