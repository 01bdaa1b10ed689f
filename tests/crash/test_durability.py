"""In which order a save makes things durable, read from its system calls.

A kill shows only what other processes see. A power cut leaves what was synchronised before, so the
order counts: bytes before the name, names in a folder before the manifest that says they are there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.checkpoint import layout
from tests.crash.forks import Forks
from tests.crash.saves import PRELOAD, WORLD
from tests.crash.strikes import VIEWS, Range
from tests.crash.tracing import Call

pytestmark = [pytest.mark.process, pytest.mark.needs("strace")]

_SYNC = frozenset({"fsync", "fdatasync"})
_WRITE = frozenset({"write", "writev", "pwrite64", "pwritev", "ftruncate", "fallocate"})
_NAME = frozenset({"link", "linkat", "rename", "renameat", "renameat2"})
_FOLDER = "step-00000010"


def _last(calls: list[Call], names: frozenset[str], path: str, before: int) -> int:
    """Place of the last such call before ``before``; -1 if there is none."""
    found = [
        number
        for number, call in enumerate(calls[:before])
        if call.name in names and path in call.paths
    ]
    return max(found, default=-1)


def test_bytes_are_durable_before_they_get_their_name_and_names_before_the_manifest(
    tmp_path: Path,
) -> None:
    with Forks(PRELOAD) as forks:
        shots = Range(forks, tmp_path)
        root = shots.copy("whole")
        shot = shots.shoot(root, VIEWS[0])
    assert (shot.answer, shot.status) == ("", 0)
    calls = shot.calls
    named: dict[str, int] = {}
    for number, call in enumerate(calls):
        if call.name not in _NAME:
            continue
        temporary, final = call.paths
        named[final] = number
        if final.endswith(layout.VERSION_FILE):
            continue  # it is made durable while the data is written
        written = _last(calls, _WRITE, temporary, number)
        synced = _last(calls, _SYNC, temporary, number)
        assert 0 <= written < synced, call
    files = [layout.shard_name(rank) for rank in range(WORLD)]
    files += [layout.receipt_name(rank) for rank in range(WORLD)]
    manifest = named.pop(f"{_FOLDER}/{layout.MANIFEST}")
    assert named.keys() == {f"{_FOLDER}/{name}" for name in (*files, layout.VERSION_FILE)}
    assert max(named.values()) < _last(calls, _SYNC, _FOLDER, manifest)
    for rank in range(WORLD):
        # A receipt says that the shard is durable; both names become so together.
        shard = named[f"{_FOLDER}/{layout.shard_name(rank)}"]
        receipt = named[f"{_FOLDER}/{layout.receipt_name(rank)}"]
        assert shard < receipt
        # The folder is this version's for good before anybody says what is in it.
        version = f"{_FOLDER}/{layout.VERSION_FILE}"
        assert named[version] < _last(calls, _SYNC, version, receipt)
        assert named[version] < _last(calls, _SYNC, _FOLDER, receipt)
    # The folder itself is a name in the folder of all checkpoints.
    made = _last(calls, frozenset({"mkdir", "mkdirat"}), _FOLDER, len(calls))
    assert made < _last(calls, _SYNC, "", manifest)

    # Nothing old goes before the new is durable, and the old manifest before anything it names.
    removed = [
        number
        for number, call in enumerate(calls)
        if call.name in ("unlink", "unlinkat", "rmdir")
        and any(path.startswith("step-00000005") for path in call.paths)
    ]
    first = removed[0]
    assert calls[first].paths == (f"step-00000005/{layout.MANIFEST}",)
    assert manifest < _last(calls, _SYNC, _FOLDER, first)
    assert first < _last(calls, _SYNC, "step-00000005", removed[1])
