"""Sealing and committing files of another library."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import catalog, foreign, layout, manifest, typed_json
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.verify import verify
from keepstep.checkpoint.writer import claim_folder
from keepstep.errors import CheckpointCorrupt, SaveFailed
from tests.checkpoint.foreign_files import FOLDER, save, seal, state
from tests.checkpoint.shards import FixedClock
from tests.checkpoint.torch_worlds import version

# Sealing -----------------------------------------------------------------------------------------


def test_a_receipt_says_what_is_where(tmp_path: Path) -> None:
    receipt, folder = seal(tmp_path, {"s": state()}, version())
    path = tmp_path / folder
    assert manifest.decode_receipt((path / layout.receipt_name(0)).read_bytes()) == receipt
    data = (path / "rank-00000.pt").read_bytes()
    assert (receipt.format, receipt.layout, receipt.file) == (2, "torch", "rank-00000.pt")
    assert (receipt.size, receipt.checksum) == (len(data), xxhash.xxh3_128_hexdigest(data))
    assert {name: stop - start for name, (start, stop) in receipt.spans.items()} == {
        name: spec.nbytes for name, spec in receipt.tensors.items()
    }


def test_everything_is_durable_before_the_receipt_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(fd: int) -> None:
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real_fsync(fd)

    def link(source: Path, target: Path) -> None:
        order.append(f"name {Path(target).name}")
        real_link(source, target)

    claim_folder(tmp_path, version())
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    seal(tmp_path, {"w": torch.ones(3)}, version(), kind="dcp")
    name = f"name {layout.receipt_name(0)}"
    file = order.index("__0_0.distcp")
    assert order[file : file + 3] == ["__0_0.distcp", ".metadata", FOLDER]
    assert order.index(name) > file + 3
    assert order[-1] == FOLDER


def test_bytes_that_are_not_those_staged_are_refused_by_name(tmp_path: Path) -> None:
    wrong = {"w": xxhash.xxh3_128_hexdigest(b"what it was when the save began")}
    with pytest.raises(SaveFailed, match=r"'w' has other bytes in rank-00000\.pt"):
        seal(tmp_path, {"w": torch.ones(3), "v": torch.ones(2)}, version(), expected=wrong)
    assert not (tmp_path / FOLDER / layout.receipt_name(0)).exists()
    with pytest.raises(SaveFailed, match="1 of 1 shards are missing"):
        commit(tmp_path, FOLDER, version())


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"spans": {"w": (0, 12)}}, "there is no storage there"),
        ({"spans": {"w": (0, 13)}}, "has 12 bytes and should lie at 0 to 13"),
        ({"spans": {"w": (12, 0)}}, "should lie at 12 to 0"),
        ({"spans": {"w": (-12, 0)}}, "should lie at -12 to 0"),
        ({"spans": {"w": (1 << 40, (1 << 40) + 12)}}, "which has"),
        ({"spans": {}}, r"only one of tensors and spans has \['w'\]"),
        ({"spans": {"w": (0, 12), "v": (0, 0)}}, r"only one of tensors and spans has \['v'\]"),
        ({"expected": {"v": "0"}}, r"only one of tensors and spans has \['v'\]"),
        ({"tensors": []}, r"only one of tensors and spans has \['w'\]"),
        ({"values": {"key": object()}}, "key"),
        ({"file": "rank-00009.pt"}, "No such file"),
        ({"file": "../outside"}, "leads out"),
        ({"others": [".metadata"]}, "No such file"),
        ({"others": ["/etc/passwd"]}, "leads out"),
        ({"layout": "safetensors"}, "no safetensors file of rank 0"),
        ({"file": "version.json", "spans": {"w": (0, 12)}}, "not a whole file of torch.save"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    (tmp_path / "outside").write_bytes(bytes(100))
    with pytest.raises(SaveFailed, match=why):
        seal(tmp_path, {"w": torch.ones(3)}, version(), **changed)
    assert not list((tmp_path / FOLDER).glob("*.receipt.json"))


def test_a_tensor_twice_and_a_rank_or_folder_of_another_version_are_refused(tmp_path: Path) -> None:
    receipt, folder = seal(tmp_path, {"w": torch.ones(3)}, version())
    arguments: dict[str, Any] = {
        "layout": "torch",
        "file": receipt.file,
        "tensors": list(receipt.tensors.values()),
        "spans": receipt.spans,
        "values": {},
    }
    twice = {**arguments, "tensors": arguments["tensors"] * 2}
    with pytest.raises(SaveFailed, match="'w' cannot be saved: its name is used twice"):
        foreign.seal(tmp_path, folder, version(), 0, **twice)
    with pytest.raises(SaveFailed, match="rank 1"):
        foreign.seal(tmp_path, folder, version(), 1, **arguments)
    with pytest.raises(SaveFailed, match="the folder belongs to"):
        foreign.seal(tmp_path, folder, version(round_number=2), 0, **arguments)


def test_sealing_again_changes_nothing_and_other_contents_are_refused(tmp_path: Path) -> None:
    receipt, folder = seal(tmp_path, {"w": torch.ones(3)}, version())
    path = tmp_path / folder / layout.receipt_name(0)
    text = path.read_bytes()
    arguments: dict[str, Any] = {
        "layout": "torch",
        "file": receipt.file,
        "tensors": list(receipt.tensors.values()),
        "spans": receipt.spans,
        "values": {key: typed_json.decode(v, key) for key, v in receipt.values.items()},
    }
    assert foreign.seal(tmp_path, folder, version(), 0, **arguments) == receipt
    assert path.read_bytes() == text
    with pytest.raises(SaveFailed, match="sealed before with other contents"):
        seal(tmp_path, {"w": torch.zeros(3)}, version())
    assert not path.exists(), "the bytes that it was of are not there any more"
    seal(tmp_path, {"w": torch.zeros(3)}, version())
    commit(tmp_path, folder, version())
    with pytest.raises(SaveFailed, match="sealed before with other contents"):
        seal(tmp_path, {"w": torch.ones(3)}, version())
    assert path.exists()
    assert [problem.kind for problem in verify(tmp_path, folder)] == ["checksum"]


def test_a_committed_version_takes_no_further_receipt(tmp_path: Path) -> None:
    save(tmp_path, [{"w": torch.ones(3)}], version())
    (tmp_path / FOLDER / layout.receipt_name(0)).unlink()
    with pytest.raises(SaveFailed, match="committed already"):
        seal(tmp_path, {"w": torch.ones(3)}, version())


@given(
    spans=st.dictionaries(
        st.text(max_size=2),
        st.tuples(st.integers(0, 100), st.integers(0, 100)).map(lambda ends: tuple(sorted(ends))),
        max_size=6,
    ),
    chunk=st.integers(1, 120),
)
def test_checksums_of_spans_are_those_of_their_bytes_however_they_lie(
    tmp_path_factory: pytest.TempPathFactory, spans: dict[str, tuple[int, int]], chunk: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "spans"
    data = random.Random(1).randbytes(100)
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreign, "_CHUNK", chunk)
        size, checksum, found = foreign._digests(path, spans)
    assert (size, checksum) == (100, xxhash.xxh3_128_hexdigest(data))
    assert found == {
        name: xxhash.xxh3_128_hexdigest(data[start:stop]) for name, (start, stop) in spans.items()
    }


# Commit ------------------------------------------------------------------------------------------


def test_a_file_changed_in_size_since_its_receipt_is_not_committed(tmp_path: Path) -> None:
    _, folder = seal(tmp_path, {"w": torch.ones(3)}, version(), kind="dcp")
    path = tmp_path / folder / ".metadata"
    size = path.stat().st_size
    os.truncate(path, 3)
    with pytest.raises(SaveFailed, match=r"\.metadata is 3 bytes long"):
        commit(tmp_path, folder, version())
    path.unlink()
    with pytest.raises(SaveFailed, match=r"\.metadata is missing"):
        commit(tmp_path, folder, version())
    path.write_bytes(bytes(size))
    commit(tmp_path, folder, version(), FixedClock())


def test_ranks_with_files_of_different_libraries_are_never_combined(tmp_path: Path) -> None:
    of = version(world=2)
    seal(tmp_path, {"w": torch.ones(3)}, of, 0, kind="torch")
    _, folder = seal(tmp_path, {"w": torch.ones(3)}, of, 1, kind="dcp")
    with pytest.raises(CheckpointCorrupt, match="rank 1 has dcp files, a lower rank torch"):
        commit(tmp_path, folder, of)
    assert catalog.committed(tmp_path) == []
