from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.checkpoint import catalog, layout, manifest
from keepstep.checkpoint.commit import commit, missing_receipts
from keepstep.errors import CheckpointCorrupt, CheckpointError, SaveFailed
from tests.checkpoint.shards import FixedClock, make_version, save, write


def _both(root: Path) -> str:
    version = make_version()
    write(root, version, 0)
    return write(root, version, 1)[1]


def test_a_commit_publishes_what_the_receipts_say(tmp_path: Path) -> None:
    folder = _both(tmp_path)
    assert catalog.committed(tmp_path) == []
    found = commit(tmp_path, folder, make_version(), FixedClock(33.0))
    assert found.created == 33.0
    assert catalog.load(tmp_path, folder) == found
    assert not [name for name in os.listdir(tmp_path / folder) if name.endswith(".tmp")]


def test_everything_is_durable_before_the_manifest_has_its_name_and_its_name_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    names: dict[int, str] = {}
    real_fsync, real_link, real_rename = os.fsync, os.link, os.rename

    def fsync(fd: int) -> None:
        inode = os.fstat(fd).st_ino
        order.append(f"sync {inode}")
        real_fsync(fd)

    def named(real: Any) -> Any:
        def call(source: Path, target: Path) -> None:
            names[os.stat(source).st_ino] = Path(target).name
            order.append(f"name {os.stat(source).st_ino}")
            real(source, target)

        return call

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", named(real_link))
    monkeypatch.setattr(os, "rename", named(real_rename))
    version = make_version(world=1)
    _, folder = write(tmp_path, version, 0)
    written = len(order)
    commit(tmp_path, folder, version)
    names[(tmp_path / folder).stat().st_ino] = "folder"
    names[tmp_path.stat().st_ino] = "root"
    shown = [f"{what} {names[int(inode)]}" for what, inode in map(str.split, order)]
    shard, receipt = layout.shard_name(0), layout.receipt_name(0)
    assert shown[:written] == [
        f"name {layout.VERSION_FILE}",
        *(f"sync {layout.VERSION_FILE}", "sync folder", "sync root"),
        *(f"sync {receipt}", f"sync {shard}"),
        *(f"name {shard}", f"name {receipt}", "sync folder"),
    ]
    manifest_file = layout.MANIFEST
    assert shown[written:] == [
        "sync folder",
        *(f"sync {manifest_file}", f"name {manifest_file}", "sync folder"),
    ]
    assert names[(tmp_path / folder / shard).stat().st_ino] == shard


def test_committing_twice_returns_the_first_manifest(tmp_path: Path) -> None:
    folder = _both(tmp_path)
    first = commit(tmp_path, folder, make_version(), FixedClock(1.0))
    text = (tmp_path / folder / layout.MANIFEST).read_bytes()
    assert commit(tmp_path, folder, make_version(), FixedClock(2.0)) == first
    assert (tmp_path / folder / layout.MANIFEST).read_bytes() == text


def test_the_loser_of_two_commits_at_once_returns_the_winners_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _both(tmp_path)
    real = os.link

    def slow(source: str, target: Path) -> None:
        monkeypatch.setattr(os, "link", real)
        commit(tmp_path, folder, make_version(), FixedClock(1.0))
        real(source, target)

    monkeypatch.setattr(os, "link", slow)
    assert commit(tmp_path, folder, make_version(), FixedClock(2.0)).created == 1.0


def test_a_folder_committed_for_another_version_is_not_touched(tmp_path: Path) -> None:
    _, folder = save(tmp_path, make_version())
    with pytest.raises(SaveFailed, match="holds the committed"):
        commit(tmp_path, folder, make_version(round=2))


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = _both(tmp_path)
    with pytest.raises(SaveFailed, match="the folder belongs to"):
        commit(tmp_path, folder, make_version(round=2))
    assert catalog.committed(tmp_path) == []


def test_missing_receipts_are_named_and_nothing_is_committed(tmp_path: Path) -> None:
    version = make_version(world=12)
    for rank in (0, 5):
        _, folder = write(tmp_path, version, rank)
    assert missing_receipts(tmp_path, folder, 12) == [1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    with pytest.raises(SaveFailed, match=r"10 of 12 shards .* 1, 2, 3, 4, 6, 7, 8, 9 \.\.\."):
        commit(tmp_path, folder, version)
    assert catalog.unfinished(tmp_path) == [folder]


def test_a_folder_that_does_not_exist_has_no_receipts(tmp_path: Path) -> None:
    assert missing_receipts(tmp_path, "step-00000001", 2) == [0, 1]


def test_a_receipt_of_another_version_is_never_combined(tmp_path: Path) -> None:
    folder = _both(tmp_path)
    other = make_version(round=2)
    _, elsewhere = write(tmp_path, other, 1)
    for name in (layout.receipt_name(1), layout.shard_name(1)):
        os.replace(tmp_path / elsewhere / name, tmp_path / folder / name)
    with pytest.raises(SaveFailed, match="the receipt of rank 1 is rank 1's of"):
        commit(tmp_path, folder, make_version())
    assert catalog.committed(tmp_path) == []


def test_a_shard_that_is_gone_or_has_another_size_is_refused(tmp_path: Path) -> None:
    folder = _both(tmp_path)
    shard = tmp_path / folder / layout.shard_name(1)
    with shard.open("ab") as file:
        file.write(b"x")
    with pytest.raises(SaveFailed, match=r"rank-00001.safetensors is \d+ bytes long"):
        commit(tmp_path, folder, make_version())
    shard.unlink()
    with pytest.raises(SaveFailed, match=r"rank-00001.safetensors is missing"):
        commit(tmp_path, folder, make_version())


def test_a_receipt_that_names_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = _both(tmp_path)
    path = tmp_path / folder / layout.receipt_name(1)
    receipt = manifest.decode_receipt(path.read_bytes())
    path.write_bytes(
        manifest.encode_receipt(msgspec.structs.replace(receipt, file="../../etc/passwd"))
    )
    with pytest.raises(CheckpointCorrupt, match="names the file"):
        commit(tmp_path, folder, make_version())


def test_a_damaged_receipt_is_refused(tmp_path: Path) -> None:
    folder = _both(tmp_path)
    (tmp_path / folder / layout.receipt_name(0)).write_bytes(b"{}")
    with pytest.raises(CheckpointError):
        commit(tmp_path, folder, make_version())
    assert catalog.committed(tmp_path) == []


def test_a_commit_removes_what_killed_writers_left_in_the_folder(tmp_path: Path) -> None:
    version = make_version()
    for rank in range(2):
        _, folder = write(tmp_path, version, rank)
    names = [".rank-00000.safetensors.77-0123abcd.tmp", ".version.json.77-0123abcd.tmp"]
    kept = [".manifest.json.77-0123abcd.tmp", ".hidden"]
    for name in (*names, *kept):
        (tmp_path / folder / name).write_text("x")
    commit(tmp_path, folder, version)
    left = {path.name for path in (tmp_path / folder).iterdir()}
    assert left.isdisjoint(names) and left.issuperset(kept)
