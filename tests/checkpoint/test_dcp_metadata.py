"""``.metadata`` of torch's distributed checkpoints, good and hostile."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader

from keepstep.checkpoint import dcp_metadata
from keepstep.checkpoint.dcp_metadata import METADATA, Piece, read
from keepstep.errors import CheckpointCorrupt, CheckpointError
from tests.checkpoint import pickles
from tests.checkpoint.dcp_folders import dcp_save

TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {
        "model": {f"w{at}": torch.zeros(2, 3, dtype=one) for at, one in enumerate(TYPES)},
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        "nested": {"deep": [{"lr": 0.1}, {"lr": torch.ones(2)}]},
        "step": 3,
    }
    return dcp_save(state, tmp_path / "dcp")


def change(folder: Path, how: Callable[[Any], None]) -> None:
    """Write the folder's metadata again, changed."""
    found = FileSystemReader(folder).read_metadata()
    how(found)
    (folder / METADATA).write_bytes(pickles.dumps(found, 4))


def test_tensors_values_and_their_places_are_found(folder: Path) -> None:
    assert dcp_metadata.is_dcp(folder)
    found = read(folder)
    assert {name: (one.dtype, one.shape) for name, one in found.tensors.items()} == {
        "model.w0": ("F32", (2, 3)),
        "model.w1": ("BF16", (2, 3)),
        "model.w2": ("I64", (2, 3)),
        "model.w3": ("BOOL", (2, 3)),
        "model.w4": ("U8", (2, 3)),
        "model.w5": ("F8_E4M3", (2, 3)),
        "scalar": ("F32", ()),
        "empty": ("F32", (0, 4)),
        "nested.deep.1.lr": ("F32", (2,)),
    }
    assert set(found.values) == {"nested.deep.0.lr", "step"}
    assert found.paths["nested.deep.1.lr"] == ("nested", "deep", 1, "lr")
    size = (folder / "__0_0.distcp").stat().st_size
    pieces = [chunk.piece for one in found.tensors.values() for chunk in one.chunks]
    pieces += found.values.values()
    ordered = sorted(pieces, key=lambda piece: piece.start)
    assert ordered[0] == Piece("__0_0.distcp", 0, ordered[0].length)
    for before, after in itertools.pairwise(ordered):
        assert before.start + before.length == after.start
    assert ordered[-1].start + ordered[-1].length == size


def test_a_type_that_no_checkpoint_of_ours_holds_is_known_as_such(tmp_path: Path) -> None:
    dcp_save({"c": torch.zeros(2, dtype=torch.complex128)}, tmp_path)
    assert read(tmp_path).tensors["c"].dtype == ""


@pytest.mark.parametrize("where", ["alone", "inside"])
@pytest.mark.parametrize("call", ["os.system", "builtins.eval", "builtins.exec"])
def test_a_hostile_metadata_runs_nothing_and_names_what_it_wanted(
    folder: Path, tmp_path: Path, call: str, where: str
) -> None:
    mark = tmp_path / "ran"
    text = f"touch {mark}" if call == "os.system" else f"open({str(mark)!r}, 'w')"
    if where == "alone":
        (folder / METADATA).write_bytes(pickles.call(call, text, 4))
    else:
        change(folder, lambda found: setattr(found, "x", pickles.calling(call, text)))
    with pytest.raises(CheckpointCorrupt, match=call.rpartition(".")[2]) as caught:
        read(folder)
    assert caught.value.where == str(folder / METADATA)
    assert not mark.exists()


def _every_piece(found: Any, **fields: object) -> None:
    for info in found.storage_data.values():
        for name, value in fields.items():
            setattr(info, name, value)


def _tensor(found: Any) -> Any:
    return found.state_dict_metadata["model.w0"]


BAD: list[tuple[str, Callable[[Any], None], str]] = [
    ("up", lambda f: _every_piece(f, relative_path="../secret"), "leads out of the checkpoint"),
    ("absolute", lambda f: _every_piece(f, relative_path="/etc/passwd"), "leads out of the"),
    ("empty", lambda f: _every_piece(f, relative_path=""), "leads out of the"),
    ("number", lambda f: _every_piece(f, relative_path=5), "a name is no text"),
    ("before", lambda f: _every_piece(f, offset=-1), "an impossible place"),
    ("text", lambda f: _every_piece(f, length="9"), "an impossible place"),
    ("compressed", lambda f: _every_piece(f, transform_descriptors=["zstd"]), "transformed by"),
    ("lost", lambda f: f.storage_data.clear(), "nothing says where the part"),
    ("none", lambda f: setattr(f, "storage_data", None), "a dict is missing"),
    ("huge", lambda f: setattr(_tensor(f), "size", torch.Size([1 << 61, 1 << 61])), "elements"),
    ("shape", lambda f: setattr(_tensor(f), "size", torch.Size([2, 4])), "its chunks hold 6 of 8"),
    ("twice", lambda f: _tensor(f).chunks.append(_tensor(f).chunks[0]), "overlap"),
    ("path", lambda f: f.planner_data.update({"step": [["a"]]}), "is no list of keys"),
    ("other", lambda f: f.state_dict_metadata.update({"x": "y"}), "something is no"),
    ("dimension", lambda f: setattr(_tensor(f), "size", torch.Size([1] * 65)), "list of numbers"),
]


@pytest.mark.parametrize(("how", "why"), [one[1:] for one in BAD], ids=[one[0] for one in BAD])
def test_what_contradicts_itself_or_leads_elsewhere_is_refused(
    folder: Path, how: Callable[[Any], None], why: str
) -> None:
    change(folder, how)
    with pytest.raises(CheckpointError, match=why):
        read(folder)


def test_a_link_out_of_the_folder_is_not_followed(folder: Path) -> None:
    outside = folder.parent / "outside"
    (folder / "__0_0.distcp").rename(outside)
    (folder / "__0_0.distcp").symlink_to(outside)
    with pytest.raises(CheckpointCorrupt, match="leads out of the checkpoint's folder"):
        read(folder)


def test_a_metadata_that_is_too_large_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (folder / METADATA).stat().st_size
    monkeypatch.setattr(dcp_metadata, "MAX_METADATA", size - 1)
    with pytest.raises(CheckpointError, match=f"has {size} bytes, more than the {size - 1}"):
        read(folder)


def test_every_cut_off_metadata_is_an_error(folder: Path) -> None:
    data = (folder / METADATA).read_bytes()
    for size in range(0, len(data), 97):
        (folder / METADATA).write_bytes(data[:size])
        with pytest.raises(CheckpointCorrupt):
            read(folder)


def test_the_names_that_are_allowed_are_those_that_torch_writes() -> None:
    """A new torch that writes others is noticed here and not by a user."""
    prefix = "torch.distributed.checkpoint.metadata."
    for name in dcp_metadata.ALLOWED:
        if name.startswith(prefix):
            assert hasattr(torch_metadata, name.removeprefix(prefix)), name
