from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import catalog, layout, lineage, retention
from keepstep.checkpoint.catalog import CheckpointInfo
from keepstep.checkpoint.retention import Keep
from keepstep.wire.types import Version
from tests.checkpoint.shards import make_version, save, write


def _info(
    step: int,
    created: float,
    *,
    term: int = 1,
    round: int = 1,
    pinned: bool = False,
    run: str = "demo",
) -> CheckpointInfo:
    version = make_version(step, run=run, term=term, round=round)
    return CheckpointInfo(
        step=step,
        folder=f"step-{step:08d}.t{term}r{round}" + ("" if run == "demo" else "-2"),
        version=version,
        nbytes=1,
        created=created,
        pinned=pinned,
    )


_INFOS = st.lists(
    st.builds(
        _info,
        st.integers(0, 20),
        st.floats(0, 100),
        term=st.integers(1, 3),
        round=st.integers(1, 3),
        pinned=st.booleans(),
        run=st.sampled_from(["demo", "demo", "demo", "other"]),
    ),
    max_size=12,
    unique_by=lambda info: info.folder,
)
_RESUMES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 20)), max_size=3)
_KEEP = st.builds(Keep, st.integers(1, 5), st.integers(-1, 7))


def _abandoned_by(resumes: list[lineage.Resume]) -> Callable[[Version], bool]:
    return lambda version: lineage.is_abandoned(version, resumes)


@given(_INFOS, _KEEP, _RESUMES)
def test_whatever_could_be_restored_or_was_asked_for_stays(
    infos: list[CheckpointInfo], keep: Keep, resumes: list[lineage.Resume]
) -> None:
    abandoned = _abandoned_by(resumes)
    removed = retention.to_remove(infos, keep, abandoned)
    kept = [info for info in infos if info not in removed]
    assert len(removed) + len(kept) == len(infos)
    assert not any(info.pinned for info in removed)
    if keep.every_steps > 0:
        assert all(info.step % keep.every_steps for info in removed)
    for run in {info.version.run for info in infos}:
        usable = [one for one in infos if one.version.run == run and not abandoned(one.version)]
        if usable:  # the one that a restore takes, and the newest of the line of training
            assert max(usable, key=catalog.age) in kept
            assert max(usable, key=retention.in_line) in kept
        still_usable = sum(info in kept for info in usable)
        assert still_usable >= min(len(usable), keep.last)
        if len(usable) < keep.last:
            assert not any(info.version.run == run for info in removed)


@given(_INFOS, _KEEP, _RESUMES)
def test_nothing_goes_that_is_newer_than_enough_others_that_stay(
    infos: list[CheckpointInfo], keep: Keep, resumes: list[lineage.Resume]
) -> None:
    abandoned = _abandoned_by(resumes)
    for info in retention.to_remove(infos, keep, abandoned):
        newer = [
            one
            for one in infos
            if one.version.run == info.version.run
            and retention.in_line(one) > retention.in_line(info)
            and not abandoned(one.version)
        ]
        assert len(newer) >= keep.last


@given(_INFOS, _KEEP)
def test_only_what_has_a_reason_stays(infos: list[CheckpointInfo], keep: Keep) -> None:
    removed = retention.to_remove(infos, keep)
    for run in {info.version.run for info in infos}:
        ours = [info for info in infos if info.version.run == run]
        for_no_reason = [
            info
            for info in ours
            if info not in removed
            and not info.pinned
            and not (keep.every_steps > 0 and info.step % keep.every_steps == 0)
        ]
        assert len(for_no_reason) <= keep.last + 1


@given(_INFOS, _KEEP)
def test_the_answer_does_not_depend_on_order_and_a_second_pass_finds_nothing(
    infos: list[CheckpointInfo], keep: Keep
) -> None:
    removed = retention.to_remove(infos, keep)
    assert retention.to_remove(infos[::-1], keep) == removed
    kept = [info for info in infos if info not in removed]
    assert retention.to_remove(kept, keep) == []


@given(st.integers(1, 10), st.integers(1, 5))
def test_in_a_run_without_rollbacks_exactly_the_last_ones_stay(count: int, last: int) -> None:
    infos = [_info(step, float(step)) for step in range(count)]
    assert retention.to_remove(infos, Keep(last)) == infos[: max(count - last, 0)]


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 7))
def test_multiples_and_pinned_ones_stay_beside_the_last_ones(
    count: int, last: int, every: int
) -> None:
    infos = [_info(step, float(step), pinned=step == 3) for step in range(1, count + 1)]
    removed = {info.step for info in retention.to_remove(infos, Keep(last, every))}
    assert removed == {
        step for step in range(1, count - last + 1) if step % every != 0 and step != 3
    }


@given(_INFOS, st.integers(-3, 0), st.integers(0, 3))
def test_zero_keeps_everything(infos: list[CheckpointInfo], last: int, every: int) -> None:
    assert retention.to_remove(infos, Keep(last, every)) == []


def test_after_a_rollback_the_checkpoint_just_committed_stays() -> None:
    abandoned, older, fresh = _info(600, 30.0), _info(500, 20.0), _info(550, 40.0, round=2)
    assert retention.to_remove([abandoned, older, fresh], Keep(1)) == [older]


