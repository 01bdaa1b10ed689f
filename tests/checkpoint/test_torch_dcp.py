"""Folders of torch's distributed checkpoints as sources, and as checkpoints after an import."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from keepstep.checkpoint import importing, torch_reader, torch_source
from keepstep.checkpoint.dcp_metadata import METADATA
from keepstep.checkpoint.source import ManifestSource
from keepstep.checkpoint.torch_dcp import DcpSource
from keepstep.checkpoint.torch_export import to_dcp
from keepstep.checkpoint.torch_source import open_source
from keepstep.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch
from tests.checkpoint import dcp_job, pickles
from tests.checkpoint.dcp_folders import dcp_save

Restore = Callable[[Mapping[str, object], Path], None]


def directly(tracked: Mapping[str, object], folder: Path) -> None:
    """As ``checkpoint.resume_from`` does it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*distributed checkpoints: its pickles are")
        torch_reader.load(tracked, folder.parent, str(folder.absolute()), rank=0, world=1)


def imported(tracked: Mapping[str, object], folder: Path) -> None:
    """By way of a checkpoint of our own."""
    root = folder.parent / f"{folder.name}-run" / "checkpoints"
    made = importing.import_source(DcpSource(folder), root, "run", 1)
    torch_reader.load(tracked, root, made, rank=0, world=1)


both_ways = pytest.mark.parametrize("restore", [directly, imported])


def equal(one: nn.Module, other: nn.Module) -> bool:
    found, expected = one.state_dict(), other.state_dict()
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.process
@pytest.mark.slow
def test_fsdp_saved_by_torch_restores_at_one_and_two_ranks_and_goes_back(tmp_path: Path) -> None:
    dcp_job.run("save", tmp_path)
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    for name in ("nested", "flat"):
        root = tmp_path / f"from-{name}" / "checkpoints"
        made = importing.import_source(DcpSource(tmp_path / name), root, "run", dcp_job.STEP)
        assert made == dcp_job.FOLDER
        for restore in (
            lambda tracked, root=root, made=made: torch_reader.load(
                tracked, root, made, rank=0, world=1
            ),
            lambda tracked, name=name: directly(tracked, tmp_path / name),
        ):
            model, optimizer = dcp_job.build(4, dcp_job.plain)
            restore({"model": model, "optimizer": optimizer})
            dcp_job.check_equal(dcp_job.whole(model, optimizer), expected)
    source = ManifestSource(tmp_path / "own", dcp_job.FOLDER)
    assert to_dcp(source, tmp_path / "exported") == []
    dcp_job.load_exported(tmp_path / "exported", expected, seed=5, shard=dcp_job.plain)
    dcp_job.run("load", tmp_path)


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


