"""The writer process of a single rank: slots, verdicts, death."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from keepstep.checkpoint import catalog, layout
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.torch_image import ShardImage
from keepstep.checkpoint.torch_state import flatten
from keepstep.clock import SYSTEM
from keepstep.errors import SaveFailed
from keepstep.rank.local_writer import LocalStaging, LocalWrite
from keepstep.wire.types import Version
from tests.checkpoint.torch_worlds import version, write

LIMIT_S = 60.0


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[LocalStaging]:
    made = LocalStaging(tmp_path, rank=0, keep_last=3)
    yield made
    made.close(abort=True)


def begin(staging: LocalStaging, of: Version, size: int = 10) -> LocalWrite:
    image = ShardImage(flatten({"t": torch.ones(size)}, rank=0, world=of.world), of, 0)
    slot = staging.acquire(image.size, LIMIT_S)
    image.write_into(slot.buffer)
    return staging.submit(slot, image.size, of)


def kill_writer(staging: LocalStaging) -> int:
    pid = staging.writer_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def test_saves_are_committed_and_slots_are_used_again(
    staging: LocalStaging, tmp_path: Path
) -> None:
    saves = [begin(staging, version(step)) for step in (1, 2, 3, 4)]
    large = begin(staging, version(5), size=100_000)  # grows a slot
    for pending in [*saves, large]:
        pending.wait(LIMIT_S)
        assert pending.done()
    pid = staging.writer_pid
    staging.close()  # a commit is told before old checkpoints are removed
    assert [info.step for info in catalog.committed(tmp_path)] == [5, 4, 3]
    assert pid is not None
    assert not psutil.pid_exists(pid)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_a_killed_writer_is_reported_and_the_next_save_starts_another(
    staging: LocalStaging, tmp_path: Path
) -> None:
    begin(staging, version(1)).wait(LIMIT_S)
    # Of a world of two: its commit waits for a second shard, so it is in flight for sure.
    waiting = begin(staging, version(2, world=2))
    pid = kill_writer(staging)
    with pytest.raises(SaveFailed, match=rf"writer process {pid} was ended by signal 9"):
        waiting.wait(LIMIT_S)
    assert waiting.done()
    begin(staging, version(3)).wait(LIMIT_S)
    assert staging.writer_pid != pid
    assert [info.step for info in catalog.committed(tmp_path)] == [3, 1]


def test_a_writer_that_died_while_idle_costs_no_save(staging: LocalStaging) -> None:
    begin(staging, version(1)).wait(LIMIT_S)
    readers = [one for one in threading.enumerate() if one.name == "keepstep-writer-reader"]
    kill_writer(staging)
    for reader in readers:
        reader.join(LIMIT_S)
    begin(staging, version(2)).wait(LIMIT_S)


def test_a_third_save_waits_for_a_slot_and_gives_up_with_a_reason(
    staging: LocalStaging,
) -> None:
    begin(staging, version(1)).wait(LIMIT_S)
    pid = staging.writer_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        saves = [begin(staging, version(2)), begin(staging, version(3))]
        with pytest.raises(SaveFailed, match="no staging slot became free"):
            staging.acquire(10, 0.01)
        with pytest.raises(SaveFailed, match="step 2 is not written after"):
            saves[0].wait(0.01)
        assert not saves[0].done()
    finally:
        os.kill(pid, signal.SIGCONT)
    for pending in [*saves, begin(staging, version(4))]:
        pending.wait(LIMIT_S)


def test_a_folder_that_cannot_be_written_fails_the_save(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    staging = LocalStaging(file / "checkpoints", rank=0, keep_last=1)
    try:
        with pytest.raises(SaveFailed, match="the save of step 1 failed"):
            begin(staging, version(1)).wait(LIMIT_S)
    finally:
        staging.close()


def test_closing_without_waiting_ends_a_save_in_flight(staging: LocalStaging) -> None:
    waiting = begin(staging, version(1, world=2))
    staging.close(abort=True)
    with pytest.raises(SaveFailed, match="was ended by signal 9"):
        waiting.wait(0.0)
    staging.close()  # later calls do nothing


def test_nothing_is_started_before_the_first_save(tmp_path: Path) -> None:
    staging = LocalStaging(tmp_path, rank=0, keep_last=1)
    assert staging.writer_pid is None
    staging.close()


def test_other_ranks_see_the_commit_on_storage(tmp_path: Path) -> None:
    of = version(7, world=2)
    pending = LocalWrite(of, 1, tmp_path, SYSTEM)
    assert not pending.done()
    for rank in range(2):
        folder = write(tmp_path, {"t": torch.ones(1)}, of, rank)
    pending.written(folder)
    assert not pending.done()
    with pytest.raises(SaveFailed, match="step 7 is not committed after 0"):
        pending.wait(0.0)
    commit(tmp_path, folder, of)
    assert pending.done()
    pending.wait(0.0)
    # Retention took it away since: it was committed all the same.
    catalog.remove(tmp_path, folder)
    assert not (tmp_path / folder / layout.MANIFEST).exists()
    assert pending.done()
