from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import xxhash

from keepstep.checkpoint import blocks, layout, manifest
from keepstep.checkpoint.shard_file import read_header
from keepstep.checkpoint.verify import file_checksum, verify
from tests.checkpoint.shards import flip, image, make_version, save


def _rewrite(root: Path, folder: str, found: manifest.Manifest) -> None:
    (root / folder / layout.MANIFEST).write_bytes(manifest.encode(found))


def test_a_good_checkpoint_has_no_problems(tmp_path: Path) -> None:
    _, folder = save(tmp_path, make_version())
    assert verify(tmp_path, folder) == []
    assert verify(tmp_path, folder, deep=False) == []


def test_a_flipped_byte_in_any_region_of_a_shard_is_found(tmp_path: Path) -> None:
    _, folder = save(tmp_path, make_version())
    path = tmp_path / folder / layout.shard_name(0)
    size = path.stat().st_size
    header = read_header(path)
    regions = {0, 7, 8, 9, 500, header.data_start - 1, size - 1}
    for start, stop in header.spans.values():
        regions |= {start, stop - 1}
    for at in regions | set(range(0, size, 101)):
        flip(path, at)
        problems = verify(tmp_path, folder)
        assert [(problem.file, problem.kind) for problem in problems] == [(path.name, "checksum")]
        flip(path, at)
    assert verify(tmp_path, folder) == []


def test_a_flipped_byte_anywhere_in_the_manifest_is_found(tmp_path: Path) -> None:
    _, folder = save(tmp_path, make_version())
    path = tmp_path / folder / layout.MANIFEST
    for at in range(0, path.stat().st_size, 11):
        flip(path, at)
        assert [problem.kind for problem in verify(tmp_path, folder, deep=False)] == ["manifest"]
        flip(path, at)
    assert verify(tmp_path, folder) == []


def test_files_that_are_missing_or_cut_are_named(tmp_path: Path) -> None:
    _, folder = save(tmp_path, make_version(world=3))
    (tmp_path / folder / layout.shard_name(0)).unlink()
    os.truncate(tmp_path / folder / layout.shard_name(2), 4100)
    for deep in (True, False):
        found = [(problem.file, problem.kind) for problem in verify(tmp_path, folder, deep)]
        assert found == [(layout.shard_name(0), "missing"), (layout.shard_name(2), "size")]


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    (problem,) = verify(tmp_path, "step-00000001")
    assert (problem.file, problem.kind) == (layout.MANIFEST, "manifest")


def test_a_checkpoint_in_a_folder_of_another_step_is_bad(tmp_path: Path) -> None:
    _, folder = save(tmp_path, make_version())
    os.rename(tmp_path / folder, tmp_path / "step-00000006")
    assert [p.detail for p in verify(tmp_path, "step-00000006")] == ["it is of step 5"]


def test_a_manifest_that_leads_out_of_its_folder_is_bad_and_nothing_is_read(tmp_path: Path) -> None:
    found, folder = save(tmp_path, make_version())
    files = {name.replace("rank-00001", "../rank-00001"): i for name, i in found.files.items()}
    _rewrite(tmp_path, folder, msgspec.structs.replace(found, files=files))
    (problem,) = verify(tmp_path, folder)
    assert problem.kind == "manifest"
    assert "leads out of the checkpoint's folder" in problem.detail


def _swapped_shard(root: Path, folder: str, data: bytes, found: manifest.Manifest) -> None:
    """Put another shard in and let the manifest's size and checksum agree with it."""
    name = layout.shard_name(1)
    (root / folder / name).write_bytes(data)
    parts = [blocks.digest(data)]
    info = manifest.FileInfo(
        size=len(data),
        checksum=blocks.combine(parts),
        rank=1,
        block_bytes=blocks.BLOCK_BYTES,
        blocks=blocks.encode(parts),
    )
    _rewrite(root, folder, msgspec.structs.replace(found, files={**found.files, name: info}))


@pytest.mark.parametrize("deep", [True, False])
def test_a_whole_shard_of_another_version_or_rank_is_found_by_its_header(
    tmp_path: Path, deep: bool
) -> None:
    found, folder = save(tmp_path, make_version())
    for other in (image(make_version(round=2), 1), image(make_version(), 0)):
        _swapped_shard(tmp_path, folder, other, found)
        (problem,) = verify(tmp_path, folder, deep)
        assert (problem.file, problem.kind) == (layout.shard_name(1), "header")


@pytest.mark.parametrize("deep", [True, False])
def test_headers_that_do_not_add_up_to_the_manifest_are_found(tmp_path: Path, deep: bool) -> None:
    found, folder = save(tmp_path, make_version())
    _swapped_shard(tmp_path, folder, image(make_version(), 1, values={"lr": 9.0}), found)
    (problem,) = verify(tmp_path, folder, deep)
    assert problem.kind == "header"
    assert "rank_values" in problem.detail


def test_the_checksum_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = os.urandom((16 << 20) + 77)
    path.write_bytes(data)
    assert file_checksum(path) == xxhash.xxh3_128_hexdigest(data)
