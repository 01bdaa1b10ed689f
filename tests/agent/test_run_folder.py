"""The run folder: room for everything, and one agent at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from pathlib import Path

import pytest

from keepstep.agent.environment import node_suffix
from keepstep.agent.launch_spec import Launch
from keepstep.agent.run_folder import RunFolder
from keepstep.config import Config
from keepstep.errors import UsageError


def _launch(folder: Path) -> Launch:
    return Launch(
        nproc=1,
        mode="script",
        target="train.py",
        args=[],
        config=Config(),
        run_id="r1",
        run_dir=folder,
        log_dir=folder / "logs",
        tee={},
        redirects={},
        local_ranks_filter=None,
        master_addr="127.0.0.1",
        master_port=0,
        environ={},
        argv=[],
    )


def test_a_run_folder_has_room_for_everything_and_can_be_used_again(tmp_path: Path) -> None:
    for _ in range(2):
        RunFolder(_launch(tmp_path / "run")).close()
    made = {path.name for path in (tmp_path / "run").iterdir()}
    assert made == {"events", "stacks", "faults", "terms", "lock"}


def test_a_second_agent_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    spec = _launch(tmp_path / "run")
    with contextlib.closing(RunFolder(spec)):
        with pytest.raises(UsageError, match="another keepstep run uses the run folder") as caught:
            RunFolder(spec)
        assert str(tmp_path / "run") in str(caught.value)
    RunFolder(spec).close()


def test_each_node_of_several_has_files_of_its_own(tmp_path: Path) -> None:
    first = dataclasses.replace(_launch(tmp_path / "run"), nnodes=2, node_rank=0)
    second = dataclasses.replace(first, node_rank=1)
    with contextlib.closing(RunFolder(first)):
        RunFolder(second).close()
        with pytest.raises(UsageError, match="another keepstep run"):
            RunFolder(first)
    assert (tmp_path / "run" / "lock-1").exists()
    assert node_suffix(dataclasses.replace(first, node_rank=None)) == f"-{socket.gethostname()}"
