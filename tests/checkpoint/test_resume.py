"""Starting from another run's checkpoint: which one, and what is never taken."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from keepstep.checkpoint import layout, resume
from keepstep.checkpoint.lineage import Lineage
from keepstep.errors import CheckpointCorrupt, CheckpointNotFound
from tests.checkpoint.shards import make_version, save

Told = list[tuple[str, int]]


def commit(root: Path, step: int, *, run: str = "theirs", term: int = 1, round: int = 1) -> Path:
    return root / save(root, make_version(step, run=run, term=term, round=round))[1]


def find(path: Path, exclude: set[str] | None = None, told: Told | None = None) -> tuple[int, str]:
    seen: Told = [] if told is None else told
    return resume.find(
        path, exclude or set(), lambda folder, step, error: seen.append((folder, step))
    )


def cut_manifest(folder: Path) -> None:
    path = folder / layout.MANIFEST
    path.write_bytes(path.read_bytes()[:50])


def test_a_checkpoint_a_folder_of_them_and_a_run_folder_are_all_found(tmp_path: Path) -> None:
    commit(tmp_path / "checkpoints", 5)
    newest = commit(tmp_path / "checkpoints", 10)
    for path in (newest, newest.parent, tmp_path):
        assert find(path) == (10, str(newest))
    older = newest.with_name("step-00000005")
    assert find(older) == (5, str(older))


def test_a_copy_under_another_name_keeps_its_step(tmp_path: Path) -> None:
    copy = tmp_path / "best"
    shutil.copytree(commit(tmp_path, 7), copy)
    assert find(copy) == (7, str(copy))
    assert resume.step_of(tmp_path, "best") == resume.step_of(Path("/"), str(copy)) == 7
    assert resume.step_of(tmp_path, "step-00000009.t1r2") == 9


def test_of_a_folder_the_newest_good_one_is_taken_and_damaged_newer_ones_are_told(
    tmp_path: Path,
) -> None:
    old, good, refused, cut = (commit(tmp_path, step) for step in (5, 10, 15, 20))
    cut_manifest(cut)
    told: Told = []
    assert find(tmp_path, {str(refused)}, told) == (10, str(good))
    assert told == [(str(cut), 20)]
    cut_manifest(old)
    told.clear()
    with pytest.raises(CheckpointNotFound, match="no checkpoint to start from"):
        find(tmp_path, {str(refused), str(good)}, told)
    assert told == [(str(cut), 20), (str(old), 5)]


def test_the_one_that_was_named_is_taken_or_none(tmp_path: Path) -> None:
    named = commit(tmp_path, 10)
    commit(tmp_path, 5)
    with pytest.raises(CheckpointCorrupt, match="to start from is damaged"):
        find(named, {str(named)})
    cut_manifest(named)
    with pytest.raises(CheckpointCorrupt) as caught:
        find(named)
    assert int(caught.value.exit_code) == 65


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_where_nothing_was_saved_nothing_is_found(tmp_path: Path, inside: str) -> None:
    with pytest.raises(CheckpointNotFound) as caught:
        find(tmp_path / inside)
    assert int(caught.value.exit_code) == 65
    assert str(tmp_path) in caught.value.what


def test_what_that_run_has_abandoned_is_not_taken(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    line = Lineage(tmp_path, "theirs", root)
    line.went_on(1, 0)
    old = commit(root, 5)
    commit(root, 10)
    line.went_on(2, 5)
    line.close()
    assert find(tmp_path) == find(root) == (5, str(old))
    newest = commit(root, 7, round=2)
    assert find(tmp_path) == (7, str(newest))


def test_a_folder_of_torchs_checkpoints_has_no_step(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"never decoded here")
    assert find(tmp_path) == (0, str(tmp_path))
    assert resume.step_of(Path("/"), str(tmp_path)) == 0


def test_a_run_starts_elsewhere_only_while_it_has_nothing_of_its_own(tmp_path: Path) -> None:
    theirs = commit(tmp_path / "theirs", 30)
    root = tmp_path / "mine" / "checkpoints"
    root.mkdir(parents=True)
    told: Told = []
    elsewhere = resume.finder(
        tmp_path / "theirs", lambda folder, step, error: told.append((folder, step))
    )
    line = Lineage(tmp_path / "mine", "mine", root, elsewhere=elsewhere)
    assert line.pick(frozenset()) == (30, str(theirs))
    line.went_on(1, 30)
    own = commit(root, 35, run="mine", term=line.term)
    assert line.pick(frozenset()) == (35, own.name)
    with pytest.raises(CheckpointNotFound, match="none of 1 checkpoints"):
        line.pick(frozenset({own.name}))
    line.close()
    assert told == []


def test_a_damaged_one_elsewhere_is_told_once(tmp_path: Path) -> None:
    commit(tmp_path, 5)
    cut_manifest(commit(tmp_path, 10))
    told: Told = []
    find_again = resume.finder(tmp_path, lambda folder, step, error: told.append((folder, step)))
    assert find_again is not None
    assert find_again(()) == find_again(())
    assert [step for _, step in told] == [10]
    assert resume.finder("", lambda folder, step, error: None) is None
