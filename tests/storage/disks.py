"""File systems of a test's own: small, full, read-only, frozen. All need root."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MIB = 1 << 20


def _run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=60)


class Disk:
    """A mounted file system.

    Args:
        path: Where it is mounted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._frozen = False
        self._ballast = path / "ballast"

    def freeze(self) -> None:
        """From now on whoever writes is blocked in the kernel, and cannot be killed."""
        _run("fsfreeze", "-f", self.path)
        self._frozen = True

    def thaw(self) -> None:
        """Let them go on."""
        if self._frozen:
            self._frozen = False
            _run("fsfreeze", "-u", self.path)

    def read_only(self, yes: bool = True) -> None:
        """Refuse writes from now on, or take them again."""
        _run("mount", "-o", f"remount,{'ro' if yes else 'rw'}", self.path)

    def fill(self, leave: int) -> None:
        """Take all space but about ``leave`` bytes."""
        self.empty()
        with self._ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(MIB))
        with self._ballast.open("r+b") as file:
            file.truncate(max(0, self._ballast.stat().st_size - leave))

    def empty(self) -> None:
        """Give the space back."""
        self._ballast.unlink(missing_ok=True)


@contextmanager
def ext4(folder: Path, size: int = 64 * MIB) -> Iterator[Disk]:
    """An ext4 of ``size`` bytes in a file of ``folder``; it is thawed at the end."""
    image, path = folder / "disk.img", folder / "disk"
    with image.open("wb") as file:
        file.truncate(size)
    path.mkdir()
    _run("mkfs.ext4", "-q", "-m", "0", image)
    _run("mount", "-o", "loop", image, path)
    yield from _mounted(path)


@contextmanager
def tmpfs(folder: Path, size: int) -> Iterator[Disk]:
    """A file system in memory, of ``size`` bytes."""
    path = folder / "disk"
    path.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path)
    yield from _mounted(path)


def _mounted(path: Path) -> Iterator[Disk]:
    disk = Disk(path)
    try:
        yield disk
    finally:
        disk.thaw()
        _run("umount", "-l", path)  # a process that was freed just now may still be there
