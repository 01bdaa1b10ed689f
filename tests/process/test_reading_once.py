"""Storage is asked once for each byte that the ranks of a node need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.checkpoint import blocks, catalog
from keepstep.checkpoint.commit import commit
from tests.checkpoint.torch_worlds import fake_world, save, version, write
from tests.helpers.needs import Strictness
from tests.process.reading_rank import storage_bytes
from tests.process.reading_state import content, part

FOLDER = "step-00000001"
ROOT = Path(__file__).parents[2]


def uncache(folder: Path) -> None:
    """Write everything in ``folder`` to storage and drop it from the page cache."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def needs_counted_reads(folder: Path) -> None:
    """Skip where the kernel does not count reads of this file system, or keeps it in memory."""
    path = folder / "probe"
    path.write_bytes(os.urandom(1 << 20))
    uncache(folder)
    before = storage_bytes()
    path.read_bytes()
    counted = storage_bytes() - before
    path.unlink()
    if counted < 1 << 20:
        reason = f"{folder} is on a file system whose reads are not counted ({counted} of 1 MiB)"
        if Strictness.no_skip:
            pytest.fail(reason)
        pytest.skip(reason)


def read_by(root: Path, world: int, how: str) -> list[int]:
    """Bytes that each of ``world`` processes makes storage read, all at once, with cold cache."""
    command = [sys.executable, "-m", "tests.process.reading_rank", str(root), FOLDER]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )
        for rank in range(world)
    ]
    try:
        for process in ranks:
            assert process.stdout and process.stdout.readline() == "ready\n"
        uncache(root / FOLDER)
        for process in ranks:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        told = [process.communicate(timeout=60)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0] * world
        return [int(text) for text in told]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("how", ["all", "part"])
def test_two_ranks_of_a_node_read_each_byte_of_one_file_once(tmp_path: Path, how: str) -> None:
    needs_counted_reads(tmp_path)
    save(tmp_path, {"s": {name: content(name) for name in "abc"}})
    size = catalog.load(tmp_path, FOLDER).nbytes
    read = read_by(tmp_path, 2, how)
    # A block at the border of two ranks goes through the page cache and is read once as well; the
    # kernel may read ahead, though never more than the file.
    assert 0.97 * size < sum(read) < 1.03 * size + 2 * blocks.BLOCK_BYTES
    if how == "part":
        assert max(read) < 0.6 * size + 2 * blocks.BLOCK_BYTES


def test_one_rank_reads_each_byte_of_two_files_once(tmp_path: Path) -> None:
    needs_counted_reads(tmp_path)
    of = version(world=2)
    for rank in range(2):
        with fake_world(rank, 2):
            write(tmp_path, {"s": {name: part(content(name), 2) for name in "abc"}}, of, rank)
    commit(tmp_path, FOLDER, of)
    size = catalog.load(tmp_path, FOLDER).nbytes
    (read,) = read_by(tmp_path, 1, "all")
    assert 0.97 * size < read < 1.03 * size + 2 * blocks.BLOCK_BYTES
