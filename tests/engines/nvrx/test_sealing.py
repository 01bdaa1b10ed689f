"""The thread that follows saves, with a writer that writes at once and no process of NVRx."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from keepstep.checkpoint import catalog, layout, torch_files
from keepstep.checkpoint.manifest import Layout
from keepstep.checkpoint.shard_file import TensorSpec
from keepstep.checkpoint.torch_state import flatten
from keepstep.checkpoint.verify import verify
from keepstep.checkpoint.writer import claim_folder
from keepstep.clock import SYSTEM
from keepstep.engines.nvrx.calls import Calls
from keepstep.engines.nvrx.sealing import Follower, Save
from keepstep.engines.nvrx.staging import Staged, Staging
from keepstep.errors import SaveFailed
from keepstep.rank.local_writer import LocalWrite
from keepstep.wire.types import Version
from tests.checkpoint.torch_worlds import version

LIMIT_S = 30.0


class NoCalls:
    """A worker that does not exist."""

    pid = None

    def wait(self, seconds: float) -> None:
        threading.Event().wait(0.001)

    def kill(self) -> None: ...

    def close(self) -> None: ...


class AtOnce:
    """Writes in ``start``; ``gate`` holds back what is written, ``spoil`` changes it."""

    layout: Layout = "torch"
    needs_others = False
    file = "rank-00000.pt"

    def __init__(self) -> None:
        self.calls = cast("Calls", NoCalls())
        self.gate = threading.Event()
        self.gate.set()
        self.told: list[str] = []
        self.spoil: Callable[[Path], None] = lambda path: None
        self.completes: Callable[[Path], list[str]] = lambda folder: []

    def start(self, staged: Staged, folder: Path) -> None:
        self.told.append("start")
        torch.save(dict(staged.parcel.open().tensors), folder / self.file)
        self.spoil(folder / self.file)

    def finished(self) -> bool:
        return self.gate.is_set()

    def spans(self, folder: Path, specs: Sequence[TensorSpec]) -> dict[str, tuple[int, int]]:
        found = torch_files.records(folder / self.file)
        return {spec.name: span for spec, span in zip(specs, found, strict=True)}

    def complete(
        self,
        folder: Path,
        version: Version,
        specs: Sequence[TensorSpec],
        spans: Mapping[str, tuple[int, int]],
    ) -> list[str]:
        self.told.append("complete")
        return self.completes(folder)


class Bench:
    """A follower of rank 0 (or another) in ``root``."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.rank: int = options.pop("rank", 0)
        self.writing = AtOnce()
        self.writing.file = layout.torch_name(self.rank)
        self.staging = Staging()
        self.commits: list[tuple[int, str]] = []
        self.guarded = 0
        self.follower = Follower(
            self.writing,
            root,
            **{
                "rank": self.rank,
                "keep_last": 3,
                "clock": SYSTEM,
                "guard": self._guard,
                "on_commit": lambda of, folder, nbytes, seconds: self.commits.append(
                    (of.step, folder)
                ),
                **options,
            },
        )

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        self.guarded += 1
        assert catalog.newest(self.root) is None or self.guarded > 1
        yield

    def begin(self, of: Version, state: Mapping[str, object] | None = None) -> LocalWrite:
        assert self.follower.wait_free(LIMIT_S)
        snapshot = flatten(state or {"t": torch.ones(10)}, rank=self.rank, world=of.world)
        pending = LocalWrite(of, self.rank, self.root, SYSTEM)
        self.follower.submit(
            Save(
                version=of,
                staged=self.staging.copy(snapshot),
                values=snapshot.values,
                pending=pending,
                began=SYSTEM.mono(),
            )
        )
        return pending

    def close(self) -> None:
        self.follower.stop()
        self.staging.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def test_saves_are_committed_in_a_guard_told_and_retained(bench: Bench, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        bench.begin(version(step)).wait(LIMIT_S)
    assert [info.step for info in catalog.committed(tmp_path)] == [4, 3, 2]
    assert not [problem for step in (2, 3, 4) for problem in verify(tmp_path, f"step-{step:08d}")]
    assert bench.commits == [(step, f"step-{step:08d}") for step in (1, 2, 3, 4)]
    assert bench.guarded == 4


def test_the_memory_is_free_once_nvrx_is_done_even_if_others_are_awaited(bench: Bench) -> None:
    bench.writing.gate.clear()
    pending = bench.begin(version(1, world=2))
    assert not bench.follower.wait_free(0.01)
    bench.writing.gate.set()
    assert bench.follower.wait_free(LIMIT_S)
    assert not bench.follower.wait_settled(0.01)
    assert not pending.done()
    bench.begin(version(2)).wait(LIMIT_S)  # overtakes it


def test_rank_0_gives_up_a_save_of_which_a_rank_brings_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, commit_limit_s=0.05)
    try:
        pending = bench.begin(version(1, world=3))
        with pytest.raises(SaveFailed, match=r"missing are those of the ranks \[1, 2\]"):
            pending.wait(LIMIT_S)
    finally:
        bench.close()
    assert catalog.committed(tmp_path) == []


