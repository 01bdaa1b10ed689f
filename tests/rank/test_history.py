"""What a restore takes: from a folder alone, and from a run that another engine began."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint import layout
from keepstep.checkpoint.lineage import Lineage
from keepstep.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointNotWritable,
)
from keepstep.rank.history import FolderHistory, RunHistory
from tests.checkpoint import shards

RUN = "demo"
Told = list[tuple[str, int]]


@contextlib.contextmanager
def run_history(run_dir: Path, told: Told | None = None) -> Iterator[RunHistory]:
    """A history of ``RUN``; ``told`` gets folder and step of what is damaged."""
    heard: Told = [] if told is None else told
    history = RunHistory(
        run_dir,
        RUN,
        run_dir / "checkpoints",
        lambda folder, step, error: heard.append((folder, step)),
    )
    try:
        yield history
    finally:
        history.close()


@contextlib.contextmanager
def lineage(run_dir: Path) -> Iterator[Lineage]:
    """The coordinator's view of the same run."""
    line = Lineage(run_dir, RUN, run_dir / "checkpoints")
    try:
        yield line
    finally:
        line.close()


def commit(run_dir: Path, step: int, term: int, round: int = 1, run: str = RUN) -> str:
    """A committed checkpoint of one rank; returns its folder."""
    version = shards.make_version(step, run=run, term=term, round=round, world=1)
    return shards.save(run_dir / "checkpoints", version)[1]


def cut_manifest(run_dir: Path, folder: str) -> None:
    """Damage that shows without reading the shards."""
    path = run_dir / "checkpoints" / folder / layout.MANIFEST
    path.write_bytes(path.read_bytes()[:100])


# --- a run's history ------------------------------------------------------------------------------


def test_a_new_run_resumes_from_nothing_and_writes_that_down(tmp_path: Path) -> None:
    with run_history(tmp_path) as history:
        assert history.choose([]) == ""
        history.went_on(1, 0)
        assert history.claim() == 1
    assert (tmp_path / "terms" / "00000001").read_bytes() == (
        b'{"run":"demo","round":1,"resume":0}\n'
    )


def test_saves_get_the_term_whose_rounds_are_written_and_each_claim_is_another(
    tmp_path: Path,
) -> None:
    with run_history(tmp_path) as history, run_history(tmp_path) as other:
        history.choose([])
        assert (history.claim(), other.claim()) == (1, 2)
        assert (history.claim(), other.claim()) == (3, 4)


def test_a_coordinator_goes_on_where_ranks_left_off(tmp_path: Path) -> None:
    with run_history(tmp_path) as history:
        history.went_on(1, 0)
        term = history.claim()
        old = commit(tmp_path, 5, term)
        commit(tmp_path, 10, term)
        history.went_on(2, 5)  # step 10 is abandoned
        newest = commit(tmp_path, 7, term, round=2)
    with lineage(tmp_path) as line:
        assert line.term == term + 1
        assert line.pick(frozenset()) == (7, newest)
        assert line.pick(frozenset({newest})) == (5, old)


def test_ranks_go_on_where_a_coordinator_left_off(tmp_path: Path) -> None:
    with lineage(tmp_path) as line:
        line.went_on(1, 0)
        old = commit(tmp_path, 5, line.term)
        commit(tmp_path, 10, line.term)
        line.went_on(2, 5)
        term = line.term
    with run_history(tmp_path) as history:
        assert history.choose([]) == old
        history.went_on(1, 5)
        assert history.claim() == term + 1
        newest = commit(tmp_path, 7, term + 1)
        assert history.choose([]) == newest


def test_a_run_whose_checkpoints_are_all_abandoned_starts_anew(tmp_path: Path) -> None:
    with run_history(tmp_path) as history:
        history.went_on(1, 0)
        commit(tmp_path, 10, history.claim())
        history.went_on(2, 0)
    with run_history(tmp_path) as later:
        assert later.choose([]) == ""


def test_a_damaged_newest_is_told_once_and_the_next_older_good_one_taken(tmp_path: Path) -> None:
    good, refused, cut = (commit(tmp_path, step, 1) for step in (5, 10, 15))
    cut_manifest(tmp_path, cut)
    told: Told = []
    with run_history(tmp_path, told) as history:
        assert history.choose([]) == refused
        history.damaged(refused, "a byte")
        assert history.choose([refused]) == good
        history.damaged(refused, "a byte")
        with pytest.raises(CheckpointNotFound, match="none of 3"):
            history.choose([refused, good])
    assert told == [(cut, 15), (refused, 10)]


def test_checkpoints_of_another_run_are_refused(tmp_path: Path) -> None:
    commit(tmp_path, 5, 1, run="other")
    with (
        run_history(tmp_path) as history,
        pytest.raises(CheckpointMismatch, match="of run other, not of demo"),
    ):
        history.choose([])


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "terms").write_text("in the way")
    calls: list[Callable[[RunHistory], object]] = [
        lambda history: history.claim(),
        lambda history: history.choose([]),
        lambda history: history.went_on(1, 0),
    ]
    for call in calls:
        with (
            run_history(tmp_path) as history,
            pytest.raises(CheckpointNotWritable, match="cannot be written") as found,
        ):
            call(history)
        assert found.value.where == str(tmp_path)


