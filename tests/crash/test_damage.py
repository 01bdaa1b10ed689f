"""Whatever happens to the files of a checkpoint: it is found, and no wrong byte is restored."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import keepstep
from keepstep.checkpoint import layout, manifest, shard_file
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.torch_reader import load
from keepstep.checkpoint.verify import file_checksum, verify
from keepstep.errors import CheckpointError
from keepstep.wire.types import Version
from tests.checkpoint import foreign_files
from tests.checkpoint.torch_worlds import fake_world, sharded, version, write
from tests.crash.damage import Damage, damages

pytestmark = pytest.mark.process

FOLDER = "step-00000010"
OLD, NEW = 5, 10
KINDS = ["native-1", "native-3", "torch", "dcp"]
_STRANGERS = ["of an older step", "of another run", "of a later save"]


def _state(step: int, rank: int, world: int, run: int = 0) -> dict[str, Any]:
    """Tensors and values that follow from the step and the run; inside a fake world."""
    whole = torch.arange(6000.0).reshape(1200, 5) + 10_000 * step + 1_000_000 * run
    return {
        "whole": sharded(whole, world),
        "same": whole[:7].to(torch.bfloat16),
        "own": {"tensor": torch.full((3,), step * 10.0 + rank), "name": f"{step} of {run}"},
    }


def _write(root: Path, kind: str, of: Version, run: int = 0) -> str:
    """Save and commit the state of ``of`` in the given format."""
    folder = ""
    for rank in range(of.world):
        with fake_world(rank, of.world):
            state = _state(of.step, rank, of.world, run)
            if kind.startswith("native"):
                folder = write(root, {"state": state}, of, rank)
            else:
                _, folder = foreign_files.seal(root, {"state": state}, of, rank, kind=kind)  # type: ignore[arg-type]
    if kind == "native-1":
        _to_format_1(root / folder, of)
    commit(root, folder, of)
    return folder


def _to_format_1(folder: Path, of: Version) -> None:
    """Receipts as earlier releases wrote them."""
    for rank in range(of.world):
        shard = folder / layout.shard_name(rank)
        receipt = manifest.receipt_of(shard_file.read_header(shard), file_checksum(shard))
        path = folder / layout.receipt_name(rank)
        path.write_bytes(manifest.encode_receipt(receipt))


@pytest.fixture(scope="module", params=[(k, w) for k in KINDS for w in (1, 2)], ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    kind, world = request.param
    return Saved(tmp_path_factory.mktemp("saved"), kind, world)


@pytest.fixture(scope="module", params=KINDS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of a world of one: in a pretended world ranks hear nothing of one another."""
    return Saved(tmp_path_factory.mktemp("alone"), request.param, 1)


class Saved:
    """Two steps of a run, and other checkpoints whose files may get among them."""

    def __init__(self, folder: Path, kind: str, world: int) -> None:
        self.world = world
        self.root = folder / "root"
        for step in (OLD, NEW):
            _write(self.root, kind, version(step, world=world))
        later = version(NEW, world=world, round_number=2)
        other = version(NEW, world=world, run="other")
        _write(folder / "later", kind, later, 1)
        _write(folder / "other", kind, other, 2)
        folders = [
            self.root / "step-00000005",
            folder / "other" / FOLDER,
            folder / "later" / FOLDER,
        ]
        self.strangers = dict(zip(_STRANGERS, folders, strict=True))
        found = manifest.decode((self.root / FOLDER / layout.MANIFEST).read_bytes())
        self.format = found.format
        self.needed = {layout.MANIFEST, *found.all_files()}

    def harmed(self, root: Path, harm: list[Damage]) -> set[str]:
        """Copy everything to ``root`` and harm the newest; returns the names of changed files."""
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.root, root)
        for one in harm:
            one.do(root / FOLDER, self.strangers)
        before, after = _contents(self.root / FOLDER), _contents(root / FOLDER)
        return {name for name in before | after if before.get(name) != after.get(name)}

    def loaded(self, root: Path, rank: int) -> int:
        """The step whose state ``rank`` has after loading the newest checkpoint, 0 for none.

        Raises:
            CheckpointError: it is damaged.
        """
        return self.restored(
            rank, lambda target: load(target, root, FOLDER, rank=rank, world=self.world)
        )

    def restored(self, rank: int, call: Callable[[dict[str, Any]], object]) -> int:
        """The step whose state ``call`` has put into a target, 0 if it is none of those saved."""
        with fake_world(rank, self.world):
            target = {"state": _state(0, rank, self.world)}
            call(target)
            for step in (NEW, OLD):
                if _equal(target["state"], _state(step, rank, self.world)):
                    return step
        return 0


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _equal(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(
        torch.equal(found[name].to_local(), wanted[name].to_local())
        if name == "whole"
        else torch.equal(found[name], wanted[name])
        for name in ("whole", "same")
    ) and (
        torch.equal(found["own"]["tensor"], wanted["own"]["tensor"])
        and found["own"]["name"] == wanted["own"]["name"]
    )


def test_the_formats_are_those_that_are_meant(saved: Saved, tmp_path: Path) -> None:
    assert saved.format in (1, 2, 3)
    assert saved.harmed(tmp_path / "root", []) == set()
    assert verify(tmp_path / "root", FOLDER) == []
    for rank in range(saved.world):
        assert saved.loaded(tmp_path / "root", rank) == NEW


@hypothesis.settings(max_examples=25)
@hypothesis.given(data=st.data())
def test_damage_is_found_by_verify_and_by_restore(
    saved: Saved, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    _is_found(saved, tmp_path_factory.getbasetemp() / "harmed", data)


@pytest.mark.full
@pytest.mark.timeout(900)
@hypothesis.settings(max_examples=1000)
@hypothesis.given(data=st.data())
def test_much_more_damage_is_found_by_verify_and_by_restore(
    saved: Saved, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    _is_found(saved, tmp_path_factory.getbasetemp() / "harmed", data)


def _is_found(saved: Saved, root: Path, data: st.DataObject) -> None:
    # So few that no other checkpoint gets in as a whole.
    harm = data.draw(st.lists(damages(_STRANGERS), min_size=1, max_size=saved.world))
    changed = saved.harmed(root, harm)
    hypothesis.assume(changed)
    found = {problem.file for problem in verify(root, FOLDER)}
    lost = {name for name in changed - saved.needed if not (root / FOLDER / name).exists()}
    assert found or changed <= lost, changed
    for rank in range(saved.world):
        try:
            step = saved.loaded(root, rank)
        except CheckpointError as error:
            assert error.what and error.where and error.done and error.advice, error
            assert changed & saved.needed
        else:
            assert step == NEW, (rank, changed)


@hypothesis.settings(max_examples=12)
@hypothesis.given(data=st.data())
def test_a_restore_takes_the_older_step_instead_of_a_damaged_one(
    alone: Saved, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    harm = data.draw(st.lists(damages(_STRANGERS), min_size=1, max_size=1))
    root = tmp_path_factory.getbasetemp() / "harmed"
    changed = alone.harmed(root, harm)
    hypothesis.assume(changed)
    steps: list[int] = []

    def restore(target: dict[str, Any]) -> None:
        with keepstep.Checkpointer(root, run_id="run") as checkpointer:
            steps.append(checkpointer.restore(target))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        step = alone.restored(0, restore)
    assert steps == [step], changed
    assert step == NEW or (step == OLD and changed & alone.needed), changed
    # Without a manifest it is as if it had never been committed: nothing is told of it.
    committed = layout.is_published(root / FOLDER / layout.MANIFEST)
    assert bool(told) == (step == OLD and committed), [str(one.message) for one in told]
