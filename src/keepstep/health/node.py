"""Checks of the node that any launcher can make: no torch, no GPU library; run by the agent.

Each check says ok, bad or absent. What is not there is never called healthy, and a check that
breaks is a bad finding, not a pass.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from keepstep.clock import SYSTEM, Clock
from keepstep.health import probe
from keepstep.ports import Finding, HealthCheck

EARLIEST_WALL_S = 1_735_689_600.0
"""The start of 2025: a clock that shows less was never set."""


class _Probed(msgspec.Struct, frozen=True):
    error: str
    stage: str
    free_bytes: int


class CheckpointFolder:
    """The checkpoint folder exists or can be made, takes files, and has room.

    All of it is tried in another process, which is left behind if it does not end: a frozen disk
    does not block the caller for more than the limit and a second.

    Args:
        folder: The folder.
        min_free_bytes: Free space below which the finding is bad.
        limit_s: How long the trial may take.
    """

    name = "checkpoint_folder"

    def __init__(self, folder: Path, *, min_free_bytes: int = 0, limit_s: float = 30.0) -> None:
        self.folder = folder
        self.min_free_bytes = min_free_bytes
        self.limit_s = limit_s
        self.command: tuple[str, ...] = (sys.executable, "-I", "-S", str(probe.__file__))

    def answer(self) -> bytes | None:
        """What the trial says; None if it did not end."""
        child = subprocess.Popen(
            [*self.command, str(self.folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            return child.communicate(timeout=self.limit_s)[0]
        except subprocess.TimeoutExpired:
            _abandon(child)
            return None

    def __call__(self) -> Finding:
        answer = self.answer()
        if answer is None:
            return self._bad(f"no answer from its disk in {self.limit_s:g} s")
        try:
            seen = msgspec.json.decode(answer, type=_Probed)
        except msgspec.DecodeError:
            return self._bad("the process that tried it ended without an answer")
        if seen.error:
            return self._bad(f"could not {seen.stage}: {seen.error}")
        if seen.free_bytes < self.min_free_bytes:
            return self._bad(f"{seen.free_bytes} bytes free, {self.min_free_bytes} are needed")
        detail = f"{self.folder} can be written, {seen.free_bytes} bytes free"
        return Finding(check=self.name, status="ok", detail=detail)

    def _bad(self, why: str) -> Finding:
        return Finding(check=self.name, status="bad", detail=f"{self.folder}: {why}")


def _abandon(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    if child.stdout is not None:
        child.stdout.close()
    try:
        child.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return  # blocked in the kernel: it ends when the disk answers


class MemoryAvailable:
    """Enough memory is left, of the machine's and of the cgroup's limit.

    Args:
        min_bytes: What must be available.
        root: ``/``, but in tests.
    """

    name = "memory"

    def __init__(self, min_bytes: int, *, root: Path = Path("/")) -> None:
        self.min_bytes = min_bytes
        self.root = root

    def __call__(self) -> Finding:
        left = {"the machine": int(psutil.virtual_memory().available)}
        left.update(_left_in_groups(self.root))
        where = min(left, key=lambda name: left[name])
        detail = f"{left[where]} bytes available in {where}"
        if left[where] >= self.min_bytes:
            return Finding(check=self.name, status="ok", detail=detail)
        detail += f", {self.min_bytes} are needed"
        return Finding(check=self.name, status="bad", detail=detail, action="replace_node")


def _left_in_groups(root: Path) -> dict[str, int]:
    """Bytes left under each memory limit that holds for this process, by the group's folder."""
    left: dict[str, int] = {}
    for folder in _own_groups(root):
        for limit_name, usage_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is None or usage is None:
                continue
            # The kernel drops cached files before it kills anybody.
            left[str(folder)] = max(0, limit - usage + _cache(folder / "memory.stat", cache_name))
    return left


def _own_groups(root: Path) -> Iterator[Path]:
    """Folders of this process's memory cgroup and of those above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup"
        if controllers:
            top /= "memory"
        folder = top / path.lstrip("/")
        while folder.is_relative_to(top):
            yield folder
            folder = folder.parent


def _number(path: Path) -> int | None:
    """The number in a file; None if there is none (``max`` is no limit)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isascii() and text.isdigit() else None


def _cache(path: Path, name: str) -> int:
    try:
        text = path.read_text()
    except OSError:
        return 0
    match = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else 0


class GpuPresence:
    """NVIDIA GPUs are visible. Says nothing about whether they work.

    Args:
        expected: How many there must be; 0 where none is needed.
        devices: Folder of the device files.
    """

    name = "gpu_presence"

    def __init__(self, expected: int = 0, *, devices: Path = Path("/dev")) -> None:
        self.expected = expected
        self.devices = devices

    def __call__(self) -> Finding:
        found = sum(1 for path in self.devices.glob("nvidia*") if path.name[6:].isdigit())
        detail = f"{found} NVIDIA GPUs are visible"
        if found < self.expected:
            detail += f", {self.expected} are needed"
            return Finding(check=self.name, status="bad", detail=detail, action="replace_node")
        if not found:
            return Finding(check=self.name, status="absent", detail="no NVIDIA GPU is visible")
        return Finding(check=self.name, status="ok", detail=f"{detail} (not tested)")


class WallClock:
    """The wall clock was set, and the monotonic clock does not go back.

    Args:
        not_before: Seconds since the epoch that must have passed, for instance when the run's
            newest event was written.
        tolerance_s: How far clocks of two nodes may be apart.
        clock: The clocks to check.
    """

    name = "clock"

    def __init__(
        self,
        not_before: float = EARLIEST_WALL_S,
        *,
        tolerance_s: float = 5.0,
        clock: Clock = SYSTEM,
    ) -> None:
        self.not_before = not_before
        self.tolerance_s = tolerance_s
        self.clock = clock

    def __call__(self) -> Finding:
        first, wall, second = self.clock.mono(), self.clock.wall(), self.clock.mono()
        if second < first:
            detail = f"the monotonic clock went back by {first - second:.6f} s"
        elif wall < self.not_before - self.tolerance_s:
            detail = f"the wall clock is {self.not_before - wall:.1f} s behind what has happened"
        else:
            return Finding(check=self.name, status="ok", detail="the clocks go forward")
        return Finding(check=self.name, status="bad", detail=detail, action="replace_node")


def run_all(checks: Sequence[HealthCheck]) -> list[Finding]:
    """Run every check, in order; one finding each."""
    return [_run(check) for check in checks]


def _run(check: HealthCheck) -> Finding:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - a check that breaks is a finding, not a pass
        detail = f"the check itself failed: {type(error).__name__}: {error}"
        return Finding(check=check.name, status="bad", detail=detail)
