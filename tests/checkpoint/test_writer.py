from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import xxhash

from keepstep.checkpoint import blocks, catalog, direct_io, layout, manifest, writer
from keepstep.checkpoint.blocks import BLOCK_BYTES
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.direct_io import ALIGNMENT
from keepstep.checkpoint.verify import verify
from keepstep.checkpoint.writer import write_shard
from keepstep.errors import SaveFailed
from tests.checkpoint.shards import image, make_version, save, staged, write
from tests.helpers.needs import Strictness, needs


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize(
    "pad",
    [0, 1, ALIGNMENT - 37, 3 * ALIGNMENT, BLOCK_BYTES - 4096, BLOCK_BYTES, 3 * BLOCK_BYTES + 99],
)
def test_the_file_is_the_image_byte_for_byte_with_a_receipt_that_describes_it(
    tmp_path: Path, pad: int
) -> None:
    version = make_version()
    data = image(version, 0, pad=pad)
    receipt, folder = write(tmp_path, version, 0, data)
    place = tmp_path / folder
    assert folder == "step-00000005"
    assert (place / receipt.file).read_bytes() == data
    assert receipt.size == len(data)
    parts = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    each = [xxhash.xxh3_128_digest(part) for part in parts]
    assert receipt.info.block_digests() == tuple(each)
    assert receipt.checksum == xxhash.xxh3_128_hexdigest(b"".join(each))
    assert manifest.decode_receipt((place / layout.receipt_name(0)).read_bytes()) == receipt
    assert _names(place) == ["rank-00000.receipt.json", "rank-00000.safetensors", "version.json"]
    assert len(safetensors.deserialize((place / receipt.file).read_bytes())) == 3 + bool(pad)


def test_storage_that_refuses_direct_writes_gets_buffered_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open
    refused = []

    def no_direct(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "no direct writes")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", no_direct)
    data = image(make_version(), 0, pad=5000)
    receipt, folder = write(tmp_path, make_version(), 0, data)
    assert refused
    assert (tmp_path / folder / receipt.file).read_bytes() == data


def test_writing_the_same_again_changes_nothing_and_other_bytes_are_refused(
    tmp_path: Path,
) -> None:
    version = make_version()
    first, folder = write(tmp_path, version, 0)
    before = (tmp_path / folder / first.file).stat()
    assert write(tmp_path, version, 0) == (first, folder)
    with pytest.raises(SaveFailed, match="written before with other bytes"):
        write(tmp_path, version, 0, image(version, 0, fill=8))
    after = (tmp_path / folder / first.file).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_shard_of_a_committed_folder_is_never_replaced(tmp_path: Path) -> None:
    version = make_version()
    _, folder = save(tmp_path, version)
    for rank in range(2):
        (tmp_path / folder / layout.receipt_name(rank)).unlink()
    with pytest.raises(SaveFailed, match="committed already"):
        write(tmp_path, version, 0, image(version, 0, fill=8))
    assert verify(tmp_path, folder) == []


def test_a_shard_left_without_a_receipt_by_a_killed_writer_is_written_anew(tmp_path: Path) -> None:
    version = make_version()
    _, folder = write(tmp_path, version, 0, image(version, 0, fill=1))
    (tmp_path / folder / layout.receipt_name(0)).unlink()
    data = image(version, 0, fill=2)
    receipt, again = write(tmp_path, version, 0, data)
    assert again == folder
    assert (tmp_path / folder / receipt.file).read_bytes() == data


def test_each_version_of_a_step_gets_its_own_folder(tmp_path: Path) -> None:
    versions = [
        make_version(),
        make_version(round=2),
        make_version(term=2),
        make_version(run="other"),
        make_version(run="third"),
    ]
    folders = [write(tmp_path, version, 0)[1] for version in versions]
    assert folders == [
        "step-00000005",
        "step-00000005.t1r2",
        "step-00000005.t2r1",
        "step-00000005.t1r1",
        "step-00000005.t1r1-2",
    ]
    assert [write(tmp_path, version, 1)[1] for version in versions] == folders


def test_all_ranks_of_a_version_stay_together_when_the_plain_name_becomes_free(
    tmp_path: Path,
) -> None:
    save(tmp_path, make_version())
    again = make_version(round=2)
    _, folder = write(tmp_path, again, 0)
    catalog.remove(tmp_path, "step-00000005")
    assert write(tmp_path, again, 1)[1] == folder == "step-00000005.t1r2"


def test_a_folder_with_a_manifest_but_no_owner_is_left_alone(tmp_path: Path) -> None:
    _, folder = save(tmp_path, make_version())
    (tmp_path / folder / layout.VERSION_FILE).unlink()
    assert write(tmp_path, make_version(), 0)[1] != folder


