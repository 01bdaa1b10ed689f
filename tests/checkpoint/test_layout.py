from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import layout
from keepstep.errors import CheckpointCorrupt
from tests.checkpoint.shards import make_version


def test_the_plain_name_is_tried_first_and_then_those_with_term_and_round() -> None:
    names = list(islice(layout.folder_names(make_version(500, term=2, round=7)), 3))
    assert names == ["step-00000500", "step-00000500.t2r7", "step-00000500.t2r7-2"]


@given(step=st.integers(0, 10**12), term=st.integers(0, 10**6), round_number=st.integers(0, 10**6))
def test_every_folder_name_is_parsed_back(step: int, term: int, round_number: int) -> None:
    version = make_version(step, term=term, round=round_number)
    plain, *others = islice(layout.folder_names(version), 4)
    assert layout.parse_folder(plain) == (step, None, None)
    assert [layout.parse_folder(name) for name in others] == [(step, term, round_number)] * 3


@pytest.mark.parametrize(
    "name", ["step-500", "step-00000500.t1", "step-0000050x", "xstep-00000500", "step-00000500\n"]
)
def test_other_names_are_no_checkpoint_folders(name: str) -> None:
    assert layout.parse_folder(name) is None


@given(rank=st.integers(0, 10**8))
def test_every_shard_name_is_parsed_back(rank: int) -> None:
    assert layout.parse_shard(layout.shard_name(rank)) == rank
    assert layout.parse_shard(layout.receipt_name(rank)) is None


def test_a_temporary_name_is_hidden_and_never_that_of_a_shard() -> None:
    name = layout.temporary_name(layout.shard_name(3))
    assert name.startswith(".")
    assert layout.parse_shard(name) is None
    assert name != layout.temporary_name(layout.shard_name(3))


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/../../x", "/etc/passwd", "a//b", "a/./b", "a/", "rank\0", "../../x"],
)
def test_a_name_that_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointCorrupt, match="leads out of the checkpoint's folder"):
        layout.inside(tmp_path, name)


def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (folder / "file").symlink_to(tmp_path / "secret")
    (folder / "deeper").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    for name in ("file", "deeper/secret", "loop"):
        with pytest.raises(CheckpointCorrupt):
            layout.inside(folder, name)


def test_plain_names_are_resolved_also_when_the_folder_itself_is_behind_a_link(
    tmp_path: Path,
) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "alias").symlink_to(real)
    found = layout.inside(tmp_path / "alias", "rank-00000.safetensors")
    assert found == tmp_path / "alias" / "rank-00000.safetensors"


def test_only_real_folders_with_checkpoint_names_are_listed(tmp_path: Path) -> None:
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000001.t1r2").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "step-00000003").write_text("a file")
    (tmp_path / "step-00000004").symlink_to(tmp_path / "other")
    assert layout.list_folders(tmp_path) == ["step-00000001.t1r2", "step-00000002"]
    assert layout.list_folders(tmp_path / "missing") == []


def test_publish_never_replaces_a_file_and_leaves_no_temporary_one(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    layout.publish(path, b"first")
    with pytest.raises(FileExistsError):
        layout.publish(path, b"second")
    assert path.read_bytes() == b"first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["manifest.json"]


def _refused(number: int) -> Callable[..., None]:
    def refuse(*paths: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EMLINK])
def test_publish_does_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", _refused(number))
    path = tmp_path / "manifest.json"
    layout.publish(path, b"first")
    with pytest.raises(FileExistsError):
        layout.publish(path, b"second")
    assert path.read_bytes() == b"first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP])
def test_publish_does_without_renaming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", _refused(errno.ENOSYS))
    monkeypatch.setattr(Path, "replace", _refused(number))
    path = tmp_path / "manifest.json"
    layout.publish(path, b"first")
    with pytest.raises(FileExistsError):
        layout.publish(path, b"second")
    assert path.read_bytes() == b"first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC])
def test_a_publish_that_storage_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", _refused(errno.EPERM))
    monkeypatch.setattr(Path, "replace", _refused(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        layout.publish(tmp_path / "manifest.json", b"first")
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_was_made_though_the_answer_said_it_exists_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def twice(source: Path, path: Path) -> None:
        link(source, path)
        link(source, path)

    monkeypatch.setattr(os, "link", twice)
    layout.publish(tmp_path / "manifest.json", b"first")
    assert (tmp_path / "manifest.json").read_bytes() == b"first"


def test_an_empty_file_is_a_name_that_was_taken_and_never_published(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    assert not layout.is_published(path)
    path.touch()
    assert not layout.is_published(path)
    path.write_bytes(b"x")
    assert layout.is_published(path)


def test_a_stale_handle_is_opened_anew_and_other_errors_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(b"text")
    left = [errno.ESTALE] * 4
    real = os.open

    def opened(*arguments: Any) -> int:
        if left:
            number = left.pop()
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, "open", opened)
    assert layout.read(path) == b"text"
    left += [errno.ESTALE] * 5
    with pytest.raises(OSError, match="Stale file handle"):
        layout.read(path)
    left[:] = [errno.EIO]
    with pytest.raises(OSError, match="Input/output error"):
        layout.read(path)


def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(OSError, match="no regular file"):
        layout.read(tmp_path / "manifest.json")


def test_a_file_is_copied_where_storage_cannot_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in ((errno.ENOSYS, "a"), (errno.EPERM, "b")):
        (tmp_path / "temporary").write_bytes(b"text")
        monkeypatch.setattr(Path, "rename", _refused(number))
        layout.move(tmp_path / "temporary", tmp_path / name)
        assert (tmp_path / name).read_bytes() == b"text"
        assert not (tmp_path / "temporary").exists()
    monkeypatch.setattr(Path, "rename", _refused(errno.EROFS))
    with pytest.raises(OSError, match="Read-only"):
        layout.move(tmp_path / "a", tmp_path / "c")
