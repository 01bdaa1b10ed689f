"""Modules as plain safetensors files, read by the safetensors package alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from keepstep.checkpoint import safetensors_export
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.source import ManifestSource
from keepstep.errors import CheckpointMismatch, UsageError
from tests.checkpoint.test_torch_export import training
from tests.checkpoint.torch_worlds import fake_world, save, sharded, version, write


def make(tmp_path: Path, **more: object) -> tuple[ManifestSource, nn.Module]:
    state = training(0)
    return ManifestSource(tmp_path, save(tmp_path, {**state, **more})), state["model"]


@pytest.mark.parametrize("strip", [True, False])
def test_one_file_has_the_modules_tensors_by_their_names(tmp_path: Path, strip: bool) -> None:
    source, model = make(tmp_path)
    names = safetensors_export.names_of(source, strip_prefix=strip)
    done: list[int] = []
    path = tmp_path / "out.safetensors"
    assert safetensors_export.export(source, names, path, progress=done.append) == []
    found = load_file(path)
    start = "" if strip else "model."
    assert found.keys() == {f"{start}{name}" for name in model.state_dict()}
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[f"{start}{name}"], tensor)
    assert sum(done) == sum(one.numel() * one.element_size() for one in found.values())
    if strip:
        fresh = training(1)["model"]
        fresh.load_state_dict(found)
        assert torch.equal(fresh.head.weight, model.state_dict()["head.weight"])


def test_every_type_is_written_as_it_is(tmp_path: Path) -> None:
    module = nn.Module()
    types = [torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.float64, torch.int64]
    types += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.int16, torch.int32]
    for at, one in enumerate(types):
        module.register_buffer(f"b{at}", torch.arange(3).to(one))
    module.register_buffer("empty", torch.zeros(0, 2))
    module.register_buffer("scalar", torch.tensor(7))
    source = ManifestSource(tmp_path, save(tmp_path, {"m": module}))
    names = safetensors_export.names_of(source, strip_prefix=True)
    safetensors_export.export(source, names, tmp_path / "out")
    found, expected = load_file(tmp_path / "out"), module.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        mine, theirs = found[name].reshape(-1), tensor.reshape(-1)
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_large_models_become_several_files_with_an_index(tmp_path: Path) -> None:
    source, model = make(tmp_path)
    names = safetensors_export.names_of(source, strip_prefix=True)
    files = safetensors_export.export(source, names, tmp_path / "out", max_shard_bytes=100)
    expected = model.state_dict()
    count = len(files) - 1
    assert count == 3  # two weights of 96 bytes, two of 16
    assert files == [
        *(f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)),
        safetensors_export.INDEX,
    ]
    index = json.loads((tmp_path / "out" / safetensors_export.INDEX).read_text())
    assert index["metadata"] == {"total_size": 96 + 96 + 16 + 16}
    assert index["weight_map"].keys() == expected.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], expected[name])


def test_a_small_model_in_a_folder_needs_no_index(tmp_path: Path) -> None:
    source, model = make(tmp_path)
    names = safetensors_export.names_of(source)
    files = safetensors_export.export(source, names, tmp_path / "out", max_shard_bytes=1 << 30)
    assert files == ["model.safetensors"]
    assert len(load_file(tmp_path / "out/model.safetensors")) == len(model.state_dict())


def test_shards_by_columns_are_put_together(tmp_path: Path) -> None:
    whole, of = torch.arange(12.0).reshape(3, 4), version(world=2)
    for rank in range(2):
        with fake_world(rank, 2):
            module = nn.Linear(4, 3, bias=False)
            module.weight = nn.Parameter(sharded(whole, 2, dim=1))
            folder = write(tmp_path, {"m": module}, of, rank)
    commit(tmp_path, folder, of)
    source = ManifestSource(tmp_path, folder)
    safetensors_export.export(source, safetensors_export.names_of(source), tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out")["m.weight"], whole)


def test_modules_are_chosen_by_name_and_clashes_are_refused(tmp_path: Path) -> None:
    source, _ = make(tmp_path, teacher=training(1)["model"])
    both = safetensors_export.names_of(source)
    assert len(both) == 2 * len(safetensors_export.names_of(source, ["teacher"]))
    with pytest.raises(CheckpointMismatch, match=r"two modules have a tensor embed\.weight"):
        safetensors_export.names_of(source, strip_prefix=True)
    with pytest.raises(
        CheckpointMismatch, match=r"no module optimizer.*modules are: model, teacher"
    ):
        safetensors_export.names_of(source, ["optimizer"])
    other = ManifestSource(tmp_path / "x", save(tmp_path / "x", {"t": torch.ones(1)}))
    with pytest.raises(CheckpointMismatch, match="the checkpoint has no modules"):
        safetensors_export.names_of(other)


def test_an_existing_file_is_not_replaced(tmp_path: Path) -> None:
    source, _ = make(tmp_path)
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="out exists"):
        safetensors_export.export(source, safetensors_export.names_of(source), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"