def test_an_image_of_another_version_or_rank_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    data = image(make_version(), 0)
    for version, rank in ((make_version(6), 0), (make_version(), 1)):
        with pytest.raises(SaveFailed, match="the staged image is rank 0's"):
            write(tmp_path, version, rank, data)
    assert _names(tmp_path) == []


@pytest.mark.parametrize("size", [0, 1, 4096, 10**9])
def test_an_image_that_is_not_whole_is_refused(tmp_path: Path, size: int) -> None:
    data = image(make_version(), 0)
    with staged(data) as fd, pytest.raises(SaveFailed):
        write_shard(fd, size, tmp_path, make_version(), 0)
    assert _names(tmp_path) == []


def test_a_failing_disk_leaves_no_partial_file_and_is_told_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = make_version()
    data = image(version, 0)

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        folder = tmp_path / "step-00000005"
        folder.mkdir()
        (folder / layout.VERSION_FILE).write_bytes(
            b'{"run":"demo","term":1,"round":1,"step":5,"world":2}'
        )
        with pytest.raises(SaveFailed) as caught:
            write(tmp_path, version, 0, data)
    text = str(caught.value)
    assert f"{len(data)} bytes failed: Input/output error" in text
    assert "bytes are free" in text
    assert "rank 0, step 5" in text
    assert _names(folder) == [layout.VERSION_FILE]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    needs("root")
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = f"a tmpfs cannot be mounted here: {done.stderr.strip()}"
        if Strictness.no_skip:
            pytest.fail(reason)
        pytest.skip(reason)
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.needs("root")
@pytest.mark.parametrize("reserved", [True, False])
def test_a_full_disk_leaves_room_as_before_and_the_next_smaller_save_works(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, reserved: bool
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 16)
    if not reserved:  # then it is full half-way
        monkeypatch.setattr(direct_io, "reserve", lambda fd, size: None)
    version = make_version(world=1)
    data = image(version, 0, pad=400_000)
    with pytest.raises(SaveFailed) as caught:
        write(small_disk, version, 0, data)
    text = str(caught.value)
    assert f"{len(data)} bytes failed: No space left on device" in text
    space = os.statvfs(small_disk)
    free = space.f_bavail * space.f_frsize
    assert f"{free} bytes are free" in text
    assert free > 200_000
    assert catalog.committed(small_disk) == []
    save(small_disk, make_version(6, world=1))
    assert [info.step for info in catalog.committed(small_disk)] == [6]


def test_a_root_that_is_a_file_is_told_clearly(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("x")
    with pytest.raises(SaveFailed, match=r"File exists|Not a directory"):
        write(tmp_path / "root", make_version(), 0)


_CALLS = ("mkdir", "open", "write", "pwrite", "ftruncate", "fsync", "rename", "link", "unlink")


def _killed_at(call: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a child that SIGKILLs itself in its ``call``-th system call; False: it ended.

    A write is done by half before the kill.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
        return os.WIFSIGNALED(status)
    try:
        left = [call]

        def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **more: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    if name in ("write", "pwrite"):
                        real(args[0], args[1][: len(args[1]) // 2], *args[2:])
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **more)

            return counted

        for name in _CALLS:
            setattr(os, name, wrap(name, getattr(os, name)))
        work()
        os._exit(0)
    finally:
        os._exit(1)


def test_a_save_killed_at_any_system_call_is_offered_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A kill loses nothing that the kernel has; waiting for the disk each time would only take long.
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    version = make_version()
    outcomes: list[bool] = []
    for call in range(1, 200):
        root = tmp_path / str(call)
        save(root, make_version(4))
        ended = not _killed_at(call, lambda root=root: save(root, version))  # type: ignore[misc]
        offered = [info.step for info in catalog.committed(root)]
        assert offered in ([4], [5, 4])
        assert all(verify(root, info.folder) == [] for info in catalog.committed(root))
        outcomes.append(offered == [5, 4])
        # A fresh writer completes what the killed one began, in the same folder.
        save(root, version)
        assert [info.folder for info in catalog.committed(root)] == [
            "step-00000005",
            "step-00000004",
        ]
        assert verify(root, "step-00000005") == []
        if ended:
            break
    else:
        pytest.fail("the save never came to its end")
    assert len(outcomes) > 30
    assert outcomes == sorted(outcomes), "a later kill must not take back what was offered"


def test_one_rank_that_never_writes_keeps_the_checkpoint_from_being_offered(
    tmp_path: Path,
) -> None:
    version = make_version()
    _, folder = write(tmp_path, version, 0)
    with pytest.raises(SaveFailed, match="1 of 2 shards are missing: of the ranks 1"):
        commit(tmp_path, folder, version)
    assert catalog.committed(tmp_path) == []


def _temporaries(folder: Path) -> list[str]:
    return [name for name in _names(folder) if layout.is_temporary_name(name)]


_CLOSE = os.close
_FAILING = ("open", "pwrite", "ftruncate", "fsync", "close", "rename", "link", "unlink", "listdir")


def _failing(
    real: Callable[..., Any], number: int, count: Iterator[int], call: int
) -> Callable[..., Any]:
    """``real``, but its ``call``-th call fails with error ``number``."""

    def fail(*args: Any, **more: Any) -> Any:
        if next(count) == call:
            if real is _CLOSE:
                real(*args)  # the kernel closes a descriptor also where it reports an error
            raise OSError(number, os.strerror(number))
        return real(*args, **more)

    return fail


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *((name, errno.EIO) for name in _FAILING),
        *(("pwrite", errno.ENOSPC), ("link", errno.ENOSPC), ("close", errno.EDQUOT)),
        *(("open", errno.EROFS), ("fsync", errno.ESTALE), ("rename", errno.ESTALE)),
    ],
)
def test_an_error_of_any_call_fails_the_save_clearly_and_the_next_one_is_whole_and_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 16)
    version = make_version(world=1)
    data = image(version, 0, pad=150_000)
    real = getattr(os, name)
    folder = tmp_path / "step-00000005"
    for call in range(1, 60):
        count = itertools.count(1)  # its next() is atomic
        with staged(data) as fd, monkeypatch.context() as patch:
            patch.setattr(os, name, _failing(real, number, count, call))
            try:
                write_shard(fd, len(data), tmp_path, version, 0)
            except SaveFailed as failure:
                text = str(failure)
                assert os.strerror(number) in text
                assert f"writing a shard of {len(data)} bytes failed" in text
                assert "bytes are free" in text
                assert writer.was_refused(failure)
        save_is_over = next(count) <= call
        _, name_of_folder = write(tmp_path, version, 0, data)
        assert tmp_path / name_of_folder == folder
        assert (folder / layout.shard_name(0)).read_bytes() == data
        commit(tmp_path, folder.name, version)
        assert _temporaries(folder) == []
        catalog.remove(tmp_path, folder.name)
        if save_is_over:
            break
    else:
        pytest.fail("the save never came to its end")


