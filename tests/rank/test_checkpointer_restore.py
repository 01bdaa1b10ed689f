"""``Checkpointer.restore``: older ones where newer are damaged, others' runs, and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from keepstep.checkpoint import layout
from keepstep.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointNotFound
from keepstep.rank.checkpointer import Checkpointer
from tests.checkpoint.torch_worlds import save, version


def state(value: float = 0.0) -> dict[str, torch.Tensor | int]:
    return {"t": torch.full((3,), value), "n": int(value)}


def commit(root: Path, step: int, run: str = "mine") -> Path:
    """A checkpoint of one rank whose values are its step."""
    return root / save(root, {"d": state(step)}, version(step, run=run))


def spoil(folder: Path) -> None:
    path = folder / layout.shard_name(0)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def restore(checkpointer: Checkpointer, data: dict[str, torch.Tensor | int]) -> int:
    with checkpointer:
        return checkpointer.restore({"d": data})


def test_damage_found_while_reading_makes_it_take_the_next_older_one(tmp_path: Path) -> None:
    commit(tmp_path, 5)
    for step in (10, 15):
        spoil(commit(tmp_path, step))
    data = state()
    with pytest.warns(RuntimeWarning) as caught:
        assert restore(Checkpointer(tmp_path), data) == 5
    assert data["t"].tolist() == [5, 5, 5] and data["n"] == 5  # type: ignore[union-attr]
    texts = [str(one.message) for one in caught]
    assert ["step-00000015" in texts[0], "step-00000010" in texts[1]] == [True, True]
    assert "bytes 0 to" in texts[0] and layout.shard_name(0) in texts[0]


def test_where_no_older_one_is_left_the_error_says_that_the_state_must_not_be_used(
    tmp_path: Path,
) -> None:
    for step in (5, 10):
        spoil(commit(tmp_path, step))
    data = state()
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(CheckpointCorrupt, match=r"all 2 .*must not be used") as caught,
    ):
        restore(Checkpointer(tmp_path), data)
    assert int(caught.value.exit_code) == 65
    assert data["n"] == 0


def test_a_new_run_starts_from_anothers_and_goes_on_with_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    theirs, mine = tmp_path / "theirs" / "checkpoints", tmp_path / "mine"
    before = {path: path.read_bytes() for path in commit(theirs, 20, "theirs").iterdir()}
    data = state()
    with Checkpointer(mine, run_id="mine", resume_from=tmp_path / "theirs") as checkpointer:
        assert checkpointer.restore({"d": data}) == 20
        assert data["n"] == 20
        assert f"resuming after step 20 from {theirs / 'step-00000020'}" in capfd.readouterr().err
        data["n"] = 21
        checkpointer.async_save({"d": data}, 21)
        checkpointer.finalize()
        assert checkpointer.restore({"d": data}) == 21
    assert "resuming" not in capfd.readouterr().err
    assert layout.list_folders(mine) == ["step-00000021"]
    assert {path: path.read_bytes() for path in (theirs / "step-00000020").iterdir()} == before
    assert layout.list_folders(theirs) == ["step-00000020"]


def test_of_anothers_damaged_ones_the_next_older_is_taken_but_not_where_one_is_named(
    tmp_path: Path,
) -> None:
    theirs = tmp_path / "theirs"
    commit(theirs, 5, "theirs")
    bad = commit(theirs, 10, "theirs")
    spoil(bad)
    with pytest.warns(RuntimeWarning, match="step-00000010"):
        assert restore(Checkpointer(tmp_path / "a", resume_from=theirs), state()) == 5
    with pytest.warns(RuntimeWarning), pytest.raises(CheckpointCorrupt, match="must not be used"):
        restore(Checkpointer(tmp_path / "b", resume_from=bad), state())


def test_a_place_without_checkpoints_is_an_error_and_no_start_from_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no checkpoint to start from"):
        restore(Checkpointer(tmp_path / "mine", resume_from=tmp_path / "nothing"), state())


def test_what_may_be_left_out_is_the_callers_choice(tmp_path: Path) -> None:
    save(tmp_path, {"model": nn.Linear(2, 2)})
    wider = nn.Sequential(nn.Linear(2, 2))
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointMismatch, match="missing"):
            checkpointer.restore({"model": wider})
        with pytest.warns(RuntimeWarning, match="2 missing .*2 unexpected"):
            assert checkpointer.restore({"model": wider}, strict=False) == 1
