"""How much memory is left, from fake /proc and cgroup trees, and whether staging fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.memory import Room, Wanted, fitting, room, shortage, statement

_MIB = 1 << 20
_GIB = 1 << 30


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _machine(root: Path, available: int, total: int = 64 * _GIB) -> None:
    text = f"MemTotal: {total >> 10} kB\nMemFree: 17 kB\nMemAvailable: {available >> 10} kB\n"
    _write(root / "proc/meminfo", text)


def _group(
    folder: Path, limit: int | str, usage: int, inactive: int = 0, active: int = 0, version: int = 2
) -> None:
    names = ("memory.max", "memory.current", "")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    _write(folder / names[0], f"{limit}\n")
    _write(folder / names[1], f"{usage}\n")
    text = f"anon 7\n{names[2]}inactive_file {inactive}\n{names[2]}active_file {active}\n"
    _write(folder / "memory.stat", text)


def _mount(root: Path, kind: str, inside: str, point: str, options: str = "rw") -> None:
    with (root / "proc/self/mountinfo").open("a") as file:
        file.write(f"31 23 0:27 {inside} {point} rw,nosuid shared:9 - {kind} none {options}\n")


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    _machine(tmp_path, 5 * _GIB)
    assert room(tmp_path) == Room(5 * _GIB, 64 * _GIB, "the machine's memory")


def test_where_nothing_can_be_read_there_is_no_limit(tmp_path: Path) -> None:
    assert room(tmp_path).available > 1 << 50


def test_a_limit_counts_less_its_usage_but_with_the_file_cache_in_it(tmp_path: Path) -> None:
    _machine(tmp_path, 5 * _GIB)
    _write(tmp_path / "proc/self/cgroup", "0::/job\n")
    group = tmp_path / "sys/fs/cgroup/job"
    _group(group, 4 * _GIB, 3 * _GIB, inactive=256 * _MIB, active=512 * _MIB)
    found = room(tmp_path)
    assert (found.available, found.limit) == (_GIB + 768 * _MIB, 4 * _GIB)
    assert found.where == "the memory cgroup /sys/fs/cgroup/job"


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_of_all_groups_above_counts(tmp_path: Path, version: int) -> None:
    _machine(tmp_path, 30 * _GIB)
    if version == 1:
        _write(tmp_path / "proc/self/cgroup", "5:cpu:/x\n4:memory:/pods/pod/c\n0::/\n")
        top = tmp_path / "sys/fs/cgroup/memory"
        unlimited: int | str = 9223372036854771712
    else:
        _write(tmp_path / "proc/self/cgroup", "0::/pods/pod/c\n")
        top = tmp_path / "sys/fs/cgroup"
        unlimited = "max"
    _group(top / "pods/pod/c", unlimited, _GIB, version=version)
    _group(top / "pods/pod", 8 * _GIB, 6 * _GIB, version=version)
    _group(top / "pods", 20 * _GIB, 19 * _GIB, version=version)
    found = room(tmp_path)
    assert (found.available, found.limit) == (_GIB, 20 * _GIB)
    assert found.where.endswith("/pods")


def test_a_lower_high_mark_is_the_limit(tmp_path: Path) -> None:
    _machine(tmp_path, 30 * _GIB)
    _write(tmp_path / "proc/self/cgroup", "0::/job\n")
    group = tmp_path / "sys/fs/cgroup/job"
    _group(group, 4 * _GIB, _GIB)
    _write(group / "memory.high", f"{3 * _GIB}\n")
    assert room(tmp_path).available == 2 * _GIB


def test_in_a_container_the_groups_folder_is_the_mounts_root(tmp_path: Path) -> None:
    _machine(tmp_path, 30 * _GIB)
    _write(tmp_path / "proc/self/cgroup", "4:memory:/docker/abc\n0::/docker/abc\n")
    _mount(tmp_path, "cgroup", "/docker/abc", "/sys/fs/cgroup/memory", "rw,memory")
    _mount(tmp_path, "cgroup", "/docker/abc", "/sys/fs/cgroup/cpu", "rw,cpu")
    _mount(tmp_path, "cgroup2", "/docker/abc", "/sys/fs/cgroup/unified")
    _group(tmp_path / "sys/fs/cgroup/memory", 2 * _GIB, _GIB, version=1)
    assert room(tmp_path).available == _GIB


def test_usage_beyond_the_limit_leaves_nothing(tmp_path: Path) -> None:
    _machine(tmp_path, 30 * _GIB)
    _write(tmp_path / "proc/self/cgroup", "0::/job\n")
    _group(tmp_path / "sys/fs/cgroup/job", _GIB, 2 * _GIB)
    assert room(tmp_path).available == 0


def test_this_machine_has_some_memory_left() -> None:
    found = room()
    assert 0 < found.available <= found.limit


# --- whether it fits ------------------------------------------------------------------------------


def test_all_slots_are_given_if_they_fit_else_one_else_none() -> None:
    wanted = Wanted(size=_GIB, slots=2, ranks=4)
    for available, slots in ((9, 2), (8, 1), (5, 1), (4, 0), (1, 0)):
        left = Room(available * _GIB, 32 * _GIB, "here")  # half a GiB of that is kept free
        assert fitting(wanted, left) == slots, available
    assert fitting(wanted, Room(9 * _GIB, 32 * _GIB, "here"), promised=2 * _GIB) == 1


@given(
    size=st.integers(1, 1 << 40),
    slots=st.integers(1, 4),
    ranks=st.integers(1, 16),
    available=st.integers(0, 1 << 44),
    limit=st.integers(1, 1 << 44),
    promised=st.integers(0, 1 << 40),
)
def test_what_is_given_fits_beside_what_others_were_promised(
    size: int, slots: int, ranks: int, available: int, limit: int, promised: int
) -> None:
    left = Room(min(available, limit), limit, "here")
    fits = fitting(Wanted(size, slots, ranks), left, promised)
    assert fits in (0, 1, slots)
    if fits:
        assert fits * size * ranks + promised + limit // 64 <= left.available
    else:
        assert size * ranks + promised + limit // 64 > left.available


def test_a_shortage_says_what_is_needed_what_is_there_and_where() -> None:
    wanted = Wanted(size=3 * 10**9, slots=2, ranks=4)
    left = Room(9 * 10**9, 16 * 10**9, "the memory cgroup /sys/fs/cgroup/job")
    text = str(shortage(wanted, left, promised=10**9))
    for part in ("3.0 GB", "12.0 GB", "24.0 GB", "9.0 GB", "16.0 GB", "1.0 GB", "4 ranks"):
        assert part in text
    assert "/sys/fs/cgroup/job" in text and "memory limit" in text
    assert shortage(wanted, left).exit_code == 64


def test_the_statement_says_so_when_a_rank_gets_one_slot_only() -> None:
    left = Room(9 * 10**9, 16 * 10**9, "the machine's memory")
    both = statement(Wanted(10**9, 2, 1), 2, left)
    assert "2.0 GB" in both and "2 x 1.0 GB, 1 rank" in both and "9.0 GB" in both
    assert "do not fit" not in both
    assert "2 copies do not fit" in statement(Wanted(10**9, 1, 3), 2, left)
