"""A folder that each node has for itself is found before anything is saved."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.storage.scripts import Saver, world

pytestmark = [pytest.mark.training, pytest.mark.needs("root")]


def _alone(root: Path) -> list[str]:
    """A command that starts another with a ``root`` of its own."""
    return ["unshare", "-m", "sh", "-c", f'mount -t tmpfs own "{root}" && exec "$@"', "sh"]


@pytest.mark.parametrize("first", ["save 1", "restore"])
def test_ranks_that_do_not_see_the_folder_are_named_with_their_hosts(
    tmp_path: Path, first: str
) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Saver(
                    root,
                    before=_alone(root) if rank == 1 else (),
                    world=world(tmp_path / "meeting", rank, 3),
                )
            )
            for rank in range(3)
        ]
        for rank in ranks:
            rank.say(first)
        errors = [rank.answer() for rank in ranks]
    assert len(set(errors)) == 1
    assert errors[0].startswith("CheckpointNotWritable the checkpoint folder is not shared by all")
    assert f"1 of 3 do not see what rank 0 on {os.uname().nodename} wrote there" in errors[0]
    assert f"rank 1 on {os.uname().nodename}" in errors[0]
    assert not list(root.glob(".shared.*"))
    assert not list(root.glob("step-*"))


def test_ranks_that_see_one_folder_save_and_leave_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Saver(root, world=world(tmp_path / "meeting", rank, 2)))
            for rank in range(2)
        ]
        for line in ("restore", "save 1", "finalize 30"):
            for rank in ranks:
                rank.say(line)
            assert [rank.answer().split()[0] for rank in ranks] == ["ok", "ok"]
        for rank in ranks:
            assert rank.end()[0] == 0
    assert sorted(path.name for path in root.iterdir()) == ["leases", "step-00000001", "terms"]
