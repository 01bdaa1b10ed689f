from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from keepstep.checkpoint.lineage import Lineage
from keepstep.errors import CheckpointMismatch, CheckpointNotFound
from tests.checkpoint.shards import make_version, save

RUN = "demo"


@contextmanager
def lineage(folder: Path, run: str = RUN) -> Iterator[Lineage]:
    (folder / "checkpoints").mkdir(exist_ok=True)
    made = Lineage(folder, run, folder / "checkpoints")
    try:
        yield made
    finally:
        made.close()


def commit(folder: Path, step: int, *, term: int = 1, round: int = 1, run: str = RUN) -> str:
    return save(folder / "checkpoints", make_version(step, term=term, round=round, run=run))[1]


def test_each_coordinator_has_a_term_of_its_own(tmp_path: Path) -> None:
    with lineage(tmp_path) as first, lineage(tmp_path) as second:
        assert (first.term, second.term) == (1, 2)
    with lineage(tmp_path) as third:
        assert third.term == 3


def test_a_term_that_another_claimed_in_between_is_passed_over(tmp_path: Path) -> None:
    with lineage(tmp_path):
        (tmp_path / "terms" / "00000002").touch()
        (tmp_path / "terms" / "notes").touch()
        with lineage(tmp_path) as later:
            assert later.term == 3


def test_without_checkpoints_a_run_starts_from_the_start(tmp_path: Path) -> None:
    with lineage(tmp_path) as line:
        assert line.pick(frozenset()) == (0, "")


def test_the_newest_checkpoint_is_taken_that_is_not_damaged(tmp_path: Path) -> None:
    old, new = commit(tmp_path, 5), commit(tmp_path, 10)
    with lineage(tmp_path) as line:
        assert line.pick(frozenset()) == (10, new)
        assert line.pick(frozenset({new})) == (5, old)


def test_when_every_checkpoint_is_damaged_the_run_does_not_start_again_in_silence(
    tmp_path: Path,
) -> None:
    folder = commit(tmp_path, 5)
    with lineage(tmp_path) as line, pytest.raises(CheckpointNotFound, match="none of 1"):
        line.pick(frozenset({folder}))


def test_checkpoints_of_another_run_end_the_job(tmp_path: Path) -> None:
    commit(tmp_path, 5, run="other")
    with lineage(tmp_path) as line, pytest.raises(CheckpointMismatch, match="of run other"):
        line.pick(frozenset())


def test_a_step_above_what_a_later_round_resumed_from_is_abandoned(tmp_path: Path) -> None:
    old = commit(tmp_path, 5)
    commit(tmp_path, 10)
    with lineage(tmp_path) as line:
        line.went_on(1, 0)
        line.went_on(2, 5)
        assert line.abandoned(make_version(10, round=1))
        assert not line.abandoned(make_version(5, round=1))
        assert not line.abandoned(make_version(10, round=2))
        assert line.pick(frozenset()) == (5, old)


def test_abandoned_steps_are_known_to_the_next_coordinator(tmp_path: Path) -> None:
    old = commit(tmp_path, 5)
    commit(tmp_path, 10)
    with lineage(tmp_path) as line:
        line.went_on(1, 0)
        line.went_on(2, 5)
    with lineage(tmp_path) as later:
        assert later.pick(frozenset()) == (5, old)
        newest = commit(tmp_path, 7, term=later.term)
        assert later.pick(frozenset()) == (7, newest)


def test_abandoned_checkpoints_alone_let_a_run_start_from_the_start(tmp_path: Path) -> None:
    commit(tmp_path, 10)
    with lineage(tmp_path) as line:
        line.went_on(1, 0)
        line.went_on(2, 0)
        assert line.pick(frozenset()) == (0, "")


def test_a_round_is_on_storage_before_any_rank_is_told(tmp_path: Path) -> None:
    with lineage(tmp_path) as line:
        line.went_on(1, 0)
        line.went_on(2, 5)
        raw = (tmp_path / "terms" / "00000001").read_bytes().splitlines()
    assert [msgspec.json.decode(text) for text in raw] == [
        {"run": RUN, "round": 1, "resume": 0},
        {"run": RUN, "round": 2, "resume": 5},
    ]


def test_a_line_cut_by_a_kill_does_not_count(tmp_path: Path) -> None:
    newest = commit(tmp_path, 10)
    with lineage(tmp_path) as line:
        line.went_on(2, 10)
    with (tmp_path / "terms" / "00000001").open("ab") as file:
        file.write(b'{"run":"demo","round":3,"res')
    with lineage(tmp_path) as later:
        assert later.pick(frozenset()) == (10, newest)


def test_a_damaged_manifest_that_is_passed_over_is_told_once_and_an_older_one_is_not(
    tmp_path: Path,
) -> None:
    old, good, cut = commit(tmp_path, 5), commit(tmp_path, 10), commit(tmp_path, 15)
    for folder in (old, cut):
        manifest = tmp_path / "checkpoints" / folder / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:100])
    told: list[tuple[str, int]] = []
    line = Lineage(
        tmp_path,
        RUN,
        tmp_path / "checkpoints",
        lambda folder, step, error: told.append((folder, step)),
    )
    try:
        assert line.pick(frozenset()) == (10, good)
        assert line.pick(frozenset()) == (10, good)
        assert told == [(cut, 15)]
        with pytest.raises(CheckpointNotFound, match="none of 3"):
            line.pick(frozenset({good}))
        assert told == [(cut, 15), (old, 5)]
    finally:
        line.close()
