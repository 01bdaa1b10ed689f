from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from keepstep.checkpoint import catalog, direct_io, layout, writer_process
from keepstep.checkpoint.verify import verify
from keepstep.wire.channel import Channel, Closed, pair
from keepstep.wire.messages import (
    FROM_WRITER,
    TO_WRITER,
    Committed,
    ShardFailed,
    ShardRetry,
    ShardWritten,
    WriteShard,
)
from keepstep.wire.types import Version
from tests.checkpoint.shards import FixedClock, image, make_version, save, staged, write

_LIMIT_S = 60
_MODULE = ("-m", "keepstep.checkpoint.writer_process")
M = TypeVar("M")


class _Owner:
    """The agent's end of a writer process."""

    def __init__(self, process: subprocess.Popen[bytes], ours: socket.socket, root: Path) -> None:
        self.process = process
        self.channel: Channel[FROM_WRITER] = Channel(ours, FROM_WRITER, blocking=True)
        ours.settimeout(_LIMIT_S)  # a writer that never answers must fail the test, not hang it
        self.root = root
        self._tickets = 0

    def send(
        self, version: Version, rank: int, *, commit: bool = False, keep: int = 0, data: bytes = b""
    ) -> int:
        data = data or image(version, rank)
        self._tickets += 1
        message = WriteShard(
            ticket=self._tickets,
            rank=rank,
            size=len(data),
            version=version,
            root=str(self.root),
            commit=commit,
            keep_last=keep,
        )
        with staged(data) as fd:
            self.channel.send(message, (fd,))
        return self._tickets

    def expect(self, kind: type[M]) -> M:
        message = self.channel.receive()
        assert isinstance(message, kind), message
        return message

    def close(self) -> int:
        self.channel.close()
        return self.process.wait(_LIMIT_S)


@contextlib.contextmanager
def _writer(
    root: Path, *options: str, program: tuple[str, ...] = _MODULE, pass_fds: tuple[int, ...] = ()
) -> Iterator[_Owner]:
    ours, theirs = pair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *program, "--fd", str(theirs.fileno()), *options],
            pass_fds=(theirs.fileno(), *pass_fds),
        )
    owner = _Owner(process, ours, root)
    try:
        yield owner
    finally:
        owner.channel.close()
        if process.poll() is None:
            process.kill()
        process.wait(_LIMIT_S)


def test_shards_are_written_then_committed_once_and_the_writer_ends_when_closed(
    tmp_path: Path,
) -> None:
    version = make_version()
    with _writer(tmp_path) as owner:
        tickets = {owner.send(version, rank, commit=True) for rank in range(2)}
        written = [owner.expect(ShardWritten) for _ in range(2)]
        committed = owner.expect(Committed)
        assert owner.close() == 0
        with pytest.raises(Closed):
            owner.channel.receive()
    assert {answer.ticket for answer in written} == tickets
    assert {answer.rank for answer in written} == {0, 1}
    assert all(answer.folder == "step-00000005" and answer.write_s > 0 for answer in written)
    assert (committed.folder, committed.error) == ("step-00000005", "")
    (info,) = catalog.committed(tmp_path)
    assert committed.bytes == info.nbytes == sum(answer.bytes for answer in written)
    assert verify(tmp_path, info.folder) == []


def test_without_commit_the_writer_only_writes(tmp_path: Path) -> None:
    with _writer(tmp_path) as owner:
        for rank in range(2):
            owner.send(make_version(), rank)
            owner.expect(ShardWritten)
        assert owner.close() == 0
    assert catalog.committed(tmp_path) == []
    assert len(catalog.unfinished(tmp_path)) == 1


def test_the_commit_waits_for_shards_of_other_writers(tmp_path: Path) -> None:
    version = make_version()
    with _writer(tmp_path) as owner:
        owner.send(version, 0, commit=True)
        owner.expect(ShardWritten)
        assert catalog.committed(tmp_path) == []
        write(tmp_path, version, 1)
        assert owner.expect(Committed).error == ""
        assert owner.close() == 0


def test_a_commit_gives_up_after_its_limit_and_names_the_missing_ranks(tmp_path: Path) -> None:
    with _writer(tmp_path, "--commit-limit-s", "0") as owner:
        owner.send(make_version(world=3), 1, commit=True)
        owner.expect(ShardWritten)
        answer = owner.expect(Committed)
        assert "missing are those of the ranks [0, 2]" in answer.error
        assert owner.close() == 0
    assert catalog.committed(tmp_path) == []


