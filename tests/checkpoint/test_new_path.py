from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.checkpoint import new_path
from keepstep.errors import UsageError


def test_a_file_appears_whole_when_all_is_done(tmp_path: Path) -> None:
    with new_path.made(tmp_path / "out") as temporary:
        temporary.write_text("half")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out").read_text() == "half"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_appears_with_all_that_is_in_it(tmp_path: Path) -> None:
    with new_path.made(tmp_path / "out") as temporary:
        (temporary / "deep").mkdir(parents=True)
        (temporary / "deep/file").write_text("x")
    assert (tmp_path / "out/deep/file").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("folder", [True, False])
def test_nothing_is_left_after_an_error(tmp_path: Path, folder: bool) -> None:
    with pytest.raises(RuntimeError), new_path.made(tmp_path / "out") as temporary:
        if folder:
            temporary.mkdir()
            (temporary / "file").write_text("x")
        else:
            temporary.write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_there_is_never_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out"
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="out exists"), new_path.made(path):
        raise AssertionError
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_what_appears_meanwhile_is_not_replaced_either(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="out exists"),
        new_path.made(tmp_path / "out") as temporary,
    ):
        temporary.write_text("late")
        (tmp_path / "out").write_text("first")
    assert (tmp_path / "out").read_text() == "first"
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_the_folder_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        new_path.check(tmp_path / "none/out")
