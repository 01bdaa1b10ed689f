"""File systems and what they are rated for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep.checkpoint import storage
from keepstep.checkpoint.storage import FileSystem, Rated

GIB = 1 << 30


def mounts(folder: Path, text: str) -> Path:
    file = folder / "mountinfo"
    file.write_text(text)
    return file


def test_the_file_system_of_a_real_folder_is_found(tmp_path: Path) -> None:
    found = storage.file_system(tmp_path)
    assert found.kind not in ("", "unknown")
    assert tmp_path.resolve().is_relative_to(found.mount)
    space = os.statvfs(tmp_path)
    assert found.nbytes == space.f_blocks * space.f_frsize
    assert storage.file_system(Path("/proc")).kind == "proc"


def test_the_deepest_mount_counts_names_may_have_blanks_and_the_last_one_is_on_top(
    tmp_path: Path,
) -> None:
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    place = tmp_path / "with blank" / "checkpoints"
    place.mkdir(parents=True)
    shown = str(tmp_path / "with blank").replace(" ", "\\040")
    text = (
        f"1 0 {number} / / rw - ext4 /dev/a rw\n"
        f"2 1 {number} / {shown} rw shared:1 master:2 - nfs4 host:/a rw\n"
        f"3 1 {number} / {shown} rw - lustre 10.0.0.1@tcp:/abcd rw,flock\n"
        f"4 1 0:999 / {place} rw - tmpfs tmpfs rw\n"
        f"5 1 {number} / {tmp_path}/with rw - xfs /dev/b rw\n"
    )
    found = storage.file_system(place, mounts(tmp_path, text))
    assert (found.kind, found.source) == ("lustre", "10.0.0.1@tcp:/abcd")
    assert found.mount == str(tmp_path / "with blank")


def test_a_folder_below_no_mount_is_on_an_unknown_one(tmp_path: Path) -> None:
    assert storage.file_system(tmp_path, mounts(tmp_path, "")).kind == "unknown"


@pytest.mark.parametrize(
    ("shown", "bought"),
    [(1, 1200), (1120, 1200), (1200, 1200), (1201, 2400), (2401, 4800), (7199, 7200)],
)
def test_the_size_that_is_sold_is_the_next_one_above_what_is_shown(shown: int, bought: int) -> None:
    assert storage.bought_gib(shown * GIB) == bought


def lustre(gib: int) -> FileSystem:
    return FileSystem("lustre", "/fsx", "10.0.0.1@tcp:/abcd", gib * GIB)


def test_the_smallest_fsx_for_lustre_takes_117_mb_a_second_and_a_save_of_48_gb_7_minutes() -> None:
    rated = storage.rated(lustre(1120), 0.0)
    assert rated.mb_s == pytest.approx(117.2, abs=0.1)
    assert rated.save_s(48 * 10**9) == pytest.approx(410, abs=1)
    line = rated.line(48 * 10**9)
    assert "48 GB takes 6 min 50 s at the rated 117 MB/s of lustre at /fsx" in line
    assert "SCRATCH_2, of 1200 GiB" in line and "set checkpoint.rated_mb_s" in line


def test_the_setting_counts_more_than_what_is_worked_out() -> None:
    rated = storage.rated(lustre(1120), 500.0)
    assert (rated.mb_s, rated.because) == (500.0, "checkpoint.rated_mb_s")
    assert rated.line(10**9).startswith("a checkpoint of 1 GB takes 2 s at the rated 500 MB/s")


def test_nothing_is_said_of_file_systems_that_are_not_rated() -> None:
    for kind in ("ext4", "nfs4", "tmpfs", "overlay"):
        rated = storage.rated(FileSystem(kind, "/", "x", GIB), 0.0)
        assert (rated.mb_s, rated.save_s(GIB), rated.line(GIB)) == (0.0, 0.0, "")
        assert rated.warning(GIB, 1, 0.1) == ""
    assert storage.rated(FileSystem("lustre", "/", "x", 0), 0.0).mb_s == 0.0


def test_saves_more_often_than_storage_takes_them_are_warned_of_with_what_would_do() -> None:
    rated = Rated("lustre at /fsx", 100.0, "checkpoint.rated_mb_s")
    assert rated.warning(10**9, 100, 0.1) == ""
    text = rated.warning(10**9, 99, 0.1)
    assert "every 99 steps, that is every 9.9 s, and takes 10 s to write" in text
    assert "checkpoint.every_steps=101" in text
    assert rated.warning(10**9, 0, 0.1) == ""
    assert rated.warning(10**9, 99, 0.0) == ""