@both_ways
def test_schedulers_data_and_single_tensors_come_along(tmp_path: Path, restore: Restore) -> None:
    model, optimizer, scheduler = trained()
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "scheduler": scheduler.state_dict(),
        "progress": {"epoch": 3, "mean": torch.ones(2), "history": [{"a": 1.5}, {"a": 2.5}]},
        "ema": {"weight": torch.full((2,), 3.0)},
        "scale": torch.tensor(65536.0),
    }
    folder = dcp_save(state, tmp_path / "dcp")
    fresh, fresh_optimizer, fresh_scheduler = trained(1)
    progress: dict[str, Any] = {"epoch": 0, "mean": torch.zeros(2), "history": []}
    ema, scale = {"weight": torch.zeros(2)}, torch.tensor(0.0)
    restore(
        {
            "model": fresh,
            "optimizer": fresh_optimizer,
            "scheduler": fresh_scheduler,
            "progress": progress,
            "ema": ema,
            "scale": scale,
        },
        folder,
    )
    assert equal(fresh, model)
    assert fresh_scheduler.state_dict() == scheduler.state_dict()
    assert fresh_optimizer.param_groups[0]["lr"] == 0.125
    for mine, theirs in zip(fresh_optimizer.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(mine["momentum_buffer"], theirs["momentum_buffer"])
    assert (progress["epoch"], progress["mean"].tolist()) == (3, [1, 1])
    assert progress["history"] == [{"a": 1.5}, {"a": 2.5}]
    assert (ema["weight"].tolist(), scale.item()) == ([3, 3], 65536)


@both_ways
def test_objects_that_the_folder_does_not_know_keep_what_they_have(
    tmp_path: Path, restore: Restore
) -> None:
    model, _, _ = trained()
    state = {"model": get_model_state_dict(model), "other": {"x": torch.ones(1), "y": 2}}
    fresh, fresh_optimizer, _ = trained(1)
    before = [one["momentum_buffer"].clone() for one in fresh_optimizer.state.values()]
    restore({"model": fresh, "optimizer": fresh_optimizer}, dcp_save(state, tmp_path / "dcp"))
    assert equal(fresh, model)
    after = [one["momentum_buffer"] for one in fresh_optimizer.state.values()]
    assert all(map(torch.equal, before, after))


@both_ways
def test_another_model_is_refused_and_named(tmp_path: Path, restore: Restore) -> None:
    model, _, _ = trained()
    folder = dcp_save({"model": get_model_state_dict(model)}, tmp_path / "dcp")
    other = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    with pytest.raises(
        CheckpointMismatch, match=r"model\.0\.weight: float32 \[4, 3\] in the check"
    ):
        restore({"model": other}, folder)


@both_ways
def test_groups_that_were_saved_otherwise_are_refused(tmp_path: Path, restore: Restore) -> None:
    model, optimizer = dcp_job.build(0, dcp_job.plain)
    dcp_job.train(model, optimizer)
    folder = dcp_save(dcp_job.nested_state(model, optimizer), tmp_path / "dcp")
    fresh, _ = dcp_job.build(1, dcp_job.plain)
    single = torch.optim.AdamW(fresh.parameters())
    with pytest.raises(CheckpointMismatch, match="are in group 0 of optimizer, and have different"):
        restore({"model": fresh, "optimizer": single}, folder)


def test_what_is_not_used_is_told(tmp_path: Path) -> None:
    model, _, _ = trained()
    state = {
        "model": get_model_state_dict(model),
        "wide": torch.zeros(2, dtype=torch.complex128),
        "odd": (1, {"a": torch.ones(2)}),
    }
    folder = dcp_save(state, tmp_path / "dcp")
    source = open_source(folder)
    assert isinstance(source, DcpSource)
    with pytest.warns(RuntimeWarning) as caught:
        torch_source.announce(source, 0)
    (text,) = [str(one.message) for one in caught]
    assert "nothing in them is run, and its tensors have no checksums; not used: " in text
    assert "wide (its type has no place in a checkpoint of keepstep)" in text
    assert "odd (odd[1]['a'] is of type torch.Tensor, which a checkpoint cannot keep)" in text
    torch_source.announce(source, 1)  # only one rank tells
    model_only, _, _ = trained(1)
    directly({"model": model_only}, folder)
    assert equal(model_only, model)


def test_prefixes_can_be_renamed(tmp_path: Path) -> None:
    model, _, _ = trained()
    state = {f"module._orig_mod.{key}": one for key, one in model.state_dict().items()}
    folder = dcp_save({**state, "sched": {"last_epoch": 4}}, tmp_path / "dcp")
    source = DcpSource(folder, [("module._orig_mod.", "model."), ("sched.", "scheduler.")])
    assert set(source.tensors(0)) == {f"model.{key}" for key in model.state_dict()}
    assert source.values(0)["scheduler"] == {
        "type": "nested",
        "state": {"last_epoch": 4},
        "tensors": [],
    }


def test_state_by_number_is_refused_since_nothing_says_whose_it_is(tmp_path: Path) -> None:
    model, optimizer, _ = trained()
    state = {"model": get_model_state_dict(model), "optimizer": optimizer.state_dict()}
    folder = dcp_save(state, tmp_path / "dcp")
    with pytest.raises(CheckpointMismatch, match="kept by the parameter's number, not by its name"):
        DcpSource(folder)


@pytest.mark.parametrize(
    ("name", "values", "step"),
    [
        ("dcp", {"step": 12}, 12),
        ("dcp", {"train_state": {"step": torch.tensor(7, dtype=torch.int32)}}, 7),
        ("step-000300", {}, 300),
        ("dcp", {}, 0),
    ],
)
def test_the_step_is_found_where_it_usually_is(
    tmp_path: Path, name: str, values: dict[str, Any], step: int
) -> None:
    folder = dcp_save({"model": {"w": torch.ones(1)}, **values}, tmp_path / name)
    assert DcpSource(folder).likely_step() == step


@both_ways
def test_a_tensor_that_is_not_row_major_is_refused_rather_than_mixed_up(
    tmp_path: Path, restore: Restore
) -> None:
    whole = torch.arange(6.0).reshape(2, 3).t()
    folder = dcp_save({"data": {"w": whole}}, tmp_path / "dcp")
    target = {"w": torch.zeros(3, 2)}
    with pytest.raises(CheckpointError, match=r"strides \[1, 3\] for the shape \[3, 2\]"):
        restore({"data": target}, folder)
    assert not target["w"].any()


def change(folder: Path, how: Callable[[Any], None]) -> None:
    found = FileSystemReader(folder).read_metadata()
    how(found)
    (folder / METADATA).write_bytes(pickles.dumps(found, 4))


def _swap(found: Any) -> None:
    """Two tensors of the same shape, or not, change places."""
    first, second, *_ = [index for index in found.storage_data if index.fqn in ("data.a", "data.b")]
    found.storage_data[first], found.storage_data[second] = (
        found.storage_data[second],
        found.storage_data[first],
    )


@both_ways
def test_a_place_that_holds_another_tensor_is_found(tmp_path: Path, restore: Restore) -> None:
    state = {"data": {"a": torch.ones(4), "b": torch.ones(2, 2)}}
    folder = dcp_save(state, tmp_path / "dcp")
    change(folder, _swap)
    with pytest.raises(CheckpointCorrupt, match=r"should be F32 \[4\], its file has F32 \[2, 2\]"):
        restore({"data": {"a": torch.zeros(4), "b": torch.zeros(2, 2)}}, folder)


@both_ways
@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_cut_off_file_is_found(tmp_path: Path, restore: Restore, keep: int) -> None:
    folder = dcp_save({"data": {"a": torch.ones(400)}}, tmp_path / "dcp")
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointCorrupt, match="not a whole file"):
        restore({"data": {"a": torch.zeros(400)}}, folder)


