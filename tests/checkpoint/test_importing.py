from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from keepstep.checkpoint import blocks, catalog, importing, layout, lineage, torch_reader, verify
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.source import ManifestSource
from keepstep.checkpoint.torch_dcp import DcpSource
from keepstep.errors import CheckpointError, CheckpointMismatch, UsageError
from tests.checkpoint.dcp_folders import dcp_save
from tests.checkpoint.shards import FixedClock
from tests.checkpoint.torch_worlds import fake_world, sharded, version, write


def test_the_checkpoint_is_verified_listed_and_older_than_all_rounds(tmp_path: Path) -> None:
    weight = torch.randn(1 << 20) if blocks.BLOCK_BYTES <= 1 << 22 else torch.randn(4)
    source = DcpSource(dcp_save({"model": {"w": weight}, "step": 9}, tmp_path / "dcp"))
    root, done = tmp_path / "run/checkpoints", list[int]()
    folder = importing.import_source(
        source, root, "run", 9, progress=done.append, clock=FixedClock(77.0)
    )
    assert folder == "step-00000009"
    assert verify.verify(root, folder) == []
    (info,) = catalog.committed(root)
    assert (info.step, info.version.run, info.created) == (9, "run", 77.0)
    assert info.nbytes == sum(done) == (root / folder / layout.shard_name(0)).stat().st_size
    whole = load_file(root / folder / layout.shard_name(0))
    assert torch.equal(whole["model.w"], weight)
    line = lineage.Lineage(tmp_path / "run", "run", root)
    try:
        assert line.pick(frozenset()) == (9, folder)
    finally:
        line.close()
    assert not ManifestSource(root, folder).about.complete


@pytest.mark.parametrize("dim", [0, 1])
def test_tensors_cut_in_rows_become_whole_and_others_stay_in_parts(
    tmp_path: Path, dim: int
) -> None:
    whole, of = torch.arange(15.0).reshape(5, 3), version(world=2)
    for rank in range(2):
        with fake_world(rank, 2):
            folder = write(tmp_path / "from", {"w": {"a": sharded(whole, 2, dim)}}, of, rank)
    commit(tmp_path / "from", folder, of)
    source = ManifestSource(tmp_path / "from", folder)
    made = importing.import_source(source, tmp_path / "to", "other", 4)
    stored = load_file(tmp_path / "to" / made / layout.shard_name(0))
    assert set(stored) == ({"w.a"} if dim == 0 else {"w.a#0", "w.a#1"})
    target = {"a": torch.zeros(5, 3)}
    torch_reader.load({"w": target}, tmp_path / "to", made, rank=0, world=1, run="other")
    assert torch.equal(target["a"], whole)


def test_a_folder_with_checkpoints_is_left_alone(tmp_path: Path) -> None:
    source = DcpSource(dcp_save({"model": {"w": torch.ones(1)}}, tmp_path / "dcp"))
    importing.import_source(source, tmp_path / "run", "run", 3)
    with pytest.raises(UsageError, match="has 1 checkpoints already, for example step-00000003"):
        importing.import_source(source, tmp_path / "run", "run", 5)
    assert layout.list_folders(tmp_path / "run") == ["step-00000003"]


def test_nothing_is_committed_when_the_source_cannot_be_read(tmp_path: Path) -> None:
    folder = dcp_save({"model": {"w": torch.ones(1000)}}, tmp_path / "dcp")
    source = DcpSource(folder)
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match="not a whole file"):
        importing.import_source(source, tmp_path / "run", "run", 3)
    assert catalog.published(tmp_path / "run") == []
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_a_folder_without_tensors_is_refused(tmp_path: Path) -> None:
    source = DcpSource(dcp_save({"step": 3}, tmp_path / "dcp"))
    with pytest.raises(CheckpointMismatch, match="no tensor in it"):
        importing.import_source(source, tmp_path / "run", "run", 3)
