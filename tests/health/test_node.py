"""Every health check can fail, and says what it saw."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from keepstep.health import CheckpointFolder, GpuPresence, MemoryAvailable, WallClock, run_all
from keepstep.ports import Finding, HealthCheck


def wrapped(folder: Path, script: str) -> CheckpointFolder:
    """The check, its probe started by a shell ``script`` that ends with running ``"$@"``."""
    check = CheckpointFolder(folder)
    check.command = ("sh", "-c", script, "sh", *check.command)
    return check


def own_mounts(folder: Path, options: str, then: str = "true") -> CheckpointFolder:
    """The check with a small tmpfs on ``folder``, in a mount namespace that ends with it."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder.mkdir()
    inner = f'cd / && mount -t tmpfs -o {options} test "$FOLDER" && {then}; exec "$@"'
    check = wrapped(folder, f"export FOLDER='{folder}'; exec unshare --mount sh -c '{inner}' sh")
    check.command = (*check.command[:2], check.command[2] + ' "$@"', *check.command[3:])
    return check


def test_a_good_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    finding = CheckpointFolder(folder)()
    assert (finding.check, finding.status) == ("checkpoint_folder", "ok")
    assert "bytes free" in finding.detail
    assert list(folder.iterdir()) == []


def test_a_file_in_the_way_is_bad(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    finding = CheckpointFolder(tmp_path / "run" / "checkpoints")()
    assert (finding.status, "could not make the folder: Not a dir" in finding.detail) == (
        "bad",
        True,
    )


def test_a_folder_that_takes_no_bytes_is_bad_and_left_empty(tmp_path: Path) -> None:
    finding = wrapped(tmp_path, 'ulimit -f 0; exec "$@"')()
    assert finding.status == "bad"
    assert "could not write a file: File too large" in finding.detail
    assert list(tmp_path.iterdir()) == []


def test_a_full_file_system_is_bad(tmp_path: Path) -> None:
    finding = own_mounts(
        tmp_path / "full", "size=8k", 'head -c 8192 /dev/zero > "$FOLDER/filling"'
    )()
    assert finding.status == "bad"
    assert "could not write a file: No space left on device" in finding.detail


def test_a_read_only_file_system_is_bad(tmp_path: Path) -> None:
    finding = own_mounts(tmp_path / "fixed", "ro")()
    assert finding.status == "bad"
    assert "could not write a file: Read-only file system" in finding.detail


def test_too_little_free_space_is_bad_with_both_numbers(tmp_path: Path) -> None:
    finding = CheckpointFolder(tmp_path, min_free_bytes=1 << 60)()
    assert finding.status == "bad"
    assert f"bytes free, {1 << 60} are needed" in finding.detail


def test_a_disk_that_does_not_answer_does_not_block_the_caller(tmp_path: Path) -> None:
    check = CheckpointFolder(tmp_path, limit_s=0.2)
    check.command = (sys.executable, "-S", "-c", "import signal; signal.pause()")
    finding = check()
    assert finding.status == "bad"
    assert "no answer from its disk in 0.2 s" in finding.detail


def test_a_probe_that_ends_without_an_answer_is_bad(tmp_path: Path) -> None:
    check = CheckpointFolder(tmp_path)
    check.command = ("true",)
    assert check().status == "bad"


def test_memory_is_measured_against_what_is_needed(tmp_path: Path) -> None:
    assert MemoryAvailable(1, root=tmp_path)().status == "ok"
    finding = MemoryAvailable(1 << 60, root=tmp_path)()
    assert (finding.status, finding.action) == ("bad", "replace_node")
    assert "available in the machine" in finding.detail


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/pod", "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:cpu,memory:/pod",
            "sys/fs/cgroup/memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["v2", "v1"],
)
def test_the_limit_of_a_group_above_counts_and_cached_files_do_not(
    tmp_path: Path, line: str, folder: str, names: tuple[str, str, str]
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(line + "\n")
    top = tmp_path / folder
    (top / "pod").mkdir(parents=True)
    limit, usage, cache = names
    (top / "pod" / limit).write_text("max\n")
    (top / "pod" / usage).write_text("900\n")
    (top / limit).write_text("1000\n")
    (top / usage).write_text("900\n")
    (top / "memory.stat").write_text(f"anon 800\n{cache} 50\n")
    assert MemoryAvailable(150, root=tmp_path)().status == "ok"
    finding = MemoryAvailable(151, root=tmp_path)()
    assert finding.status == "bad"
    assert f"150 bytes available in {top}, 151 are needed" in finding.detail


def test_gpus_that_are_not_there_are_absent_and_never_ok(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    assert GpuPresence(devices=tmp_path)().status == "absent"
    missing = GpuPresence(expected=2, devices=tmp_path)()
    assert (missing.status, missing.action) == ("bad", "replace_node")
    (tmp_path / "nvidia0").touch()
    assert GpuPresence(expected=2, devices=tmp_path)().status == "bad"
    (tmp_path / "nvidia1").touch()
    finding = GpuPresence(expected=2, devices=tmp_path)()
    assert (finding.status, finding.detail) == ("ok", "2 NVIDIA GPUs are visible (not tested)")


class Times:
    """A clock that shows ``wall``, and ``monos`` one after the other."""

    def __init__(self, wall: float, *monos: float) -> None:
        self._wall = wall
        self._monos = list(monos)

    def wall(self) -> float:
        return self._wall

    def mono(self) -> float:
        return self._monos.pop(0)

    def sleep(self, seconds: float) -> None:
        raise AssertionError(f"a check must not sleep ({seconds} s)")


def test_a_clock_behind_what_has_happened_is_bad() -> None:
    assert WallClock()().status == "ok"
    assert WallClock(clock=Times(0.0, 1.0, 1.0))().status == "bad"
    assert WallClock(1000.0, clock=Times(996.0, 1.0, 1.0))().status == "ok"
    finding = WallClock(1000.0, clock=Times(990.0, 1.0, 1.0))()
    assert "10.0 s behind" in finding.detail


def test_a_monotonic_clock_that_goes_back_is_bad() -> None:
    finding = WallClock(0.0, clock=Times(1.0, 2.0, 1.5))()
    assert (finding.status, "went back by 0.500000 s" in finding.detail) == ("bad", True)


class Broken:
    """A check with a bug."""

    name = "broken"

    def __call__(self) -> Finding:
        raise ZeroDivisionError("a bug")


def test_all_checks_run_and_one_that_breaks_is_bad(tmp_path: Path) -> None:
    checks: list[HealthCheck] = [
        Broken(),
        GpuPresence(devices=tmp_path),
        CheckpointFolder(tmp_path),
        MemoryAvailable(1),
        WallClock(),
    ]
    assert all(isinstance(check, HealthCheck) for check in checks)
    findings = run_all(checks)
    assert [(f.check, f.status) for f in findings] == [
        ("broken", "bad"),
        ("gpu_presence", "absent"),
        ("checkpoint_folder", "ok"),
        ("memory", "ok"),
        ("clock", "ok"),
    ]
    assert "ZeroDivisionError: a bug" in findings[0].detail
