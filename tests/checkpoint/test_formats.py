"""Checkpoints of earlier formats, as the releases that wrote them left them in ``data``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from keepstep.checkpoint import catalog, layout, manifest
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.verify import verify
from tests.checkpoint.shards import FixedClock, flip

_DATA = Path(__file__).parent / "data"
OLD = {"format-1": 1, "format-2-torch": 2, "format-2-dcp": 2}


@pytest.fixture(params=sorted(OLD))
def old(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, int]:
    """A copy of an old folder of checkpoints, the name of the one in it, and its format."""
    name = str(request.param)
    root = tmp_path / name
    shutil.copytree(_DATA / name, root)
    (folder,) = layout.list_folders(root)
    return root, folder, OLD[name]


def test_there_is_one_of_each_earlier_format() -> None:
    assert set(OLD.values()) == set(range(1, manifest.FORMAT))
    assert sorted(path.name for path in _DATA.iterdir()) == sorted(OLD)


def test_an_old_checkpoint_is_offered_and_whole(old: tuple[Path, str, int]) -> None:
    root, folder, number = old
    found = catalog.load(root, folder)
    assert found.format == number
    assert [info.folder for info in catalog.committed(root)] == [folder]
    assert verify(root, folder) == []
    assert all(info.block_digests() == () for info in found.all_files().values())


def test_what_an_old_checkpoint_says_is_written_again_byte_for_byte(
    old: tuple[Path, str, int],
) -> None:
    root, folder, _ = old
    path = root / folder
    text = (path / layout.MANIFEST).read_bytes()
    assert manifest.encode(manifest.decode(text)) == text
    receipts = sorted(path.glob("*.receipt.json"))
    assert receipts
    for one in receipts:
        assert (
            manifest.encode_receipt(manifest.decode_receipt(one.read_bytes())) == one.read_bytes()
        )


def test_shards_of_an_older_writer_are_committed_as_that_one_would(
    old: tuple[Path, str, int],
) -> None:
    root, folder, _ = old
    path = root / folder / layout.MANIFEST
    text = path.read_bytes()
    before = manifest.decode(text)
    path.unlink()
    assert commit(root, folder, before.version, FixedClock(before.created)) == before
    assert path.read_bytes() == text


def test_a_flipped_bit_anywhere_in_an_old_checkpoint_is_found(old: tuple[Path, str, int]) -> None:
    root, folder, _ = old
    found = catalog.load(root, folder)
    for name, info in found.all_files().items():
        for at in range(0, info.size, 173):
            flip(root / folder / name, at)
            (problem,) = verify(root, folder)
            assert (problem.file, problem.kind, problem.ranges) == (name, "checksum", ())
            flip(root / folder / name, at)
    assert verify(root, folder) == []
