"""A model and its optimizer, saved by some ranks and loaded by others: bit-equal, whatever holds
them."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from keepstep.checkpoint import blocks, catalog, layout, manifest
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.shard_file import read_header
from keepstep.checkpoint.torch_reader import load
from keepstep.errors import CheckpointCorrupt
from tests.checkpoint.torch_worlds import fake_world, version, write

FOLDER = "step-00000001"
Trained = tuple[nn.Module, torch.optim.Optimizer]


class Model(nn.Module):
    """Sizes that no world divides evenly, a vector shorter than four, a buffer and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.zeros(2))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))


def values(name: str, like: torch.Tensor) -> torch.Tensor:
    """Some values of each tensor's own, from its name."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.rand(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)


def whole() -> Trained:
    """A plain model and optimizer with state, as one process has them."""
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(values(name, parameter))
    model.seen.fill_(17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": values(f"{name} first", parameter),
            "exp_avg_sq": values(f"{name} second", parameter),
        }
    return model, optimizer


def cut(trained: Trained, mesh: tuple[int, ...]) -> Trained:
    """The same under FSDP2 on this rank of a fake world: (shards,) or (replicas, shards)."""
    plain, plain_optimizer = trained
    model = copy.deepcopy(plain)
    names = ("replicas", "shards")[-len(mesh) :]
    fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    originals = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        state = plain_optimizer.state[originals[name]]
        optimizer.state[parameter] = {
            key: _like(parameter, value) if value.dim() else value.clone()
            for key, value in state.items()
        }
        parameter.to_local().data.copy_(_like(parameter, originals[name]).to_local())
    return model, optimizer


def _like(parameter: DTensor, value: torch.Tensor) -> DTensor:
    """This rank's part of ``value``, cut as ``parameter`` is."""
    (chunk,) = parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
    local = value.detach()
    for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        local = local.narrow(dim, min(offset, local.shape[dim]), size)
    return DTensor.from_local(
        local.clone(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def emptied(trained: Trained) -> Trained:
    """Everything zero, and no optimizer state, as in a fresh process."""
    model, optimizer = trained
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.zero_()
    optimizer.state.clear()
    optimizer.param_groups[0]["lr"] = 0.0
    return model, optimizer


def tracked(trained: Trained) -> dict[str, object]:
    return {"model": trained[0], "optimizer": trained[1]}


def bits(trained: Trained) -> dict[str, list[int]]:
    """Every local tensor of the state, byte by byte."""
    model, optimizer = trained
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name} {key}"] = value
    return {name: _bytes(tensor) for name, tensor in found.items()}


def _bytes(tensor: torch.Tensor) -> list[int]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local.detach().contiguous().view(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


@contextlib.contextmanager
def place(rank: int, mesh: tuple[int, ...] | None) -> Iterator[Trained]:
    """What ``rank`` holds: under FSDP2 on ``mesh``, or without a process group."""
    if mesh is None:
        yield whole()
        return
    with fake_world(rank, torch.Size(mesh).numel()):
        yield cut(whole(), mesh)


def save_all(root: Path, mesh: tuple[int, ...] | None) -> None:
    world = 1 if mesh is None else torch.Size(mesh).numel()
    of = version(world=world)
    for rank in range(world):
        with place(rank, mesh) as trained:
            write(root, tracked(trained), of, rank)
    commit(root, FOLDER, of)


MESHES: list[tuple[int, ...] | None] = [None, (1,), (2,), (3,), (4,), (2, 2)]


@pytest.mark.parametrize("before", [None, (4,), (2, 2)], ids=str)
def test_whoever_loads_it_gets_the_same_bits_optimizer_included(
    tmp_path: Path, before: tuple[int, ...] | None
) -> None:
    save_all(tmp_path, before)
    for after in MESHES:
        world = 1 if after is None else torch.Size(after).numel()
        for rank in range(world):
            with place(rank, after) as trained:
                expected = bits(trained)
                emptied(trained)
                load(tracked(trained), tmp_path, FOLDER, rank=rank, world=world)
                assert bits(trained) == expected, f"rank {rank} of {after}"
                assert trained[1].param_groups[0]["lr"] == 0.25


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that even a small checkpoint has several."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", blocks.MIN_BLOCK)


@pytest.mark.usefixtures("small_blocks")
def test_damage_in_each_block_is_found_while_loading_and_the_block_is_named(tmp_path: Path) -> None:
    save_all(tmp_path, (4,))
    content = catalog.load(tmp_path, FOLDER)
    for name, info in content.files.items():
        path = tmp_path / FOLDER / name
        good = path.read_bytes()
        assert info.block_bytes == blocks.MIN_BLOCK and len(info.block_digests()) > 1
        for index in range(len(info.block_digests())):
            start, stop = info.block_span(index)
            at = (start + stop) // 2
            path.write_bytes(good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])
            with place(0, None) as trained, pytest.raises(CheckpointCorrupt) as caught:
                load(tracked(trained), tmp_path, FOLDER, rank=0, world=1)
            # What makes the header senseless is seen before it is compared.
            in_header = at < read_header_size(good)
            what = caught.value.what
            assert f"bytes {start} to {stop} differ" in what or (in_header and "shard file" in what)
            assert caught.value.where == str(path)
        path.write_bytes(good)
    with place(0, None) as trained:
        load(tracked(trained), tmp_path, FOLDER, rank=0, world=1)


def read_header_size(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def test_a_checkpoint_without_block_checksums_loads_and_is_verified_before_anything_changes(
    tmp_path: Path,
) -> None:
    save_all(tmp_path, (2,))
    to_format_1(tmp_path / FOLDER)
    assert manifest.decode((tmp_path / FOLDER / layout.MANIFEST).read_bytes()).format == 1
    with place(0, None) as trained:
        expected = bits(trained)
        emptied(trained)
        load(tracked(trained), tmp_path, FOLDER, rank=0, world=1)
        assert bits(trained) == expected
        emptied(trained)
        path = tmp_path / FOLDER / layout.shard_name(1)
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        with pytest.raises(CheckpointCorrupt, match=r"expected .* found"):
            load(tracked(trained), tmp_path, FOLDER, rank=0, world=1)
        assert not any(parameter.any() for parameter in trained[0].parameters())


def to_format_1(folder: Path) -> None:
    """Rewrite the manifest as releases before format 3 wrote it."""
    receipts = []
    for path in sorted(folder.glob("*.safetensors")):
        checksum = xxhash.xxh3_128_hexdigest(path.read_bytes())
        receipts.append(manifest.receipt_of(read_header(path), checksum))
    whole_manifest = manifest.assemble(receipts, 1.0)
    os.unlink(folder / layout.MANIFEST)
    (folder / layout.MANIFEST).write_bytes(manifest.encode(whole_manifest))
