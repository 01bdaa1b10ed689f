"""The benchmark of checkpoints as a whole, with a tiny state, and what of it touches the system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import checkpoint_runner, harness
from benchmarks.checkpoint import parse_arguments
from benchmarks.checkpoint_names import BY_NAME, OPTIONS, SYSTEMS
from benchmarks.jobs.checkpoint_raw import REQUEST, RawFiles, copy_seconds
from benchmarks.jobs.checkpoint_systems import MAKERS

pytestmark = pytest.mark.process


def test_what_is_given_besides_quick_counts() -> None:
    args = parse_arguments(["--quick", "--systems", "dcp"])
    assert args.systems == ["dcp"] and args.state_mb < 100


def test_each_system_has_its_own_name_and_title() -> None:
    assert len(BY_NAME) == len(SYSTEMS) == len({system.title for system in SYSTEMS})
    assert {*BY_NAME, *OPTIONS} == MAKERS.keys()


def test_the_last_error_of_a_traceback_is_found() -> None:
    text = "Traceback ...\nValueError: first\n[rank1]: RuntimeError: second\nfarewell\n"
    assert checkpoint_runner.last_error(text) == "RuntimeError: second"
    assert checkpoint_runner.last_error("farewell") == "it printed no error"


def test_memory_of_this_process_is_counted_and_of_a_gone_one_not() -> None:
    assert checkpoint_runner.proportional_bytes([os.getpid()]) > 1 << 20
    assert checkpoint_runner.proportional_bytes([2**22 + 1]) == 0


def test_copies_leave_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    met: list[str] = []
    seconds = copy_seconds([torch.ones(1000)], before + 1, meet=lambda: met.append("met"))
    assert seconds > 0 and met == ["met"]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("with_fio", [False, True])
def test_raw_files_are_written_whole_and_read(
    with_fio: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_fio:
        monkeypatch.setattr("shutil.which", lambda name: None)
    raw = RawFiles(tmp_path / "raw", [1, REQUEST + 1])
    assert raw.write() > 0
    sizes = sorted(path.stat().st_size for path in (tmp_path / "raw").iterdir())
    assert sizes == [REQUEST, 2 * REQUEST]
    assert raw.read() > 0
    raw.remove()
    assert not (tmp_path / "raw").exists()


@pytest.mark.slow
def test_quick_measures_torch_and_keepstep_and_leaves_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    words = [sys.executable, "-m", "benchmarks.checkpoint", "--quick", "--folder", str(disk)]
    done = subprocess.run(
        [*words, "--json", str(tmp_path / "all.json")],
        cwd=harness.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "keepstep" in done.stdout and "time lost / best peer's" in done.stdout
    document = json.loads((tmp_path / "all.json").read_text())
    runs = document["scenarios"][0]["runs"]
    assert {name: [run["error"] for run in found] for name, found in runs.items()} == {
        "torch-save": [""],
        "keepstep-overlap": [""],
    }
    assert all(run["ranks"][0]["wrong_tensors"] == 0 for found in runs.values() for run in found)
    assert all(run["memory_bytes"] is not None for found in runs.values() for run in found)
    assert list(disk.iterdir()) == []
