"""Files of another library: committed, verified and read without decoding them; damage found."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from keepstep.checkpoint import catalog, foreign, layout, manifest, retention, torch_files
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.manifest import Layout
from keepstep.checkpoint.torch_image import spec_of
from keepstep.checkpoint.torch_reader import load
from keepstep.checkpoint.torch_state import flatten
from keepstep.checkpoint.verify import verify
from keepstep.checkpoint.writer import claim_folder
from keepstep.errors import CheckpointCorrupt
from tests.checkpoint.foreign_files import (
    FOLDER,
    KINDS,
    Trap,
    assert_equal,
    file_of,
    save,
    seal,
    state,
)
from tests.checkpoint.shards import flip
from tests.checkpoint.torch_worlds import fake_world, sharded, version
from tests.checkpoint.torch_worlds import save as save_native

# From end to end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_library_wrote_comes_back_bit_by_bit(tmp_path: Path, kind: Layout) -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    of = version()
    save(tmp_path, [{"model": model, "optimizer": optimizer, "s": state()}], of, kind)
    fresh = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1, bias=False))
    other = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    target = state(0.0)
    report = load(
        {"model": fresh, "optimizer": other, "s": target}, tmp_path, FOLDER, rank=0, world=1
    )
    assert report.step == 1
    assert report.bytes > 300
    assert_equal(dict(fresh.state_dict()), dict(model.state_dict()))
    assert_equal(other.state_dict()["state"], optimizer.state_dict()["state"])
    assert other.param_groups[0]["lr"] == 0.01
    assert_equal(target, state())
    assert verify(tmp_path, FOLDER) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (3, 2), (1, 2)])
def test_every_rank_of_any_world_gets_its_part(
    tmp_path: Path, kind: Layout, before: int, after: int
) -> None:
    whole = torch.arange(35.0).reshape(7, 5).to(torch.bfloat16)
    of = version(world=before)
    folder = ""
    for rank in range(before):
        with fake_world(rank, before):
            tracked = {
                "w": {"a": sharded(whole, before), "seen": rank},
                "own": torch.tensor([rank]),
            }
            _, folder = seal(tmp_path, tracked, of, rank, kind=kind)
    commit(tmp_path, folder, of)
    for rank in range(after):
        with fake_world(rank, after):
            target = {"a": sharded(torch.zeros_like(whole), after), "seen": -1}
            own = torch.tensor([-1])
            load({"w": target, "own": own}, tmp_path, FOLDER, rank=rank, world=after)
            local: Any = target["a"]
            assert torch.equal(local.to_local(), sharded(whole, after).to_local())
            source = rank if rank < before else 0
            assert (own.item(), target["seen"]) == (source, source)


def test_native_and_other_checkpoints_stand_side_by_side(tmp_path: Path) -> None:
    save_native(tmp_path, {"s": state(1.0)}, version(1))
    save(tmp_path, [{"s": state(2.0)}], version(2))
    save(tmp_path, [{"s": state(3.0)}], version(3), "dcp")
    infos = catalog.committed(tmp_path)
    assert [(info.step, info.layout) for info in infos] == [
        (3, "dcp"),
        (2, "torch"),
        (1, "safetensors"),
    ]
    for info in infos:
        target = state(0.0)
        load({"s": target}, tmp_path, info.folder, rank=0, world=1)
        assert_equal(target, state(float(info.step)))
        files = [path for path in (tmp_path / info.folder).iterdir() if path.suffix != ".json"]
        assert info.nbytes == sum(path.stat().st_size for path in files)
    assert retention.apply(tmp_path, retention.Keep(1), infos[0].version) == [
        "step-00000001",
        "step-00000002",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_with_a_pickle_that_acts_is_restored_and_nothing_acts(
    tmp_path: Path, kind: Layout
) -> None:
    trap = tmp_path / "sprung"
    of = version()
    folder = claim_folder(tmp_path, of)
    file = tmp_path / folder / file_of(kind)
    if kind == "torch":
        torch.save({"w": torch.ones(3), "evil": Trap(trap)}, file)
    else:
        torch.save([torch.ones(3), Trap(trap)], file)
    with (tmp_path / folder / ".metadata").open("wb") as metadata:
        torch.save(Trap(trap), metadata)
    (span,) = torch_files.records(file)
    snapshot = flatten({"w": torch.ones(3)}, rank=0, world=1)
    foreign.seal(
        tmp_path,
        folder,
        of,
        0,
        layout=kind,
        file=file.name,
        tensors=[spec_of(entry) for entry in snapshot.entries],
        spans={snapshot.entries[0].name: span},
        values=snapshot.values,
        others=[".metadata"],
    )
    commit(tmp_path, folder, of)
    target = torch.zeros(3)
    load({"w": target}, tmp_path, folder, rank=0, world=1)
    assert target.tolist() == [1, 1, 1]
    assert verify(tmp_path, folder) == []
    assert not trap.exists()


# Damage ------------------------------------------------------------------------------------------

Damage = Callable[[Path, Layout], None]


def swap(folder: Path, kind: Layout) -> None:
    first, second = folder / file_of(kind, 0), folder / file_of(kind, 1)
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)


def link_out(folder: Path, kind: Layout) -> None:
    file = folder / file_of(kind, 1)
    file.rename(folder.parent / "outside")
    file.symlink_to(folder.parent / "outside")


DAMAGE: dict[str, Damage] = {
    "flipped": lambda folder, kind: flip(folder / file_of(kind, 1), 900),
    "cut": lambda folder, kind: os.truncate(folder / file_of(kind, 1), 900),
    "grown": lambda folder, kind: os.truncate(folder / file_of(kind, 1), 9000),
    "missing": lambda folder, kind: (folder / file_of(kind, 1)).unlink(),
    "swapped": swap,
    "linked": link_out,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_found_before_anything_is_restored(
    tmp_path: Path, kind: Layout, damage: Damage
) -> None:
    of = version(world=2)
    save(tmp_path, [{"s": state()}, {"s": {**state(), "mine": torch.ones(3)}}], of, kind)
    damage(tmp_path / FOLDER, kind)
    target = state(0.0) | {"mine": torch.zeros(3)}
    with pytest.raises(CheckpointCorrupt) as caught:
        load({"s": target}, tmp_path, FOLDER, rank=1, world=2)
    assert FOLDER in caught.value.where
    assert_equal(target, state(0.0) | {"mine": torch.zeros(3)})
    assert verify(tmp_path, FOLDER) != []


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_anywhere_in_a_file_is_found(tmp_path: Path, kind: Layout) -> None:
    save(tmp_path, [{"w": torch.ones(20), "v": torch.ones(3)}], version(), kind)
    path = tmp_path / FOLDER / file_of(kind)
    for index in range(0, path.stat().st_size, 37):
        flip(path, index)
        target = torch.zeros(20)
        with pytest.raises(CheckpointCorrupt, match="differs from what was committed"):
            load({"w": target, "v": torch.zeros(3)}, tmp_path, FOLDER, rank=0, world=1)
        assert not target.any()
        assert [(p.file, p.kind) for p in verify(tmp_path, FOLDER)] == [(path.name, "checksum")]
        flip(path, index)
    assert verify(tmp_path, FOLDER) == []


def test_further_files_belong_to_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, [{"w": torch.ones(3)}], version(), "dcp")
    path = tmp_path / FOLDER / ".metadata"
    flip(path, 3)
    assert [(p.file, p.kind) for p in verify(tmp_path, FOLDER)] == [(".metadata", "checksum")]
    flip(path, 3)
    os.truncate(path, 5)
    assert [(p.file, p.kind) for p in verify(tmp_path, FOLDER)] == [(".metadata", "size")]
    assert catalog.committed(tmp_path) == []
    path.unlink()
    assert [(p.file, p.kind) for p in verify(tmp_path, FOLDER)] == [(".metadata", "missing")]
    with pytest.raises(CheckpointCorrupt, match=r"\.metadata is missing"):
        catalog.load(tmp_path, FOLDER)


def rewrite(root: Path, **changed: Any) -> None:
    path = root / FOLDER / layout.MANIFEST
    found = manifest.decode(path.read_bytes())
    path.write_bytes(manifest.encode(msgspec.structs.replace(found, **changed)))


@pytest.mark.parametrize("deep", [True, False])
def test_a_manifest_that_names_other_bytes_than_the_file_has_is_found(
    tmp_path: Path, deep: bool
) -> None:
    content, _ = save(tmp_path, [{"a": torch.zeros(3), "b": torch.ones(3)}], version())
    spans = content.spans[0]
    rewrite(tmp_path, spans={0: {"a": spans["b"], "b": spans["a"]}})
    (problem,) = verify(tmp_path, FOLDER, deep)
    assert (problem.file, problem.kind) == (layout.MANIFEST, "header")
    assert "spans" in problem.detail
    rewrite(tmp_path, spans={0: {"a": (0, 12), "b": spans["b"]}})
    (problem,) = verify(tmp_path, FOLDER, deep)
    assert (problem.file, problem.kind) == (layout.torch_name(0), "header")
    assert "'a' should lie at 0 to 12" in problem.detail


def test_receipts_are_not_needed_for_a_good_checkpoint_and_damaged_ones_are_told(
    tmp_path: Path,
) -> None:
    save(tmp_path, [{"a": torch.zeros(3)}] * 2, version(world=2))
    receipt = tmp_path / FOLDER / layout.receipt_name(1)
    flip(receipt, 80)
    found = [(p.file, p.kind) for p in verify(tmp_path, FOLDER)]
    assert found == [(receipt.name, "receipt")]
    receipt.unlink()
    assert verify(tmp_path, FOLDER) == []
