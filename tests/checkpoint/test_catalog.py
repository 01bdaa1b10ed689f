from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.checkpoint import catalog, layout, manifest
from keepstep.errors import CheckpointCorrupt, CheckpointError
from tests.checkpoint.shards import make_version, save, write


def _rewrite(root: Path, folder: str, found: manifest.Manifest) -> None:
    (root / folder / layout.MANIFEST).write_bytes(manifest.encode(found))


def test_checkpoints_are_listed_newest_first_by_step_then_term_then_round(tmp_path: Path) -> None:
    for step, term, round_number in ((5, 1, 1), (10, 1, 1), (10, 1, 3), (10, 2, 1), (7, 1, 1)):
        save(tmp_path, make_version(step, term=term, round=round_number))
    found = [(i.step, i.version.term, i.version.round) for i in catalog.committed(tmp_path)]
    assert found == [(10, 2, 1), (10, 1, 3), (10, 1, 1), (7, 1, 1), (5, 1, 1)]


def test_an_entry_says_how_large_and_how_old_the_checkpoint_is(tmp_path: Path) -> None:
    found, folder = save(tmp_path, make_version(), at=77.0)
    (info,) = catalog.committed(tmp_path)
    files = [tmp_path / folder / layout.shard_name(rank) for rank in range(2)]
    assert info.nbytes == sum(file.stat().st_size for file in files) == found.nbytes
    assert (info.folder, info.created, info.version) == (folder, 77.0, make_version())


def test_a_folder_that_does_not_exist_has_no_checkpoints(tmp_path: Path) -> None:
    assert catalog.committed(tmp_path / "none") == []
    assert catalog.newest(tmp_path / "none") is None
    assert catalog.unfinished(tmp_path / "none") == []
    assert catalog.remove_unfinished(tmp_path / "none") == []


def test_the_newest_can_be_limited_by_run_step_and_folder(tmp_path: Path) -> None:
    for step, run in ((5, "a"), (6, "a"), (7, "b")):
        save(tmp_path, make_version(step, run=run))

    def step_of(**limits: Any) -> int | None:
        info = catalog.newest(tmp_path, **limits)
        return None if info is None else info.step

    assert step_of() == 7
    assert step_of(run="a") == 6
    assert step_of(below=7) == 6
    assert step_of(below=5) is None
    assert step_of(exclude=("step-00000007", "step-00000006")) == 5
    assert step_of(run="c") is None


def test_what_is_not_committed_whole_is_not_offered(tmp_path: Path) -> None:
    folders = [save(tmp_path, make_version(step))[1] for step in range(1, 8)]
    os.truncate(tmp_path / folders[0] / layout.shard_name(1), 4096)
    (tmp_path / folders[1] / layout.shard_name(1)).unlink()
    (tmp_path / folders[2] / layout.MANIFEST).unlink()
    (tmp_path / folders[3] / layout.MANIFEST).write_bytes(b"{}")
    os.rename(tmp_path / folders[4], tmp_path / "step-00000055")
    (tmp_path / folders[5] / layout.MANIFEST).unlink()
    (tmp_path / folders[5] / layout.MANIFEST).mkdir()
    assert [info.step for info in catalog.committed(tmp_path)] == [7]
    assert catalog.unfinished(tmp_path) == [folders[2]]
    assert catalog.published(tmp_path) == [folders[i] for i in (0, 1, 3, 5, 6)] + ["step-00000055"]


def test_loading_says_what_is_wrong(tmp_path: Path) -> None:
    _, folder = save(tmp_path, make_version())
    os.truncate(tmp_path / folder / layout.shard_name(1), 4096)
    with pytest.raises(
        CheckpointCorrupt, match=r"rank-00001\.safetensors has 4096 bytes, committed"
    ):
        catalog.load(tmp_path, folder)
    (tmp_path / folder / layout.shard_name(1)).unlink()
    with pytest.raises(CheckpointCorrupt, match=r"rank-00001\.safetensors is missing"):
        catalog.load(tmp_path, folder)
    (tmp_path / folder / layout.MANIFEST).unlink()
    with pytest.raises(CheckpointCorrupt, match="never committed"):
        catalog.load(tmp_path, folder)


