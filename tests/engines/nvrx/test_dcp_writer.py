"""Distributed checkpoints that NVRx's worker writes, read by torch alone."""

from __future__ import annotations

import contextlib
import warnings
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from keepstep.checkpoint import catalog
from keepstep.checkpoint.torch_reader import load
from keepstep.checkpoint.verify import verify
from keepstep.engines.nvrx.shards import NvrxShardWriter
from keepstep.errors import CheckpointCorrupt
from tests.checkpoint.torch_worlds import fake_world, sharded, version
from tests.engines.nvrx import ranks
from tests.engines.nvrx.ranks import HEAD, LIMIT_S

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.needs("nvrx")]
FOLDER = "step-00000001"


@pytest.fixture(autouse=True, scope="module")
def _pythons_own_tracker() -> None:
    resource_tracker.ensure_running()


def plain_load(folder: Path, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """What torch alone reads, without any group."""
    state = dict(tensors)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(state, checkpoint_id=folder, no_dist=True)
    return state


RANK = (
    HEAD
    + """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

rank, root = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[3], 2), rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(35.0).reshape(7, 5)
state = {
    "m": {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole + 100, mesh, [Shard(1)]),
    },
    "own": torch.tensor([rank]),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5),
}
writer = NvrxShardWriter("dcp", root, rank=rank, world=2, keep_last=3)
writer.begin(state, version(1, world=2), root).wait(60)
dist.barrier()
writer.close()
dist.destroy_process_group()
"""
)


def test_torch_alone_reads_what_two_ranks_have_saved(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                ranks.start(tmp_path / str(rank), RANK, [rank, root, tmp_path / "store"])
            )
            for rank in range(2)
        ]
        for one in started:
            _, errors = one.communicate(timeout=LIMIT_S)
            assert one.returncode == 0, errors
    assert verify(root, FOLDER) == []
    folder = root / FOLDER
    names = {path.name for path in folder.iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} <= names
    whole = torch.arange(35.0).reshape(7, 5)
    found = plain_load(
        folder,
        **{
            "m.rows": torch.zeros(7, 5),
            "m.columns": torch.zeros(7, 5),
            "own": torch.tensor([-1]),
            "$rank1.own": torch.tensor([-1]),
            "scalar": torch.zeros(()),
        },
    )
    assert torch.equal(found["m.rows"], whole)
    assert torch.equal(found["m.columns"], whole + 100)
    assert (found["own"].item(), found["$rank1.own"].item()) == (0, 1)
    assert found["scalar"].item() == 2.5
    # ... and so do we, at another world size, without torch's metadata.
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"\.metadata"):
        catalog.load(root, FOLDER)


def test_every_file_is_covered_by_the_manifest_and_loads_at_another_world_size(
    tmp_path: Path,
) -> None:
    whole = torch.arange(12.0)
    writers, saves = [], []
    try:
        for rank in (1, 0):  # in one process: nothing is collective
            writer = NvrxShardWriter("dcp", tmp_path, rank=rank, world=2, keep_last=3)
            writers.append(writer)
            with fake_world(rank, 2):
                state: dict[str, object] = {"w": {"a": sharded(whole, 2)}}
                saves.append(writer.begin(state, version(1, world=2), tmp_path))
        for pending in saves:
            pending.wait(LIMIT_S)
    finally:
        for writer in writers:
            writer.close()
    found = catalog.load(tmp_path, FOLDER)
    assert found.all_files().keys() == {"__0_0.distcp", "__1_0.distcp", ".metadata"}
    plain = torch.zeros(12)
    load({"w": {"a": plain}}, tmp_path, FOLDER, rank=0, world=1)
    assert torch.equal(plain, whole)
    assert torch.equal(plain_load(tmp_path / FOLDER, **{"w.a": torch.zeros(12)})["w.a"], whole)


def test_a_rank_without_tensors_has_an_empty_file(tmp_path: Path) -> None:
    writer = NvrxShardWriter("dcp", tmp_path, rank=0, world=1, keep_last=3)
    try:
        writer.begin({"data": {"value": 1}}, version(1), tmp_path).wait(LIMIT_S)
        state = {"value": 0}
        writer.load({"data": state}, tmp_path / FOLDER)
        assert state == {"value": 1}
    finally:
        writer.close()
    assert (tmp_path / FOLDER / "__0_0.distcp").stat().st_size == 0
