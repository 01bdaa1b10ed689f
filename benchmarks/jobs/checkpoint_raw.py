"""What the machine itself does with the same bytes: copies in memory, direct writes and reads.

Runs in ranks. Writes and reads are those of fio where it is installed, else of one Python thread a
file; both are direct, in requests of 4 MiB.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

REQUEST = 4 << 20
"""Bytes of a request."""
DEPTH = 4
"""Requests that fio has in flight for each file."""


def copy_seconds(tensors: Sequence[Tensor], threads: int, *, meet: Callable[[], object]) -> float:
    """Seconds to copy ``tensors`` into memory that was used before.

    Args:
        tensors: On the host, contiguous.
        threads: That torch may use for it.
        meet: Called before: all ranks copy at once.
    """
    before = torch.get_num_threads()
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    torch.set_num_threads(threads)
    try:
        meet()
        began = time.perf_counter()
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)
        return time.perf_counter() - began
    finally:
        torch.set_num_threads(before)


class RawFiles:
    """Files of given sizes, written and read as fast as the storage does it.

    Args:
        folder: Where they lie. sizes: Of each file in bytes; rounded up to whole requests.
    """

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        self._folder = folder
        self._sizes = [-(-size // REQUEST) * REQUEST for size in sizes]
        self._fio = shutil.which("fio")
        folder.mkdir(exist_ok=True)

    @property
    def tool(self) -> str:
        """What writes and reads, for people."""
        if self._fio:
            return f"fio, bs=4m, iodepth={DEPTH}, libaio, direct, end_fsync, a job per file"
        return "O_DIRECT by one Python thread per file, 4 MiB requests, fsync"

    @property
    def bytes(self) -> int:
        return sum(self._sizes)

    def write(self) -> float:
        """Seconds to write them into new files, and to fsync these."""
        for path in self._paths():
            path.unlink(missing_ok=True)
        return self._run("write")

    def read(self) -> float:
        """Seconds to read them, past the page cache."""
        return self._run("read")

    def remove(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder)

    def _paths(self) -> list[Path]:
        return [self._folder / f"raw-{number}" for number in range(len(self._sizes))]

    def _run(self, kind: Literal["write", "read"]) -> float:
        if self._fio:
            return self._run_fio(self._fio, kind)
        return self._run_own(_write if kind == "write" else _read)

    def _run_fio(self, fio: str, kind: Literal["write", "read"]) -> float:
        words = [fio, "--output-format=json", f"--rw={kind}", "--bs=4m", f"--iodepth={DEPTH}"]
        words += ["--ioengine=libaio", "--direct=1", "--end_fsync=1", "--thread"]
        for path, size in zip(self._paths(), self._sizes, strict=True):
            words += [f"--name={path.name}", f"--filename={path}", f"--size={size}"]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120.0)
        if done.returncode:
            raise RuntimeError(f"fio failed: {done.stdout}{done.stderr}")
        jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        return max(float(job[kind]["runtime"]) for job in jobs) / 1e3

    def _run_own(self, work: Callable[[Path, int], None]) -> float:
        threads = [
            threading.Thread(target=work, args=place)
            for place in zip(self._paths(), self._sizes, strict=True)
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began


def _write(path: Path, size: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o644)
    with mmap.mmap(-1, REQUEST) as buffer:
        buffer[:] = os.urandom(REQUEST)
        for _ in range(size // REQUEST):
            os.write(fd, buffer)
    os.fsync(fd)
    os.close(fd)


def _read(path: Path, size: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with mmap.mmap(-1, REQUEST) as buffer:
        for _ in range(size // REQUEST):
            os.readv(fd, [buffer])
    os.close(fd)