def test_a_value_that_needs_code_is_not_run_and_its_object_not_used(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    hostile = pickles.calling("os.system", f"touch {mark}")
    state = {"model": {"w": torch.ones(2)}, "extra": {"x": hostile, "y": 1}}
    folder = dcp_save(state, tmp_path / "dcp")
    mark.unlink(missing_ok=True)
    source = DcpSource(folder)
    assert set(source.values(0)) == {"model"}
    assert "extra.x cannot be decoded without running code" in source.unused["extra.x"]
    assert source.unused["extra.y"] == source.unused["extra.x"]
    assert not mark.exists()


def test_hostile_descriptions_of_tensors_run_nothing(tmp_path: Path) -> None:
    """The objects of an archive are replaced by a call of the same length."""
    mark = tmp_path / "ran"
    folder = dcp_save({"data": {"a": torch.ones(4)}}, tmp_path / "dcp")
    file = folder / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    evil = pickles.call("os.system", f"touch {mark}", 2)
    at = data.index(b"\x80\x02ctorch._utils\n")
    data[at : at + len(evil)] = evil
    file.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=r"names 'posix\.system'"):
        directly({"data": {"a": torch.zeros(4)}}, folder)
    assert not mark.exists()


@both_ways
def test_extra_state_of_modules_comes_along(tmp_path: Path, restore: Restore) -> None:
    class Scaled(nn.Linear):
        amax = 0.0

        def get_extra_state(self) -> Any:
            return {"amax": self.amax, "seen": torch.tensor([self.amax])}

        def set_extra_state(self, state: Any) -> None:
            self.amax = state["amax"] + state["seen"].item()

    one = nn.Sequential(Scaled(2, 2), nn.Linear(2, 2))
    one[0].amax = 2.0  # type: ignore[assignment]
    other = nn.Sequential(Scaled(2, 2), nn.Linear(2, 2))
    restore({"model": other}, dcp_save({"model": one.state_dict()}, tmp_path / "dcp"))
    assert other[0].amax == 4.0
    assert equal(other[1], one[1])
