"""Fixtures of tests of what a rank does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from keepstep.rank.shard_writer import NativeShardWriter
from tests.rank.copies import Gate, KeepingStaging


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def staging() -> KeepingStaging:
    return KeepingStaging()


@pytest.fixture
def made() -> Iterator[list[NativeShardWriter]]:
    writers: list[NativeShardWriter] = []
    yield writers
    for writer in writers:
        writer.close()
