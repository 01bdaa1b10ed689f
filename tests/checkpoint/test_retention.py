from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import catalog, retention
from keepstep.checkpoint.catalog import CheckpointInfo
from tests.checkpoint.shards import make_version, save


def _info(step: int, created: float, *, term: int = 1, round: int = 1) -> CheckpointInfo:
    version = make_version(step, term=term, round=round)
    return CheckpointInfo(
        step=step,
        folder=f"step-{step:08d}.t{term}r{round}",
        version=version,
        nbytes=1,
        created=created,
    )


_INFOS = st.lists(
    st.builds(
        _info,
        st.integers(0, 20),
        st.floats(0, 100),
        term=st.integers(1, 3),
        round=st.integers(1, 3),
    ),
    max_size=12,
    unique_by=lambda info: info.folder,
)


@given(_INFOS, st.integers(1, 5))
def test_the_offered_one_and_the_last_committed_ones_always_stay(
    infos: list[CheckpointInfo], keep_last: int
) -> None:
    removed = retention.to_remove(infos, keep_last)
    kept = [info for info in infos if info not in removed]
    assert len(removed) + len(kept) == len(infos)
    assert min(len(infos), keep_last) <= len(kept) <= keep_last + 1
    if infos:
        assert max(infos, key=catalog.age) in kept
        assert max(infos, key=retention.lineage) in kept
    offered = max(infos, key=catalog.age, default=None)
    for info in removed:
        line = retention.lineage(info)
        assert all(line <= retention.lineage(other) for other in kept if other != offered)


@given(_INFOS, st.integers(1, 5))
def test_the_answer_does_not_depend_on_order_and_a_second_pass_finds_nothing(
    infos: list[CheckpointInfo], keep_last: int
) -> None:
    removed = retention.to_remove(infos, keep_last)
    assert retention.to_remove(infos[::-1], keep_last) == removed
    kept = [info for info in infos if info not in removed]
    assert retention.to_remove(kept, keep_last) == []


@given(st.integers(1, 10), st.integers(1, 5))
def test_in_a_run_without_rollbacks_exactly_the_last_ones_stay(count: int, keep_last: int) -> None:
    infos = [_info(step, float(step)) for step in range(count)]
    assert retention.to_remove(infos, keep_last) == infos[: max(count - keep_last, 0)]


@given(_INFOS, st.integers(-3, 0))
def test_zero_keeps_everything(infos: list[CheckpointInfo], keep_last: int) -> None:
    assert retention.to_remove(infos, keep_last) == []


def test_after_a_rollback_the_checkpoint_just_committed_stays() -> None:
    abandoned, older, fresh = _info(600, 30.0), _info(500, 20.0), _info(550, 40.0, round=2)
    assert retention.to_remove([abandoned, older, fresh], 1) == [older]


def test_applying_removes_the_folders(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, make_version(step), at=float(step))
    assert retention.apply(tmp_path, 2) == [f"step-0000000{step}" for step in (1, 2, 3)]
    assert [info.step for info in catalog.committed(tmp_path)] == [5, 4]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]
    assert retention.apply(tmp_path, 2) == []


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    for step in range(1, 4):
        _, folder = save(tmp_path, make_version(step), at=float(step))
    (tmp_path / folder / "rank-00000.safetensors").unlink()
    assert retention.apply(tmp_path, 1) == ["step-00000001"]
    assert [info.step for info in catalog.committed(tmp_path)] == [2]


def test_saves_that_commit_in_the_other_order_are_kept_by_their_place_in_training() -> None:
    first, second, third = _info(1, 11.0), _info(2, 10.0), _info(3, 12.0)
    assert retention.to_remove([third, first, second], 2) == [first]
