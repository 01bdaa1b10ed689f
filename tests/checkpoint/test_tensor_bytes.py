from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import tensor_bytes
from keepstep.checkpoint.source import About, Span, StoredChunk, StoredFile, StoredTensor
from keepstep.checkpoint.tensor_bytes import in_rows, nbytes, opened
from keepstep.errors import CheckpointCorrupt


class Parts:
    """A source with one tensor of one byte an element, in one file."""

    def __init__(self, path: Path, shape: tuple[int, ...], cuts: list[list[int]]) -> None:
        self._path = path
        strides = [len(list(itertools.product(*map(range, shape[dim + 1 :])))) for dim in range(3)]
        self.whole = bytes(
            sum(at * stride for at, stride in zip(place, strides, strict=True)) % 251
            for place in itertools.product(*map(range, shape))
        )
        self._spans: dict[str, Span] = {}
        chunks: list[StoredChunk] = []
        data = bytearray(b"before")
        edges = [sorted({0, size, *cut}) for cut, size in zip(cuts, shape, strict=True)]
        for corner in itertools.product(*(itertools.pairwise(edge) for edge in edges)):
            offsets = tuple(begin for begin, _ in corner)
            sizes = tuple(end - begin for begin, end in corner)
            part = bytes(
                self.whole[sum(at * stride for at, stride in zip(place, strides, strict=True))]
                for place in itertools.product(*(range(begin, end) for begin, end in corner))
            )
            key = str(len(chunks))
            self._spans[key] = (len(data), len(data) + len(part))
            data += part
            chunks.append(StoredChunk(offsets, sizes, "file", key))
        path.write_bytes(data)
        self.tensor = StoredTensor("U8", shape, tuple(reversed(chunks)))

    @property
    def about(self) -> About:
        return About(where="", step=0, run=None, world=1)

    def values(self, rank: int) -> Mapping[str, object]:
        return {}

    def tensors(self, rank: int) -> Mapping[str, StoredTensor]:
        return {"t": self.tensor}

    def file(self, name: str) -> tuple[StoredFile, Mapping[str, Span]]:
        return StoredFile(path=self._path, size=self._path.stat().st_size), self._spans


_SIZE = st.integers(1, 5)


@given(st.tuples(_SIZE, _SIZE, _SIZE), st.data())
def test_parts_cut_in_any_way_give_the_whole_tensor(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], data: st.DataObject
) -> None:
    cuts = [data.draw(st.lists(st.integers(0, size), max_size=2)) for size in shape]
    parts = Parts(tmp_path_factory.mktemp("cut") / "file", shape, cuts)
    with opened(parts) as reader:
        found = b"".join(bytes(part) for part in reader.parts(parts.tensor))
        single = reader.span(parts.tensor)
    assert found == parts.whole
    assert nbytes(parts.tensor) == len(found)
    assert (single is not None) == (len(parts.tensor.chunks) == 1)
    if single is not None:
        assert single[0].read_bytes()[single[1] :] == parts.whole


def test_parts_in_rows_are_read_in_pieces_without_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_bytes, "PIECE", 10)
    parts = Parts(tmp_path / "file", (6, 3, 2), [[2, 4], [], []])
    assert in_rows(parts.tensor)
    with opened(parts) as reader:
        sizes = [len(part) for part in reader.parts(parts.tensor)]
    assert sizes == [10, 2] * 3
    assert not in_rows(Parts(tmp_path / "file", (6, 3, 2), [[], [1], []]).tensor)


def test_a_file_that_became_shorter_is_damage(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "file", (4, 2, 2), [[], [], []])
    (tmp_path / "file").write_bytes(b"before")
    with opened(parts) as reader, pytest.raises(CheckpointCorrupt, match="ends at 6, 16 bytes"):
        list(reader.parts(parts.tensor))
