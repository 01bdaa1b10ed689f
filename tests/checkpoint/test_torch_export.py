"""Exports as ``torch.save`` and DCP have them; what torch reads must be what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.source import ManifestSource
from keepstep.checkpoint.torch_export import to_dcp, to_torch
from keepstep.checkpoint.torch_rng import RngState
from keepstep.errors import CheckpointError, CheckpointMismatch, UsageError
from tests.checkpoint import dcp_job
from tests.checkpoint.dcp_folders import dcp_load
from tests.checkpoint.torch_worlds import fake_world, save, sharded, version, write


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.norm(self.embed(tokens)))
        return found


def training(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Tied()
    slow, fast = [model.embed.weight], list(model.norm.parameters())
    groups: list[dict[str, Any]] = [{"params": fast, "lr": 0.1}, {"params": slow}]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.01), foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    for _ in range(2):
        model(torch.tensor([1, 2])).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected) and found.dtype == expected.dtype
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            equal(found[key], expected[key]) for key in expected
        )
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(equal, found, expected))
    return bool(found == expected)


def test_the_torch_file_is_what_a_plain_script_saves(tmp_path: Path) -> None:
    state = training(0)
    folder = save(tmp_path, {**state, "progress": {"seen": 5}, "scale": torch.tensor(2.0)})
    done: list[int] = []
    assert (
        to_torch(ManifestSource(tmp_path, folder), tmp_path / "out.pt", progress=done.append) == []
    )
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found.keys() == {"model", "optimizer", "scheduler", "progress", "scale"}
    assert found["model"].keys() == state["model"].state_dict().keys()
    assert equal(found["model"], dict(state["model"].state_dict()))
    assert equal(found["optimizer"], state["optimizer"].state_dict())
    assert (found["progress"], found["scale"].item()) == ({"seen": 5}, 2.0)
    assert sum(done) == (tmp_path / "out.pt").stat().st_size
    fresh = training(1)
    for name, item in fresh.items():
        item.load_state_dict(found[name])
        assert equal(item.state_dict(), state[name].state_dict())


def test_the_dcp_folder_loads_as_torch_documents_it(tmp_path: Path) -> None:
    model, optimizer = dcp_job.build(0, dcp_job.plain)
    dcp_job.train(model, optimizer)
    tracked = {"model": model, "optimizer": optimizer, "progress": {"seen": 5}}
    source = ManifestSource(tmp_path, save(tmp_path, tracked))
    assert to_dcp(source, tmp_path / "out") == []
    dcp_job.load_exported(
        tmp_path / "out", dcp_job.whole(model, optimizer), seed=1, shard=dcp_job.plain
    )
    found = {"progress": {"seen": 0}}
    dcp_load(found, tmp_path / "out")
    assert found == {"progress": {"seen": 5}}


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_several_ranks_become_whole_tensors(tmp_path: Path, dim: int) -> None:
    whole = torch.arange(35.0).reshape(7, 5)
    of = version(world=3)
    for rank in range(3):
        with fake_world(rank, 3):
            folder = write(tmp_path, {"w": {"a": sharded(whole, 3, dim)}}, of, rank)
    commit(tmp_path, folder, of)
    to_torch(ManifestSource(tmp_path, folder), tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["w"]["a"], whole)
    to_dcp(ManifestSource(tmp_path, folder), tmp_path / "out")
    target = {"w": {"a": torch.zeros(7, 5)}}
    dcp_load(target, tmp_path / "out")
    assert torch.equal(target["w"]["a"], whole)


def test_only_the_objects_that_are_named_are_written(tmp_path: Path) -> None:
    source = ManifestSource(tmp_path, save(tmp_path, training(0)))
    to_torch(source, tmp_path / "out.pt", ["model"])
    assert torch.load(tmp_path / "out.pt", weights_only=True).keys() == {"model"}
    with pytest.raises(
        CheckpointMismatch, match=r"has no ema.*It has: model, optimizer, scheduler"
    ):
        to_torch(source, tmp_path / "other.pt", ["ema"])
    assert not (tmp_path / "other.pt").exists()


def test_values_of_single_ranks_are_those_of_rank_0_and_this_is_told(tmp_path: Path) -> None:
    of = version(world=2)
    for rank in range(2):
        folder = write(tmp_path, {"data": {"at": rank}, "same": {"x": 1}}, of, rank)
    commit(tmp_path, folder, of)
    left_out = to_torch(ManifestSource(tmp_path, folder), tmp_path / "out.pt")
    assert left_out == ["data: the values of ranks other than 0 have no place"]
    assert torch.load(tmp_path / "out.pt", weights_only=True)["data"] == {"at": 0}


def test_random_states_can_be_exported_too(tmp_path: Path) -> None:
    rng = RngState()
    source = ManifestSource(tmp_path, save(tmp_path, {"random": rng}))
    assert to_torch(source, tmp_path / "out.pt") == []
    found = torch.load(tmp_path / "out.pt", weights_only=True)["random"]
    assert torch.equal(found["torch"], torch.get_rng_state())


@pytest.mark.parametrize("export", [to_torch, to_dcp])
def test_nothing_is_replaced_and_nothing_left_behind(tmp_path: Path, export: Any) -> None:
    source = ManifestSource(tmp_path, save(tmp_path, training(0)))
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="out exists"):
        export(source, tmp_path / "out")
    before = sorted(path.name for path in tmp_path.iterdir())

    def fail(count: int) -> None:
        raise RuntimeError("no more")

    with pytest.raises(BaseException, match=r"no more|unexpected pos"):
        export(source, tmp_path / "other", progress=fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "out").read_text() == "mine"


def test_an_optimizer_of_an_older_keepstep_is_refused_and_its_model_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ManifestSource(tmp_path, save(tmp_path, training(0)))
    values = {
        name: {key: one for key, one in value.items() if key != "names"}
        for name, value in source.values(0).items()
        if isinstance(value, dict)
    }
    monkeypatch.setattr(source, "values", lambda rank: values)
    with pytest.raises(CheckpointError, match="does not say in which order optimizer has its"):
        to_torch(source, tmp_path / "out.pt")
    assert to_torch(source, tmp_path / "out.pt", ["model"]) == []
