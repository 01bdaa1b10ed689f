"""Loading on all ranks together: here one rank is real, and what the others say is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from keepstep.checkpoint import layout
from keepstep.errors import CheckpointCorrupt, CheckpointMismatch
from keepstep.rank import exchange, loading
from keepstep.rank.loading import Loader
from tests.checkpoint.torch_worlds import save, version

FOLDER = "step-00000001"
OK: dict[str, object] = {"kind": "ok"}
Others = Callable[[list[dict[str, object]]], None]


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    """Makes this rank number 1 of 2: rank 0 says what was given, one verdict an exchange."""

    def use(verdicts: list[dict[str, object]]) -> None:
        waiting = list(verdicts)

        def gather(data: bytes) -> list[bytes]:
            return [msgspec.json.encode(waiting.pop(0)), data]

        monkeypatch.setattr(exchange, "gather", gather)
        monkeypatch.setattr(loading, "distributed", lambda: True)

    return use


def loader(root: Path, state: dict[str, object]) -> Loader:
    return Loader(state, root, rank=1, world=2)


def damaged(what: str) -> dict[str, object]:
    return {"kind": "damaged", "parts": ("bytes 0 to 9 differ", what, "as ever", "use another")}


def test_values_are_handed_over_when_all_have_read_and_it_is_written_down(
    tmp_path: Path, others: Others
) -> None:
    save(tmp_path, {"d": {"t": torch.ones(2), "n": 5}})
    data = {"t": torch.zeros(2), "n": 0}
    others([OK, OK])
    seen: list[object] = []
    load = loader(tmp_path, {"d": data})
    load.load(FOLDER, lambda: seen.append((data["t"].tolist(), data["n"])))  # type: ignore[attr-defined]
    assert seen == [([1, 1], 0)]
    assert data["n"] == 5
    assert not load.touched


def test_damage_that_another_rank_finds_before_reading_changes_nothing(
    tmp_path: Path, others: Others
) -> None:
    save(tmp_path, {"d": {"t": torch.ones(2), "n": 5}})
    tensor = torch.zeros(2)
    others([damaged("file 0")])
    load = loader(tmp_path, {"d": {"t": tensor, "n": 0}})
    with pytest.raises(CheckpointCorrupt) as caught:
        load.load(FOLDER, lambda: pytest.fail("it was not loaded"))
    assert (caught.value.where, caught.value.done) == ("file 0", "as ever")
    assert not load.touched and not tensor.any()


def test_damage_that_another_rank_finds_while_reading_leaves_values_alone_and_says_so(
    tmp_path: Path, others: Others
) -> None:
    save(tmp_path, {"d": {"t": torch.ones(2), "n": 5}})
    data = {"t": torch.zeros(2), "n": 0}
    others([OK, damaged("file 0")])
    load = loader(tmp_path, {"d": data})
    with pytest.raises(CheckpointCorrupt, match="must not be used") as caught:
        load.load(FOLDER, lambda: pytest.fail("it was not loaded"))
    assert caught.value.where == "file 0"
    assert data["n"] == 0
    assert load.touched


def test_damage_that_this_rank_finds_is_told_with_the_bytes(tmp_path: Path, others: Others) -> None:
    save(tmp_path, {"d": {"t": torch.ones(2)}})
    path = tmp_path / FOLDER / layout.shard_name(0)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    others([OK, OK])
    with pytest.raises(CheckpointCorrupt, match=r"bytes 0 to \d+ differ .*rank-00000"):
        loader(tmp_path, {"d": {"t": torch.zeros(2)}}).load(FOLDER)


def test_another_ranks_mismatch_counts_more_than_damage_here(
    tmp_path: Path, others: Others
) -> None:
    others([{"kind": "refused", "parts": ("another model", "rank 0", "", "use that model")}])
    with pytest.raises(CheckpointMismatch, match="rank 0 cannot restore: another model"):
        loader(tmp_path, {}).load(FOLDER)


def test_this_ranks_own_error_is_raised_as_it_is(tmp_path: Path, others: Others) -> None:
    save(tmp_path, {"d": {"t": torch.ones(2)}})
    others([OK])
    with pytest.raises(CheckpointMismatch, match="of other tracked objects"):
        loader(tmp_path, {"other": {"t": torch.zeros(2)}}).load(FOLDER)


def test_another_runs_checkpoint_is_taken_only_by_its_path(tmp_path: Path) -> None:
    save(tmp_path, {"t": torch.ones(2)}, version(run="theirs"))
    tensor = torch.zeros(2)
    load = Loader({"t": tensor}, tmp_path, rank=0, world=1, run="mine")
    with pytest.raises(CheckpointMismatch, match="of run 'theirs', this is run 'mine'"):
        load.load(FOLDER)
    assert load.load(str(tmp_path / FOLDER)).step == 1
    assert tensor.tolist() == [1, 1]


# --- not strict -----------------------------------------------------------------------------------


def lenient(root: Path, state: dict[str, object]) -> str:
    """Load without ``strict``; returns the warning."""
    with pytest.warns(RuntimeWarning, match="restored only in part from step 1") as caught:
        Loader(state, root, rank=0, world=1, strict=False).load(FOLDER)
    return str(caught[0].message)


def test_a_model_with_another_head_takes_what_it_has_if_that_is_allowed(tmp_path: Path) -> None:
    old = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    save(tmp_path, {"model": old, "seen": {"n": 4}})
    body, head = nn.Linear(2, 2), nn.Linear(2, 1)
    new, before = nn.Sequential(body, nn.Identity(), head), head.weight.clone()
    data = {"n": 0}
    text = lenient(tmp_path, {"model": new, "seen": data})
    assert "2 missing (model.2.bias, model.2.weight)" in text
    assert "2 unexpected (model.1.bias, model.1.weight)" in text
    assert torch.equal(body.weight, next(old.parameters()))
    assert torch.equal(head.weight, before)
    assert data == {"n": 4}


def test_objects_on_one_side_are_named_and_left_alone(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path, {"model": model, "gone": {"n": 4}})
    fresh, kept = nn.Linear(2, 2), {"n": 9}
    text = lenient(tmp_path, {"model": fresh, "new": kept})
    assert "1 missing (new)" in text and "1 unexpected (gone)" in text
    assert kept == {"n": 9}
    assert torch.equal(fresh.weight, model.weight)


def test_shapes_must_match_in_any_case(tmp_path: Path) -> None:
    save(tmp_path, {"model": nn.Linear(2, 2)})
    with pytest.raises(CheckpointMismatch, match=r"2 of another shape or type \(model\.bias"):
        Loader({"model": nn.Linear(2, 3)}, tmp_path, 0, 1, strict=False).load(FOLDER)


def test_nothing_is_said_where_both_sides_are_alike(tmp_path: Path) -> None:
    save(tmp_path, {"model": nn.Linear(2, 2)})
    Loader({"model": nn.Linear(2, 2)}, tmp_path, 0, 1, strict=False).load(FOLDER)