def test_a_partial_file_that_cannot_be_removed_is_told_and_goes_with_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = make_version(world=1)

    real = os.unlink

    def refuse(*args: Any, **more: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def unlink(path: Any, **more: Any) -> None:
        if ".safetensors." in os.fspath(path):
            refuse()
        real(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        patch.setattr(os, "unlink", unlink)
        with pytest.raises(SaveFailed, match="Read-only file system") as caught:
            write(tmp_path, version, 0)
    assert "Nothing was committed; the partial file is removed by a later save" in str(caught.value)
    folder = tmp_path / "step-00000005"
    assert len(_temporaries(folder)) > 0
    save(tmp_path, version)
    assert _temporaries(folder) == []


def test_what_a_killed_writer_left_of_a_shard_goes_when_the_shard_is_written_again(
    tmp_path: Path,
) -> None:
    version = make_version()
    folder = tmp_path / write(tmp_path, version, 1)[1]
    mine = [layout.temporary_name(name(0)) for name in (layout.shard_name, layout.receipt_name)]
    others = layout.temporary_name(layout.shard_name(1))
    for name in (*mine, others):
        (folder / name).write_bytes(b"half")
    write(tmp_path, version, 0)
    assert _temporaries(folder) == [others]  # somebody may be writing it
    commit(tmp_path, folder.name, version)
    assert _temporaries(folder) == []


def test_a_receipt_that_only_took_its_name_is_written_again(tmp_path: Path) -> None:
    version = make_version()
    _, folder = write(tmp_path, version, 0)
    path = tmp_path / folder / layout.receipt_name(0)
    text = path.read_bytes()
    path.write_bytes(b"")  # storage without hard links, and a writer killed at a bad moment
    write(tmp_path, version, 0)
    assert path.read_bytes() == text


def test_another_writer_of_the_same_shard_that_is_quicker_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = make_version(world=1)
    real = writer._publish
    other: list[object] = []

    def second(*args: Any) -> None:
        monkeypatch.setattr(writer, "_publish", real)
        other.append(write(tmp_path, version, 0))
        real(*args)

    monkeypatch.setattr(writer, "_publish", second)
    with pytest.raises(SaveFailed, match="No such file"):
        write(tmp_path, version, 0)  # the quicker one has removed its unfinished file
    assert [write(tmp_path, version, 0)] == other
    commit(tmp_path, "step-00000005", version)
    assert verify(tmp_path, "step-00000005") == []


def test_only_what_storage_refuses_is_worth_another_try(tmp_path: Path) -> None:
    data = image(make_version(), 0)
    with pytest.raises(SaveFailed) as caught:
        write(tmp_path, make_version(6), 0, data)
    assert not writer.was_refused(caught.value)
    with staged(data) as fd, pytest.raises(SaveFailed, match="bytes were announced") as caught:
        write_shard(fd, 1 << 40, tmp_path, make_version(), 0)
    assert not writer.was_refused(caught.value)
