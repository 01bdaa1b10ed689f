"""What is known of the file system below a folder of checkpoints: its kind, size and rated speed.

Used by the agent, once, after the folder has been tried in another process: asking a file system
that is frozen may block.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
_TIB = 1 << 40
_GIB = 1 << 30
SCRATCH_2_MB_S = 100.0
"""Rated write speed of FSx for Lustre SCRATCH_2 for each TiB: half of what it reads, no burst."""
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A mounted file system: ``kind`` as the kernel calls it (lustre, nfs4, ext4, xfs, tmpfs,
    overlay, fuse.NAME), where it is mounted, from what, and its size in bytes."""

    kind: str
    mount: str
    source: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Rated:
    """What a file system can take: ``mb_s`` in 10^6 bytes a second (0: not known), and why we
    think so."""

    file_system: str
    mb_s: float
    because: str

    def save_s(self, nbytes: int) -> float:
        """How long a save of so many bytes takes; 0 where it is not known."""
        return nbytes / (self.mb_s * 1e6) if self.mb_s else 0.0

    def line(self, nbytes: int) -> str:
        """How long a save takes, for people; empty where it is not known."""
        if not self.mb_s:
            return ""
        return (
            f"a checkpoint of {nbytes / 1e9:.3g} GB takes {_time(self.save_s(nbytes))} at "
            f"the rated {self.mb_s:.3g} MB/s of {self.file_system} ({self.because})"
        )

    def warning(self, nbytes: int, every_steps: int, step_s: float) -> str:
        """What is wrong with saving so often; empty where nothing is, or nothing is known."""
        interval_s, save_s = every_steps * step_s, self.save_s(nbytes)
        if not save_s or not interval_s or interval_s >= save_s:
            return ""
        enough = int(save_s / step_s) + 1
        return (
            f"a checkpoint is due every {every_steps} steps, that is every "
            f"{_time(interval_s)}, and takes {_time(save_s)} to write: saves will be "
            f"skipped; checkpoint.every_steps={enough} or a faster file system would do"
        )


def file_system(folder: Path, mounts: Path = MOUNTS) -> FileSystem:
    """The file system that ``folder`` (which exists) is on.

    Raises:
        OSError: it cannot be asked.
    """
    real = folder.resolve(strict=True)
    device = os.stat(real).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    space = os.statvfs(real)
    best: tuple[tuple[bool, int], FileSystem] | None = None
    for line in mounts.read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, source, *_) = before.split(), after.split()
        point = _ESCAPED.sub(lambda match: chr(int(match.group(1), 8)), fields[4])
        if real.is_relative_to(point):
            # Of several mounts in one place the last one is on top.
            rank = (fields[2] == number, len(Path(point).parts))
            if best is None or rank >= best[0]:
                found = FileSystem(kind, point, source, space.f_blocks * space.f_frsize)
                best = (rank, found)
    return best[1] if best is not None else FileSystem("unknown", str(real), "", 0)


def rated(found: FileSystem, setting_mb_s: float) -> Rated:
    """How fast ``found`` takes writes: as ``checkpoint.rated_mb_s`` says, else worked out."""
    name = f"{found.kind} at {found.mount}"
    if setting_mb_s:
        return Rated(name, setting_mb_s, "checkpoint.rated_mb_s")
    if found.kind != "lustre" or not found.nbytes:
        return Rated(name, 0.0, "")
    gib = bought_gib(found.nbytes)
    because = (
        f"taken for FSx for Lustre, SCRATCH_2, of {gib} GiB: {SCRATCH_2_MB_S:g} MB/s for each TiB; "
        "if it is another, set checkpoint.rated_mb_s"
    )
    return Rated(name, gib * _GIB / _TIB * SCRATCH_2_MB_S, because)


def bought_gib(nbytes: int) -> int:
    """The capacity in GiB that FSx for Lustre sells and that shows as ``nbytes``, which is less."""
    for gib in (1200, 2400):
        if nbytes <= gib * _GIB:
            return gib
    return -(-nbytes // (2400 * _GIB)) * 2400


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
