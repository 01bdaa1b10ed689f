"""Loading: any world size, everything checked before anything changes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from keepstep.checkpoint import layout, manifest
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.torch_reader import LoadReport, load, prepare
from keepstep.errors import CheckpointCorrupt, CheckpointMismatch
from tests.checkpoint.torch_worlds import (
    fake_world,
    hybrid,
    replicated,
    save,
    sharded,
    version,
    write,
)

FOLDER = "step-00000001"


def save_world(root: Path, whole: torch.Tensor, world: int, dim: int) -> None:
    of = version(world=world)
    for rank in range(world):
        with fake_world(rank, world):
            tracked = {"w": {"a": sharded(whole, world, dim)}, "own": torch.tensor([rank])}
            write(root, tracked, of, rank)
    commit(root, FOLDER, of)


@settings(max_examples=15)
@given(
    rows=st.integers(0, 7),
    columns=st.integers(1, 4),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    dims=st.tuples(st.integers(0, 1), st.integers(0, 1)),
)
def test_every_rank_of_any_world_gets_its_part(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    columns: int,
    before: int,
    after: int,
    dims: tuple[int, int],
) -> None:
    root = tmp_path_factory.mktemp("any")
    whole = torch.arange(float(rows * columns)).reshape(rows, columns) + 1
    save_world(root, whole, before, dims[0])
    for rank in range(after):
        with fake_world(rank, after):
            target = sharded(torch.zeros(rows, columns), after, dims[1])
            own = torch.tensor([-1])
            load({"w": {"a": target}, "own": own}, root, FOLDER, rank=rank, world=after)
            assert torch.equal(target.to_local(), sharded(whole, after, dims[1]).to_local())
            assert own.item() == (rank if rank < before else 0)
    plain, own = torch.zeros(rows, columns), torch.tensor([-1])
    load({"w": {"a": plain}, "own": own}, root, FOLDER, rank=0, world=1)
    assert torch.equal(plain, whole)


def test_a_checkpoint_of_one_process_loads_into_shards_and_replicas(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    save(tmp_path, {"w": {"a": whole, "b": whole + 1, "c": whole + 2}})
    with fake_world(3, 4):
        a, b, c = (
            sharded(torch.zeros(6), 4),
            hybrid(torch.zeros(6), 2, 2),
            replicated(torch.zeros(6), 4),
        )
        report = load({"w": {"a": a, "b": b, "c": c}}, tmp_path, FOLDER, rank=3, world=4)
        assert a.to_local().tolist() == []
        assert b.to_local().tolist() == [4, 5, 6]
        assert c.to_local().tolist() == [2, 3, 4, 5, 6, 7]
    assert report == LoadReport(bytes=(3 + 6) * 4, step=1)


def test_pipeline_stages_find_their_own_tensors(tmp_path: Path) -> None:
    of = version(world=2)
    for rank in range(2):
        write(tmp_path, {"stage": {f"layer{rank}": torch.full((2,), float(rank))}}, of, rank)
    commit(tmp_path, FOLDER, of)
    state = {"layer1": torch.zeros(2)}
    load({"stage": state}, tmp_path, FOLDER, rank=1, world=2)
    assert state["layer1"].tolist() == [1, 1]


def test_another_model_is_refused_with_the_names_and_nothing_changes(tmp_path: Path) -> None:
    save(tmp_path, {"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))})
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4), nn.Linear(4, 1, bias=False))
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(CheckpointMismatch) as caught:
        load({"model": other}, tmp_path, FOLDER, rank=0, world=1)
    message = str(caught.value)
    assert "1 missing (model.2.weight)" in message
    assert "2 of another shape or type" in message
    assert "model.1.weight: float32 [3, 2] in the checkpoint, float32 [4, 2] here" in message
    with pytest.raises(CheckpointMismatch, match=r"2 unexpected \(model\.1\.bias, "):
        load({"model": nn.Sequential(nn.Linear(2, 2))}, tmp_path, FOLDER, rank=0, world=1)
    with pytest.raises(CheckpointMismatch, match=r"0\.bias: float32 \[2\] .* float64 \[2\] here"):
        load(
            {"model": nn.Sequential(*map(nn.Module.double, [nn.Linear(2, 2), nn.Linear(2, 3)]))},
            tmp_path,
            FOLDER,
            rank=0,
            world=1,
        )
    assert all(map(torch.equal, before, other.parameters()))


def test_at_most_ten_names_are_listed_and_the_number_is_given(tmp_path: Path) -> None:
    save(tmp_path, {"model": nn.Linear(1, 1, bias=False)})
    big = nn.Linear(1, 1, bias=False)
    for number in range(30):
        big.register_buffer(f"b{number:02}", torch.zeros(1))
    with pytest.raises(CheckpointMismatch, match=r"30 missing \(.*model\.b09, \.\.\.\)"):
        load({"model": big}, tmp_path, FOLDER, rank=0, world=1)


def test_another_run_is_refused_with_both_names(tmp_path: Path) -> None:
    save(tmp_path, {"t": torch.ones(1)}, version(run="first"))
    tensor = torch.zeros(1)
    with pytest.raises(CheckpointMismatch, match="of run 'first', this is run 'second'"):
        load({"t": tensor}, tmp_path, FOLDER, rank=0, world=1, run="second")
    assert tensor.item() == 0
    load({"t": tensor}, tmp_path, FOLDER, rank=0, world=1, run="first")
    assert tensor.item() == 1


def test_every_flipped_byte_is_found_before_its_block_is_copied(tmp_path: Path) -> None:
    save(tmp_path, {"t": torch.ones(300)})
    path = tmp_path / FOLDER / layout.shard_name(0)
    good = path.read_bytes()
    for at in (0, 9, 200, 2000, 4096, len(good) - 1):
        for bit in range(8):
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
            tensor = torch.zeros(300)
            with pytest.raises(CheckpointCorrupt) as caught:
                load({"t": tensor}, tmp_path, FOLDER, rank=0, world=1)
            assert layout.shard_name(0) in caught.value.where
            assert not tensor.any()


def test_a_missing_file_and_a_missing_checkpoint_are_named(tmp_path: Path) -> None:
    save(tmp_path, {"t": torch.ones(3)})
    (tmp_path / FOLDER / layout.shard_name(0)).unlink()
    with pytest.raises(CheckpointCorrupt, match="rank-00000"):
        load({"t": torch.ones(3)}, tmp_path, FOLDER, rank=0, world=1)
    with pytest.raises(CheckpointCorrupt, match="never committed"):
        load({"t": torch.ones(3)}, tmp_path, "step-00000002", rank=0, world=1)
    with pytest.raises(CheckpointCorrupt, match="leads out"):
        load({"t": torch.ones(3)}, tmp_path / FOLDER, "../..", rank=0, world=1)


def test_a_rank_reads_only_the_files_that_it_needs(tmp_path: Path) -> None:
    save_world(tmp_path, torch.arange(8.0), 2, 0)
    path = tmp_path / FOLDER / layout.shard_name(1)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for rank in range(2):
        with fake_world(rank, 2):
            tracked = {"w": {"a": sharded(torch.zeros(8), 2)}, "own": torch.tensor([0])}
            if rank == 0:
                load(tracked, tmp_path, FOLDER, rank=rank, world=2)
            else:
                with pytest.raises(CheckpointCorrupt):
                    load(tracked, tmp_path, FOLDER, rank=rank, world=2)


def test_preparing_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, {"t": torch.ones(3), "d": {"a": 1}})
    tensor, data = torch.zeros(3), {"a": 0}
    prepared = prepare({"t": tensor, "d": data}, tmp_path, FOLDER, rank=0, world=1)
    assert (tensor.tolist(), data) == ([0, 0, 0], {"a": 0})
    assert prepared.read() == 12
    assert (tensor.tolist(), data) == ([1, 1, 1], {"a": 0})
    assert prepared.apply() == LoadReport(bytes=12, step=1)
    assert (tensor.tolist(), data) == ([1, 1, 1], {"a": 1})


def test_a_manifest_that_disagrees_with_the_file_is_found(tmp_path: Path) -> None:
    save(tmp_path, {"t": torch.ones(2, 3)})
    path = tmp_path / FOLDER / layout.MANIFEST
    text = path.read_bytes().replace(b'"shape":[2,3]', b'"shape":[3,2]')
    rest = text[text.index(b'",') + 2 :]
    path.write_bytes(b'{"digest":"' + xxhash.xxh3_128_hexdigest(rest).encode() + b'",' + rest)
    assert manifest.decode(path.read_bytes()).rank_tensors["t"][0].shape == (3, 2)
    with pytest.raises(CheckpointCorrupt, match=r"the manifest has t as .*3, 2.*its file as"):
        load({"t": torch.zeros(3, 2)}, tmp_path, FOLDER, rank=0, world=1)


def test_scalars_and_turned_tensors_load(tmp_path: Path) -> None:
    save(tmp_path, {"t": {"s": torch.tensor(math.pi), "m": torch.arange(6.0).reshape(2, 3)}})
    turned = torch.zeros(3, 2).T
    scalar = torch.tensor(0.0)
    load({"t": {"s": scalar, "m": turned}}, tmp_path, FOLDER, rank=0, world=1)
    assert scalar.item() == torch.tensor(math.pi).item()
    assert turned.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert turned.stride() == (1, 2)
