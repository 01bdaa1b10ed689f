"""Memory cgroups: where one can be made, on systems of every make."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep.errors import UsageError
from keepstep.faults import cgroup

V1_MOUNT = "35 30 0:31 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2_MOUNT = "36 30 0:32 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system without cgroups, to be filled."""
    (tmp_path / "proc/self").mkdir(parents=True)
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    return tmp_path


def fill(system: Path, groups: str, mounts: str, *folders: str, passed_on: str = "") -> None:
    (system / "proc/self/cgroup").write_text(groups)
    (system / "proc/self/mountinfo").write_text(mounts)
    for folder in folders:
        (system / folder).mkdir(parents=True, exist_ok=True)
    if passed_on:
        (system / passed_on / "cgroup.subtree_control").write_text("cpu memory\n")


def v1(system: Path, *, top: str = "/", own: str = "/job") -> None:
    folder = "sys/fs/cgroup/memory" + own.removeprefix(top.rstrip("/"))
    fill(system, f"0::/\n4:memory:{own}\n", V1_MOUNT.format(top=top), folder)


def test_on_v1_the_group_lies_below_the_processes_own(system: Path) -> None:
    v1(system)
    assert cgroup.available() == ""
    path = cgroup.Limited("keepstep-x-1", 1).path
    assert path == system / "sys/fs/cgroup/memory/job/keepstep-x-1"


def test_in_a_container_that_sees_only_its_own_part_the_path_is_found(system: Path) -> None:
    v1(system, top="/docker/abc", own="/docker/abc/job")
    assert cgroup.Limited("g", 1).path == system / "sys/fs/cgroup/memory/job/g"


def test_on_v2_the_group_lies_beside_the_processes_own(system: Path) -> None:
    fill(
        system, "0::/user/shell\n", V2_MOUNT, "sys/fs/cgroup/user/shell",
        passed_on="sys/fs/cgroup/user",
    )  # fmt: skip
    assert cgroup.available() == ""
    assert cgroup.Limited("g", 1).path == system / "sys/fs/cgroup/user/g"


def test_on_v2_a_process_in_the_root_group_gets_one_below_it(system: Path) -> None:
    fill(system, "0::/\n", V2_MOUNT, "sys/fs/cgroup", passed_on="sys/fs/cgroup")
    assert cgroup.Limited("g", 1).path == system / "sys/fs/cgroup/g"


def test_on_v2_without_the_controller_the_reason_names_the_folder(system: Path) -> None:
    fill(system, "0::/user/shell\n", V2_MOUNT, "sys/fs/cgroup/user/shell")
    assert "not passed on below" in cgroup.available()
    with pytest.raises(UsageError, match="not passed on"):
        cgroup.Limited("g", 1)


def test_a_system_without_cgroups_says_so(system: Path) -> None:
    assert "no cgroups" in cgroup.available()
    fill(system, "3:cpu:/\n", "35 30 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n")
    assert "no cgroup file system with the memory controller" in cgroup.available()
    assert cgroup.collect("run", 1) == 0


def test_a_process_that_the_kernel_would_not_kill_is_refused(system: Path) -> None:
    v1(system)
    (system / "proc/self/oom_score_adj").write_text("-1000\n")
    assert "oom_score_adj" in cgroup.available()


def test_a_folder_that_is_no_cgroup_is_refused_and_nothing_is_left(system: Path) -> None:
    v1(system)
    group = cgroup.Limited("g", 1 << 20)
    with pytest.raises(UsageError, match="No such file"):
        group.create()
    assert not group.path.exists()


def test_limits_include_swap_and_the_counter_is_read_in_both_forms(system: Path) -> None:
    v1(system)
    group = cgroup.Limited("g", 4096)
    group.path.mkdir()
    for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
        (group.path / name).touch()
    group.create()
    assert (group.path / "memory.limit_in_bytes").read_text() == "4096"
    assert (group.path / "memory.memsw.limit_in_bytes").read_text() == "4096"
    assert group.oom_kills() == 0
    (group.path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert group.oom_kills() == 2
    assert not group.remove()

    group.version = 2
    for name in ("memory.max", "memory.swap.max"):
        (group.path / name).touch()
    group.create()
    assert (group.path / "memory.max").read_text() == "4096"
    assert (group.path / "memory.swap.max").read_text() == "0"
    (group.path / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    assert group.oom_kills() == 3


def test_a_real_group_can_be_made_and_removed() -> None:
    reason = cgroup.available()
    if reason:
        pytest.skip(f"no memory cgroup: {reason}")
    group = cgroup.Limited(cgroup.group_name("unit", os.getpid()), 64 << 20)
    group.create()
    try:
        assert group.oom_kills() == 0
    finally:
        assert group.remove()
    assert group.remove()


def test_the_groups_name_is_one_path_part_whatever_the_run_is_called() -> None:
    assert cgroup.group_name("../a b/c", 7) == "keepstep-.._a_b_c-7"