def test_a_failed_shard_is_told_and_ends_the_wait_for_its_version(tmp_path: Path) -> None:
    version = make_version()
    wrong = image(make_version(6), 1)
    with _writer(tmp_path) as owner:
        ticket = owner.send(version, 1, data=wrong)
        failed = owner.expect(ShardFailed)
        assert (failed.ticket, failed.rank, failed.version) == (ticket, 1, version)
        assert "the staged image is rank 1's" in failed.error
        owner.send(version, 0, commit=True)
        owner.expect(ShardWritten)
        assert "the shard of rank 1 failed" in owner.expect(Committed).error
        # The same save may be tried again.
        owner.send(version, 1, commit=True)
        owner.expect(ShardWritten)
        assert owner.expect(Committed).error == ""
        assert owner.close() == 0
    assert [info.step for info in catalog.committed(tmp_path)] == [5]


def test_a_commit_applies_retention_and_clears_overtaken_saves(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, make_version(step), at=float(step))
    write(tmp_path, make_version(4), 0)
    with _writer(tmp_path) as owner:
        for rank in range(2):
            owner.send(make_version(5), rank, commit=rank == 0, keep=2)
            owner.expect(ShardWritten)
        owner.expect(Committed)
        assert owner.close() == 0
    assert layout.list_folders(tmp_path) == ["step-00000003", "step-00000005"]


def test_signals_meant_for_the_job_do_not_end_a_save(tmp_path: Path) -> None:
    version = make_version()
    with _writer(tmp_path) as owner:
        owner.send(version, 0, commit=True)
        owner.expect(ShardWritten)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            owner.process.send_signal(number)
        owner.send(version, 1)
        owner.expect(ShardWritten)
        assert owner.expect(Committed).error == ""
        assert owner.close() == 0


def test_a_save_in_flight_is_finished_when_the_owner_is_gone(tmp_path: Path) -> None:
    version = make_version(world=3)
    with _writer(tmp_path) as owner:
        for rank in range(3):
            owner.send(version, rank, commit=True, data=image(version, rank, pad=3 << 20))
        assert owner.close() == 0
    (info,) = catalog.committed(tmp_path)
    assert verify(tmp_path, info.folder) == []


def test_a_writer_whose_owner_is_gone_does_not_wait_for_shards_that_never_come(
    tmp_path: Path,
) -> None:
    with _writer(tmp_path, "--linger-s", "0") as owner:
        owner.send(make_version(), 0, commit=True)
        assert owner.close() == 0
    assert catalog.committed(tmp_path) == []


def test_a_message_that_is_none_ends_the_writer_after_what_it_has(tmp_path: Path) -> None:
    with _writer(tmp_path) as owner:
        owner.send(make_version(world=1), 0, commit=True)
        owner.channel.sock.sendall(b"\x02\x00\x00\x00{}")
        owner.expect(ShardWritten)
        owner.expect(Committed)
        assert owner.process.wait(_LIMIT_S) == 70


_STOPS_HALF_WAY = """
import os, sys
ready, real, calls = int(sys.argv.pop(1)), os.pwrite, []
def pwrite(fd, data, at):
    calls.append(fd)
    if len(calls) == 2:
        real(fd, data[: len(data) // 2 // 4096 * 4096], at)
        os.write(ready, b"x")
    if len(calls) > 1:
        os.read(os.pipe()[0], 1)
    return real(fd, data, at)
os.pwrite = pwrite
from keepstep.checkpoint import writer_process
sys.exit(writer_process.main())
"""


def test_a_writer_killed_in_the_middle_of_a_shard_leaves_nothing_that_is_offered(
    tmp_path: Path,
) -> None:
    version = make_version(world=1)
    data = image(version, 0, pad=40 << 20)
    ready, theirs = os.pipe()
    program = ("-c", _STOPS_HALF_WAY, str(theirs))
    with (
        os.fdopen(ready, "rb") as stopped,
        _writer(tmp_path, program=program, pass_fds=(theirs,)) as owner,
    ):
        os.close(theirs)
        owner.send(version, 0, commit=True, data=data)
        assert stopped.read(1) == b"x"
        owner.process.kill()
        owner.process.wait(_LIMIT_S)
    folder = tmp_path / "step-00000005"
    (partial,) = [name for name in os.listdir(folder) if name.endswith(".tmp")]
    assert (folder / partial).stat().st_blocks > 0
    assert not (folder / layout.shard_name(0)).exists()
    assert catalog.committed(tmp_path) == []
    with _writer(tmp_path) as owner:
        owner.send(version, 0, commit=True, data=data)
        owner.expect(ShardWritten)
        owner.expect(Committed)
        assert owner.close() == 0
    assert verify(tmp_path, folder.name) == []
    assert [name for name in os.listdir(folder) if name.endswith(".tmp")] == []


_SECOND_WAITS = """
import os, sys, threading
go, begun = int(sys.argv.pop(1)), threading.Event()
from keepstep.checkpoint import writer_process
real = writer_process.write_shard
def write_shard(fd, size, root, version, rank, images):
    if rank == 0:
        begun.wait()
    else:
        begun.set()
        os.read(go, 1)
    return real(fd, size, root, version, rank, images)
writer_process.write_shard = write_shard
sys.exit(writer_process.main())
"""


