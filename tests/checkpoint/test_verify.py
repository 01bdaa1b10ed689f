from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.checkpoint import blocks, layout, manifest
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.shard_file import ShardPlan, TensorSpec, read_header
from keepstep.checkpoint.verify import file_checksum, verify
from tests.checkpoint.shards import flip, image, make_version, save, write


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


def test_the_checksum_of_a_file_of_blocks_is_that_of_their_checksums(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = os.urandom(3 * 4096 + 5)
    path.write_bytes(data)
    each = [xxhash.xxh3_128_digest(data[at : at + 4096]) for at in range(0, len(data), 4096)]
    assert file_checksum(path, 4096) == xxhash.xxh3_128_hexdigest(b"".join(each))


@pytest.fixture
def many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str, str]:
    """A checkpoint whose one file has 14 blocks of 4096 bytes, the last one short."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 4096)
    version = make_version(world=1)
    _, folder = write(tmp_path, version, 0, image(version, 0, pad=12 * 4096 + 7))
    found = commit(tmp_path, folder, version)
    (info,) = found.files.values()
    assert len(info.block_digests()) == 14
    return tmp_path, folder, layout.shard_name(0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 14 * 4096), min_size=1, max_size=6, unique=True))
def test_damage_in_any_blocks_is_found_and_located(
    many_blocks: tuple[Path, str, str], places: list[int]
) -> None:
    root, folder, file = many_blocks
    path = root / folder / file
    whole = path.read_bytes()
    damaged = bytearray(whole)
    for at in places:
        damaged[at % len(whole)] ^= 1
    path.write_bytes(damaged)
    problems = verify(root, folder)
    path.write_bytes(whole)
    wrong = {at % len(whole) for at in places if whole[at % len(whole)] != damaged[at % len(whole)]}
    if not wrong:  # two flips of one bit
        assert problems == []
        return
    (problem,) = problems
    assert (problem.file, problem.kind) == (file, "checksum")
    told = {at for start, stop in problem.ranges for at in range(start // 4096, -(-stop // 4096))}
    assert told == {at // 4096 for at in wrong}
    assert list(problem.ranges) == sorted(problem.ranges)
    assert all(after > stop for (_, stop), (after, _) in pairwise(problem.ranges))
    assert max(stop for _, stop in problem.ranges) <= len(whole)
    assert f"{len(told)} of its 14 blocks differ" in problem.detail
    first, last = problem.ranges[0][0], problem.ranges[0][1] - 1
    assert f"bytes {first} to {last}" in problem.detail


def test_a_zeroed_block_and_two_swapped_ones_are_found(
    many_blocks: tuple[Path, str, str],
) -> None:
    root, folder, file = many_blocks
    path = root / folder / file
    whole = path.read_bytes()
    path.write_bytes(whole[:8192] + bytes(4096) + whole[12_288:])
    assert verify(root, folder)[0].ranges == ((8192, 12_288),)
    path.write_bytes(whole[4096:8192] + whole[:4096] + whole[8192:])
    assert verify(root, folder)[0].ranges == ((0, 8192),)


def test_progress_tells_of_every_byte_that_is_read(many_blocks: tuple[Path, str, str]) -> None:
    root, folder, file = many_blocks
    told: list[int] = []
    assert verify(root, folder, progress=told.append) == []
    assert sum(told) == (root / folder / file).stat().st_size
    told.clear()
    assert verify(root, folder, deep=False, progress=told.append) == []
    assert told == []


def test_chunks_under_other_names_are_compared_as_well(tmp_path: Path) -> None:
    version = make_version(world=1)
    halves = [
        TensorSpec(name="w", dtype="U8", shape=(2,), global_shape=(4,), offsets=(0,)),
        TensorSpec(name="w#1", of="w", dtype="U8", shape=(2,), global_shape=(4,), offsets=(2,)),
    ]
    plan = ShardPlan(halves, version, 0, {})
    _, folder = write(tmp_path, version, 0, plan.header + b"abcd")
    found = commit(tmp_path, folder, version)
    assert verify(tmp_path, folder) == []
    first, second = found.tensors["w"].chunks
    turned = (
        msgspec.structs.replace(first, offsets=(2,)),
        msgspec.structs.replace(second, offsets=(0,)),
    )
    tensors = {"w": msgspec.structs.replace(found.tensors["w"], chunks=turned)}
    _rewrite(tmp_path, folder, msgspec.structs.replace(found, tensors=tensors))
    (problem,) = verify(tmp_path, folder)
    assert "the files' own descriptions say otherwise about: tensors" in problem.detail


def test_notes_of_another_version_and_damaged_ones_are_found_but_missing_ones_are_no_harm(
    tmp_path: Path,
) -> None:
    _, folder = save(tmp_path, make_version(5))
    _, other = save(tmp_path, make_version(6))
    receipt, owner = tmp_path / folder / layout.receipt_name(1), tmp_path / folder / "version.json"
    for path in (receipt, owner):
        good = path.read_bytes()
        for wrong in ((tmp_path / other / path.name).read_bytes(), good[:-3], b"\xff"):
            path.write_bytes(wrong)
            (problem,) = verify(tmp_path, folder)
            assert (problem.file, problem.kind) == (path.name, "receipt")
        path.unlink()
        assert verify(tmp_path, folder) == []