def test_a_late_commit_of_an_abandoned_line_does_not_push_out_the_one_resumed_from() -> None:
    resumed_from, late = _info(500, 20.0), _info(600, 40.0)
    assert retention.to_remove([resumed_from, late], Keep(1)) == [resumed_from]
    gone = _abandoned_by([(1, 2, 500)])
    assert retention.to_remove([resumed_from, late], Keep(1), gone) == []
    fresh = _info(510, 50.0, round=2)
    assert retention.to_remove([resumed_from, late, fresh], Keep(1), gone) == [resumed_from, late]


def test_checkpoints_of_another_run_in_the_folder_are_not_touched(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, make_version(step, run="other", term=9))
    for step in (3, 4, 5):
        save(tmp_path, make_version(step))
    assert retention.apply(tmp_path, Keep(1), make_version(5)) == ["step-00000003", "step-00000004"]
    assert sorted(info.step for info in catalog.committed(tmp_path)) == [1, 2, 5]


def test_applying_removes_the_folders(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, make_version(step), at=float(step))
    removed = retention.apply(tmp_path, Keep(2), make_version(5))
    assert removed == [f"step-0000000{step}" for step in (1, 2, 3)]
    assert [info.step for info in catalog.committed(tmp_path)] == [5, 4]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
    assert retention.apply(tmp_path, Keep(2), make_version(5)) == []


def test_nothing_is_removed_unless_the_commit_that_is_the_reason_is_there(tmp_path: Path) -> None:
    for step in range(1, 4):
        save(tmp_path, make_version(step))
    assert retention.apply(tmp_path, Keep(1), make_version(4)) == []
    _, folder = save(tmp_path, make_version(4))
    (tmp_path / folder / "rank-00000.safetensors").unlink()
    assert retention.apply(tmp_path, Keep(1), make_version(4)) == []
    assert [info.step for info in catalog.committed(tmp_path)] == [3, 2, 1]


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    for step in range(1, 4):
        _, folder = save(tmp_path, make_version(step), at=float(step))
    (tmp_path / folder / "rank-00000.safetensors").unlink()
    assert retention.apply(tmp_path, Keep(1), make_version(2)) == ["step-00000001"]
    assert [info.step for info in catalog.committed(tmp_path)] == [2]


def test_pinned_ones_multiples_and_those_excluded_stay_on_storage(tmp_path: Path) -> None:
    for step in range(1, 9):
        save(tmp_path, make_version(step))
    assert catalog.pin(tmp_path, "step-00000001", "the first")
    retention.apply(tmp_path, Keep(1, 4), make_version(8), exclude=["step-00000003"])
    assert sorted(info.step for info in catalog.committed(tmp_path)) == [1, 3, 4, 8]
    assert catalog.unpin(tmp_path, "step-00000001")
    assert retention.apply(tmp_path, Keep(1, 4), make_version(8)) == [
        "step-00000001",
        "step-00000003",
    ]


def test_the_rounds_written_down_say_which_ones_are_abandoned(tmp_path: Path) -> None:
    root, terms = tmp_path / "checkpoints", tmp_path / "terms"
    for step in (500, 600):
        save(root, make_version(step))
    terms.mkdir()
    lines = [{"run": "demo", "round": 2, "resume": 500}, {"run": "demo", "round": 1, "resume": 0}]
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines) + b'{"run": "de'
    (terms / "00000001").write_bytes(text)
    assert retention.apply(root, Keep(1), make_version(600)) == []
    assert retention.apply(root, Keep(1), make_version(600), terms=tmp_path / "none") == [
        "step-00000500"
    ]


def test_saves_that_commit_in_the_other_order_are_kept_by_their_place_in_training() -> None:
    first, second, third = _info(1, 11.0), _info(2, 10.0), _info(3, 12.0)
    assert retention.to_remove([third, first, second], Keep(2)) == [first]


def test_sweeping_removes_what_killed_saves_left_and_nothing_else(tmp_path: Path) -> None:
    _, old = save(tmp_path, make_version(1))
    write(tmp_path, make_version(2), 0)
    _, flying = write(tmp_path, make_version(3), 0)
    names = [".rank-00000.safetensors.77-0123abcd.tmp", ".manifest.json.77-0123abcd.tmp"]
    (tmp_path / "terms").mkdir()
    stale = [tmp_path / old / name for name in names] + [tmp_path / names[0]]
    stale.append(tmp_path / "terms" / ".2.77-0123abcd.tmp")
    kept = [tmp_path / old / ".hidden.tmp", tmp_path / flying / names[0], tmp_path / "notes.tmp"]
    for file in (*stale, *kept):
        file.write_text("x")
        os.utime(file, (1, 1))
    _, newest = save(tmp_path, make_version(5))
    in_newest, fresh = tmp_path / newest / names[0], tmp_path / old / ".x.1-00000000.tmp"
    in_newest.write_text("x")
    os.utime(in_newest, (1, 1))
    fresh.write_text("x")
    published = (tmp_path / newest / layout.MANIFEST).stat().st_mtime_ns
    os.utime(fresh, ns=(published + 10**9, published + 10**9))
    retention.sweep(tmp_path, exclude=[flying])
    assert not any(file.exists() for file in stale)
    assert all(file.exists() for file in (*kept, in_newest, fresh))
    assert layout.list_folders(tmp_path) == [old, flying, newest]