def test_a_version_is_not_judged_while_one_of_its_shards_is_still_being_written(
    tmp_path: Path,
) -> None:
    version = make_version()
    theirs, go = os.pipe()
    program = ("-c", _SECOND_WAITS, str(theirs))
    options = ("--commit-limit-s", "0")
    with (
        os.fdopen(go, "wb", buffering=0) as starter,
        _writer(tmp_path, *options, program=program, pass_fds=(theirs,)) as owner,
    ):
        os.close(theirs)
        for rank in range(2):
            owner.send(version, rank, commit=True)
        assert owner.expect(ShardWritten).rank == 0
        starter.write(b"x")
        assert owner.expect(ShardWritten).rank == 1
        assert owner.expect(Committed).error == ""
        assert owner.close() == 0


@contextlib.contextmanager
def _thread(clock: FixedClock) -> Iterator[Channel[FROM_WRITER]]:
    """A writer in a thread of this process, and its owner's end."""
    ours, theirs = pair()
    ours.settimeout(_LIMIT_S)
    inner: Channel[TO_WRITER] = Channel(theirs, TO_WRITER, blocking=True)
    outer: Channel[FROM_WRITER] = Channel(ours, FROM_WRITER, blocking=True)
    thread = threading.Thread(target=writer_process.Writer(inner, clock, linger_s=0.0).serve)
    thread.start()
    try:
        yield outer
    finally:
        outer.close()
        thread.join(_LIMIT_S)
        inner.close()
        assert not thread.is_alive()


def _ask(channel: Channel[FROM_WRITER], root: Path, version: Version, retries: int) -> None:
    data = image(version, 0)
    message = WriteShard(
        ticket=7, rank=0, size=len(data), version=version, root=str(root), retries=retries
    )
    with staged(data) as fd:
        channel.send(message, (fd,))


def _refuse(patch: pytest.MonkeyPatch, times: int) -> None:
    """Have storage refuse the first ``times`` shards."""
    left = [times]
    real = direct_io.open_new

    def open_new(path: Path) -> int:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path)

    patch.setattr(direct_io, "open_new", open_new)


def test_a_refused_shard_is_tried_again_after_longer_and_longer_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, clock = make_version(), FixedClock(100.0)
    _refuse(monkeypatch, 3)
    with _thread(clock) as channel:
        _ask(channel, tmp_path, version, retries=3)
        answers = [channel.receive() for _ in range(4)]
    *retries, written = answers
    assert isinstance(written, ShardWritten) and written.ticket == 7
    for attempt, retry in enumerate(retries, 1):
        assert isinstance(retry, ShardRetry)
        assert (retry.ticket, retry.rank, retry.version) == (7, 0, version)
        assert retry.attempt == attempt
        assert "No space left on device" in retry.error and "bytes are free" in retry.error
    assert clock.now == 100.0 + 0.5 + 1.0 + 2.0 == 100.0 + written.write_s


def test_a_shard_that_is_refused_once_too_often_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse(monkeypatch, 3)
    with _thread(FixedClock()) as channel:
        _ask(channel, tmp_path, make_version(), retries=2)
        kinds = [type(channel.receive()) for _ in range(3)]
    assert kinds == [ShardRetry, ShardRetry, ShardFailed]
    assert os.listdir(tmp_path / "step-00000005") == [layout.VERSION_FILE]


def test_without_retries_the_first_refusal_is_final_and_a_wrong_image_is_never_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse(monkeypatch, 1)
    with _thread(FixedClock()) as channel:
        _ask(channel, tmp_path, make_version(), retries=0)
        assert isinstance(channel.receive(), ShardFailed)
        wrong = image(make_version(9), 0)
        message = WriteShard(
            ticket=8,
            rank=0,
            size=len(wrong),
            version=make_version(),
            root=str(tmp_path),
            retries=5,
        )
        with staged(wrong) as fd:
            channel.send(message, (fd,))
        assert isinstance(channel.receive(), ShardFailed)


def test_the_writer_does_not_interrupt_training(tmp_path: Path) -> None:
    with _writer(tmp_path) as owner:
        owner.send(make_version(), 0)
        owner.expect(ShardWritten)
        pid = owner.process.pid
        for thread in os.listdir(f"/proc/{pid}/task"):
            assert os.sched_getscheduler(int(thread)) == os.SCHED_BATCH


def test_a_slot_is_mapped_once_for_all_its_saves(tmp_path: Path) -> None:
    with _writer(tmp_path) as owner, staged(image(make_version(1), 0)) as fd:
        for step in (1, 2, 3):
            data = image(make_version(step), 0)
            os.pwrite(fd, data, 0)
            message = WriteShard(
                ticket=step,
                rank=0,
                size=len(data),
                version=make_version(step),
                root=str(tmp_path),
            )
            owner.channel.send(message, (fd,))
            owner.expect(ShardWritten)
        maps = Path(f"/proc/{owner.process.pid}/maps").read_text()
        assert maps.count("/memfd:image") == 1
