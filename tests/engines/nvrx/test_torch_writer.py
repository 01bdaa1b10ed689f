"""``torch.save`` by NVRx's worker: what it writes, and the defect that the copy is there for."""

from __future__ import annotations

import inspect
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import torch

from keepstep.checkpoint import torch_files
from keepstep.engines.nvrx import library
from keepstep.engines.nvrx.shards import NvrxShardWriter
from keepstep.engines.nvrx.staging import Staging
from keepstep.engines.nvrx.torch_writer import Sink
from tests.checkpoint.torch_worlds import version
from tests.engines.nvrx import ranks
from tests.engines.nvrx.ranks import HEAD, LIMIT_S
from tests.engines.nvrx.test_staging import snapshot

pytestmark = pytest.mark.needs("nvrx")


@pytest.fixture(autouse=True, scope="module")
def _pythons_own_tracker() -> None:
    resource_tracker.ensure_running()


@pytest.mark.process
@pytest.mark.slow
def test_plain_torch_load_reads_the_file(tmp_path: Path) -> None:
    state: dict[str, object] = {
        "a": torch.arange(6.0).reshape(2, 3),
        "empty": torch.empty(0, 3),
        "b": torch.tensor(7, dtype=torch.int64),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    writer = NvrxShardWriter("torch", tmp_path, rank=0, world=1, keep_last=3)
    try:
        writer.begin(state, version(1), tmp_path).wait(LIMIT_S)
    finally:
        writer.close()
    path = tmp_path / "step-00000001" / "rank-00000.pt"
    found = torch.load(path, weights_only=True)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor)  # type: ignore[arg-type]
    assert len(torch_files.records(path)) == len(state)


PLAIN = """
import os, sys
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

if __name__ == "__main__":
    torch.cuda.synchronize = lambda device=None: None  # NVRx calls it without a GPU
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.zeros(1000)
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save({"w": tensor}, sys.argv[1])
    while not tensor.is_shared():  # a thread of NVRx's queue moves the live tensor
        pass
    tensor.fill_(7.0)  # the next step of the training
    while checkpoint._async_calls_queue.get_num_unfinalized_calls():
        checkpoint.finalize_async_save()
    checkpoint.finalize_async_save(terminate=False)
    checkpoint._async_calls_queue.persistent_caller.close()
"""

ADAPTED = (
    HEAD
    + """
root = Path(sys.argv[1])
tensor = torch.zeros(1000)
writer = NvrxShardWriter("torch", root, rank=0, world=1, keep_last=3)
pending = writer.begin({"w": tensor}, version(1), root)
assert not tensor.is_shared()
tensor.fill_(7.0)
pending.wait(60)
writer.close()
"""
)


@pytest.mark.process
@pytest.mark.slow
def test_plain_nvrx_saves_later_values_of_cpu_tensors_and_the_adapter_those_of_the_call(
    tmp_path: Path,
) -> None:
    known = inspect.signature(library.checkpointing().AsyncCallsQueue.__init__).parameters
    if "cpu_shm_mode" not in known:  # the worker of later releases dies without a GPU
        # If this fails, NVRx has mended it: the copy may go where a new release is required.
        ranks.run(tmp_path, PLAIN, [tmp_path / "plain.pt"])
        plain = torch.load(tmp_path / "plain.pt", weights_only=True)
        assert plain["w"].unique().tolist() == [7.0]
    ranks.run(tmp_path, ADAPTED, [tmp_path / "root"])
    saved = torch.load(tmp_path / "root/step-00000001/rank-00000.pt", weights_only=True)
    assert saved["w"].unique().tolist() == [0.0]


def test_a_write_that_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    staging = Staging()
    try:
        staged = staging.copy(snapshot(torch.ones(3)))
        sink = Sink(tmp_path / "missing" / "file", staged.parcel)
        with pytest.raises(FileNotFoundError):
            sink.write(b"data")
        (tmp_path / "missing").touch()
        with pytest.raises(NotADirectoryError):  # this one is not the cause
            sink.write(b"data")
        assert staged.error().startswith("FileNotFoundError: [Errno 2] No such file or directory")
    finally:
        staging.close()