class _Launch:
    """The history of one launch, by ranks or by a coordinator."""

    def __init__(self, run_dir: Path, native: bool) -> None:
        self.native = native
        self._root = run_dir / "checkpoints"
        self._line = Lineage(run_dir, RUN, self._root) if native else None
        self._history = RunHistory(run_dir, RUN, self._root)
        self._term = 0
        self.round = 0

    def resume(self, refused: set[str]) -> str:
        """Choose a checkpoint and go on from it."""
        self.round += 1
        if self._line is not None:
            step, folder = self._line.pick(frozenset(refused))
            self._line.went_on(self.round, step)
            return folder
        folder = self._history.choose(refused)
        name = layout.parse_folder(folder)
        self._history.went_on(self.round, name.step if name else 0)
        return folder

    def term(self) -> int:
        """The term that saves of this launch have."""
        if self._line is not None:
            return self._line.term
        self._term = self._term or self._history.claim()
        return self._term

    def close(self) -> None:
        """Close the files."""
        self._history.close()
        if self._line is not None:
            self._line.close()


_MOVES = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "rollback", "relaunch", "engine"]), st.integers(1, 3)
    ),
    max_size=12,
)


@settings(max_examples=30)
@given(_MOVES)
def test_whoever_restores_gets_the_last_save_of_the_line_that_training_is_on(
    moves: list[tuple[str, int]],
) -> None:
    # The model: saves of the line, in order. Going back cuts its end off for everybody after.
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as files:

        def launch(native: bool) -> _Launch:
            return files.enter_context(contextlib.closing(_Launch(Path(name), native)))

        line: list[tuple[int, str]] = []
        step, now = 0, launch(native=False)
        assert now.resume(set()) == ""
        for move, count in moves:
            if move == "save":
                step += count
                line.append((step, commit(Path(name), step, now.term(), now.round)))
                continue
            kept = max(1, len(line) - count + 1)
            refused = {folder for _, folder in line[kept:]}
            del line[kept:]
            if move != "rollback":
                now = launch(native=now.native != (move == "engine"))
            assert now.resume(refused) == (line[-1][1] if line else "")
            step = line[-1][0] if line else 0


# --- a folder's history ---------------------------------------------------------------------------


def folder_history(root: Path, told: list[str], run: str | None = None) -> FolderHistory:
    return FolderHistory(root, run, shards.FixedClock(), lambda folder, why: told.append(folder))


def test_a_term_of_a_folder_is_above_all_that_were_used_there(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    history = folder_history(root, [])
    assert (history.claim(), folder_history(root, []).claim()) == (1, 2)
    commit(tmp_path, 5, term=8)
    assert history.claim() == 9


def test_a_folder_gives_its_newest_good_checkpoint_and_tells_once_of_damaged_newer_ones(
    tmp_path: Path,
) -> None:
    old, good, cut = (commit(tmp_path, step, 1) for step in (5, 10, 15))
    for folder in (old, cut):
        cut_manifest(tmp_path, folder)
    told: list[str] = []
    history = folder_history(tmp_path / "checkpoints", told)
    assert history.choose([]) == good
    history.went_on(1, 0)  # a folder does not remember it
    assert history.choose([]) == good
    assert told == [cut]
    with pytest.raises(CheckpointCorrupt, match="all 3"):
        history.choose([good])
    assert told == [cut, old]


def test_an_empty_folder_gives_nothing_and_checkpoints_of_other_runs_are_refused(
    tmp_path: Path,
) -> None:
    root = tmp_path / "checkpoints"
    assert folder_history(root, []).choose([]) == ""
    theirs = commit(tmp_path, 5, 1, run="other")
    assert folder_history(root, []).choose([]) == theirs
    with pytest.raises(CheckpointMismatch, match="of run 'other', this is run 'demo'"):
        folder_history(root, [], RUN).choose([])
    ours = commit(tmp_path, 3, 1)
    assert folder_history(root, [], RUN).choose([]) == ours


def test_a_folder_of_this_run_with_the_manifest_of_another_is_told(tmp_path: Path) -> None:
    shards.save(tmp_path, shards.make_version(1, run="mine"))
    _, mine = shards.save(tmp_path, shards.make_version(2, run="mine"))
    _, other = shards.save(tmp_path / "elsewhere", shards.make_version(2, run="other"))
    shards.save(tmp_path, shards.make_version(3, run="other"))  # as it should be, and not ours
    for path in (tmp_path / "elsewhere" / other).iterdir():
        if path.name != layout.VERSION_FILE:
            path.replace(tmp_path / mine / path.name)
    told: list[tuple[str, str]] = []
    history = FolderHistory(tmp_path, "mine", warn=lambda *words: told.append(words))
    assert history.choose([]) == "step-00000001"
    ((folder, why),) = told
    assert folder == mine and "its manifest of 'other'" in why