def test_metadata_of_all_ranks_is_made_after_the_others_and_sealed_too(tmp_path: Path) -> None:
    first, second = Bench(tmp_path), Bench(tmp_path, rank=1)
    first.writing.needs_others = True

    def completes(folder: Path) -> list[str]:
        assert (folder / layout.receipt_name(1)).exists()
        (folder / ".metadata").write_bytes(b"all")
        return [".metadata"]

    first.writing.completes = completes
    try:
        saves = [first.begin(version(1, world=2)), second.begin(version(1, world=2))]
        for pending in saves:
            pending.wait(LIMIT_S)
    finally:
        first.close()
        second.close()
    found = catalog.load(tmp_path, "step-00000001")
    assert found.others.keys() == {".metadata"}
    assert second.writing.told == ["start"]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "not a whole file"),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: torch.save({"t": torch.zeros(10)}, path), "has other bytes"),
        (lambda path: torch.save({"t": torch.zeros(11)}, path), "has 40 bytes and should lie"),
    ],
    ids=["cut", "gone", "later values", "another size"],
)
def test_a_file_that_is_not_the_copy_is_never_committed(
    bench: Bench, tmp_path: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    bench.writing.spoil = spoil
    with pytest.raises(SaveFailed, match=reason):
        bench.begin(version(1)).wait(LIMIT_S)
    assert catalog.committed(tmp_path) == []
    assert not (tmp_path / "step-00000001" / bench.writing.file).exists()  # its space is free again
    bench.writing.spoil = lambda path: None
    bench.begin(version(2)).wait(LIMIT_S)


def test_a_bug_settles_the_save_and_the_thread_goes_on(bench: Bench) -> None:
    def bug(path: Path) -> None:
        raise LookupError("a bug")

    bench.writing.spoil = bug
    with pytest.raises(SaveFailed, match=r"step 1 failed: LookupError\('a bug'\)"):
        bench.begin(version(1)).wait(LIMIT_S)
    bench.writing.spoil = lambda path: None
    bench.begin(version(2)).wait(LIMIT_S)


def test_what_the_worker_tells_is_in_the_error(bench: Bench) -> None:
    staged: list[Staged] = []
    start = bench.writing.start

    def refuse(one: Staged, folder: Path) -> None:
        start(one, folder)
        one.parcel.open().put_error(OSError(28, "No space left on device"))
        staged.append(one)

    bench.writing.start = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(SaveFailed, match=r"could not write its file: OSError: .*No space left"):
        bench.begin(version(1)).wait(LIMIT_S)
    assert staged


def test_a_sealed_file_is_never_written_again(bench: Bench, tmp_path: Path) -> None:
    of = version(1)
    folder = tmp_path / claim_folder(tmp_path, of)
    (folder / layout.receipt_name(0)).write_text("an earlier one")
    with pytest.raises(SaveFailed, match="was sealed before"):
        bench.begin(of).wait(LIMIT_S)
    assert bench.writing.told == []


def test_stopping_fails_what_is_not_settled(bench: Bench) -> None:
    bench.writing.gate.clear()
    pending = bench.begin(version(1))
    bench.follower.stop()
    with pytest.raises(SaveFailed, match="its writer was closed"):
        pending.wait(0.0)
    bench.follower.stop()  # a second time does nothing
