"""CPUs, GPUs, addresses and folders of a machine."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from keepstep.cli.launch_plan import Machine, Request, plan
from keepstep.cli.machine import RUN_FILE, ThisMachine, check_address, prepare_folders, visible
from keepstep.errors import UsageError


class StoppedClock:
    """2026-11-29 16:45:02 UTC, for ever."""

    def wall(self) -> float:
        return 1795970702.0

    def mono(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody sleeps here")


class FakeMachine:
    """A machine with so many CPUs and GPUs."""

    def __init__(self, cpus: int, gpus: int) -> None:
        self._cpus, self._gpus = cpus, gpus

    def cpu_count(self) -> int:
        return self._cpus

    def gpu_count(self) -> int:
        return self._gpus

    def new_run_id(self) -> str:
        return "new"

    def stored_run_id(self, run_dir: Path) -> str:
        return ""


def nproc(asked: str, machine: Machine) -> int:
    request = Request(
        options={"nproc-per-node": asked},
        target="train.py",
        args=[],
        argv=[],
        environ={},
        folder=Path("/job"),
    )
    return plan(request, machine).nproc


@pytest.mark.parametrize(
    ("asked", "gpus", "ranks"),
    [("cpu", 8, 4), ("gpu", 8, 8), ("auto", 8, 8), ("auto", 0, 4), ("cpu", 0, 4), ("3", 8, 3)],
)
def test_ranks_are_counted_as_torchrun_counts_them(asked: str, gpus: int, ranks: int) -> None:
    assert nproc(asked, FakeMachine(cpus=4, gpus=gpus)) == ranks


def test_one_rank_a_gpu_needs_a_gpu() -> None:
    with pytest.raises(UsageError, match="gpu finds no NVIDIA GPU") as caught:
        nproc("gpu", FakeMachine(cpus=4, gpus=0))
    assert "CUDA_VISIBLE_DEVICES" in caught.value.advice


@pytest.mark.parametrize(
    ("variable", "count"),
    [
        (None, 4),
        ("", 0),
        ("0,1", 2),
        (" 3 , 1 ", 2),
        ("0,4,1", 1),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,0", 0),
        ("GPU-aa,GPU-bb,GPU-cc", 3),
        ("GPU-aa,GPU-aa", 0),
        ("MIG-aa", 1),
        ("x", 0),
    ],
)
def test_hidden_gpus_do_not_count(variable: str | None, count: int) -> None:
    assert visible(4, variable) == count
    assert visible(0, variable) == 0


def test_gpus_are_counted_where_the_driver_lists_them(tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert ThisMachine({}, gpu_folder=tmp_path / "gpus").gpu_count() == 2
    hidden = ThisMachine({"CUDA_VISIBLE_DEVICES": "1"}, gpu_folder=tmp_path / "gpus")
    assert hidden.gpu_count() == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho '  MIG 1g (UUID: y)'\necho 'GPU 1: A'\n", 2),
        ("#!/bin/sh\necho 'GPU 0: A'\nexit 9\n", 0),
        ("no program at all", 0),
    ],
)
def test_without_that_list_nvidia_smi_is_asked(tmp_path: Path, text: str, count: int) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(text)
    program.chmod(0o755)
    machine = ThisMachine({"PATH": str(tmp_path)}, gpu_folder=tmp_path / "none")
    assert machine.gpu_count() == count


def test_without_either_there_is_no_gpu(tmp_path: Path) -> None:
    assert ThisMachine({"PATH": str(tmp_path)}, gpu_folder=tmp_path / "none").gpu_count() == 0


def test_cpus_are_those_that_this_process_may_use() -> None:
    assert ThisMachine({}).cpu_count() == len(os.sched_getaffinity(0))


def test_a_run_id_is_made_of_the_time() -> None:
    machine = ThisMachine({}, clock=StoppedClock())
    first, second = machine.new_run_id(), machine.new_run_id()
    assert re.fullmatch(r"20261129-164502-[0-9a-f]{4}", first)
    assert first[:15] == second[:15]


def test_an_address_of_this_machine_with_a_free_port_is_fine() -> None:
    for host in ("127.0.0.1", "localhost", socket.gethostname(), f"{socket.gethostname()}.pods"):
        check_address(host, 0)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port} of 127\.0\.0\.1 .* already in use"):
            check_address("127.0.0.1", port)


def test_the_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.1 is not an address of this machine"):
        check_address("192.0.2.1", 0)
    with pytest.raises(UsageError, match="is not known"):
        check_address("a" * 70 + ".invalid", 0)


def test_the_folders_are_made_and_say_which_run_they_hold(tmp_path: Path) -> None:
    run_dir, log_dir = tmp_path / "a" / "b", tmp_path / "logs"
    prepare_folders(run_dir, log_dir, "job7", 30.0)
    prepare_folders(run_dir, log_dir, "job7", 30.0)
    assert ThisMachine({}).stored_run_id(run_dir) == "job7"
    assert [path.name for path in run_dir.iterdir()] == [RUN_FILE]
    assert list(log_dir.iterdir()) == []


def test_a_folder_that_another_run_took_meanwhile_is_not_used(tmp_path: Path) -> None:
    prepare_folders(tmp_path, tmp_path, "job7", 30.0)
    with pytest.raises(UsageError, match="was taken by another run, job7"):
        prepare_folders(tmp_path, tmp_path, "job8", 30.0)
    assert ThisMachine({}).stored_run_id(tmp_path) == "job7"


def test_a_folder_that_cannot_be_made_is_named_with_its_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file/run cannot be written to: Not a dir") as caught:
        prepare_folders(tmp_path / "file" / "run", tmp_path, "job7", 30.0)
    assert "--run-dir" in caught.value.advice
    with pytest.raises(UsageError) as caught:
        prepare_folders(tmp_path / "run", tmp_path / "file", "job7", 30.0)
    assert "--log-dir" in caught.value.advice


def test_a_damaged_run_file_is_named(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).write_text('{"v": 1}')
    with pytest.raises(UsageError, match=rf"{RUN_FILE} cannot be read"):
        ThisMachine({}).stored_run_id(tmp_path)