def test_a_manifest_that_points_out_of_its_folder_is_not_offered(tmp_path: Path) -> None:
    found, folder = save(tmp_path, make_version())
    shard = layout.shard_name(1)
    os.replace(tmp_path / folder / shard, tmp_path / "outside")
    files = {"../outside" if name == shard else name: info for name, info in found.files.items()}
    _rewrite(tmp_path, folder, msgspec.structs.replace(found, files=files))
    assert catalog.committed(tmp_path) == []
    _rewrite(tmp_path, folder, found)
    (tmp_path / folder / shard).symlink_to(tmp_path / "outside")
    assert catalog.committed(tmp_path) == []
    with pytest.raises(CheckpointCorrupt, match="leads out"):
        catalog.load(tmp_path, folder)


def test_a_checkpoint_of_a_newer_keepstep_is_an_error_and_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, make_version(4))
    found, folder = save(tmp_path, make_version(5))
    _rewrite(tmp_path, folder, msgspec.structs.replace(found, format=99))
    with pytest.raises(CheckpointError, match="format 99"):
        catalog.newest(tmp_path)


def test_removing_takes_everything_and_the_manifest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = save(tmp_path, make_version())
    inner = tmp_path / folder / "extra"
    inner.mkdir()
    (inner / "file").write_text("x")
    order: list[str] = []
    real = os.unlink

    def noted(path: str | Path, **more: Any) -> None:
        order.append(os.path.basename(str(path)))
        real(path, **more)

    monkeypatch.setattr(os, "unlink", noted)
    catalog.remove(tmp_path, folder)
    assert order[0] == layout.MANIFEST
    assert order[-1] == layout.VERSION_FILE
    assert list(tmp_path.iterdir()) == []


def test_removing_a_folder_never_follows_links_out_of_it(tmp_path: Path) -> None:
    _, folder = save(tmp_path, make_version())
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (tmp_path / folder / "link").symlink_to(outside)
    catalog.remove(tmp_path, folder)
    assert (outside / "precious").read_text() == "x"


def test_unfinished_folders_go_once_a_newer_one_is_committed(tmp_path: Path) -> None:
    _, old = write(tmp_path, make_version(5), 0)
    assert catalog.remove_unfinished(tmp_path) == []
    save(tmp_path, make_version(6))
    _, in_flight = write(tmp_path, make_version(7), 0)
    assert catalog.remove_unfinished(tmp_path, exclude=[old]) == []
    assert catalog.remove_unfinished(tmp_path) == [old]
    assert catalog.unfinished(tmp_path) == [in_flight]


def test_a_save_in_flight_after_a_rollback_is_not_taken_for_garbage(tmp_path: Path) -> None:
    save(tmp_path, make_version(600))
    _, folder = write(tmp_path, make_version(550, round=2), 0)
    assert catalog.remove_unfinished(tmp_path) == []
    assert catalog.unfinished(tmp_path) == [folder]


@pytest.mark.parametrize("age_s", [-10, 10])
def test_unfinished_folders_of_another_run_are_judged_by_the_times_on_storage(
    tmp_path: Path, age_s: int
) -> None:
    _, other = write(tmp_path, make_version(9, run="before"), 0)
    _, folder = save(tmp_path, make_version(5))
    at = int((tmp_path / folder / layout.MANIFEST).stat().st_mtime) - age_s
    os.utime(tmp_path / other, (at, at))
    assert catalog.remove_unfinished(tmp_path) == ([other] if age_s > 0 else [])


def test_a_half_removed_checkpoint_is_cleared_away_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = save(tmp_path, make_version(5))
    save(tmp_path, make_version(6))
    real = os.unlink

    def broken(path: str | Path, **more: Any) -> None:
        if str(path).endswith("safetensors"):
            raise OSError(5, "Input/output error")
        real(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", broken)
        with pytest.raises(OSError, match="Input/output"):
            catalog.remove(tmp_path, folder)
    assert [info.step for info in catalog.committed(tmp_path)] == [6]
    assert catalog.remove_unfinished(tmp_path) == [folder]
