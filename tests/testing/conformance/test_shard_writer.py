"""Ranks that die, block or leave a process behind are told by name, and the next clause works."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from keepstep.ports import ShardWriter
from keepstep.rank.checkpointer import Place, native_writer
from keepstep.testing.conformance import shard_writer as suite
from keepstep.testing.conformance.shard_writer import Ranks, clauses, verify

_HERE = "tests.testing.conformance.test_shard_writer"


def faulty(place: Place) -> ShardWriter:
    """In a rank: a native writer, with a fault that the clause's folder names."""
    clause = place.root.name.partition("-")[2]
    if clause == "commit-verifies" and place.rank == 1:
        os._exit(3)
    if clause == "saves-in-a-row" and place.rank == 0:
        threading.Event().wait()
    if clause == "refused-state":
        raise LookupError("no such thing")
    if clause == "ends-with-its-rank":
        subprocess.Popen(["sleep", "60"])
    return native_writer(place)


@pytest.mark.process
@pytest.mark.slow
def test_what_goes_wrong_in_a_rank_is_told_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ranks(f"{_HERE}:faulty", tmp_path) as ranks:

        def told(clause: str) -> str:
            [result] = verify(ranks, {}, only=[clause])
            return result.detail.partition("\n")[0]

        assert told("commit-verifies") == "rank 1: its process ended with 3"
        both = "rank 0: LookupError: no such thing; rank 1: LookupError: no such thing"
        assert told("refused-state") == both
        assert told("damage-is-found") == ""
        monkeypatch.setattr(suite, "CLAUSE_LIMIT_S", 1.0)
        assert told("saves-in-a-row") == (
            "rank 0 is blocked for over 1 s; rank 1 is blocked for over 1 s"
        )
        monkeypatch.setattr(suite, "CLAUSE_LIMIT_S", 60.0)
        monkeypatch.setattr(suite, "GONE_S", 2.0)
        assert told("ends-with-its-rank") == "2 of 4 processes live 2 s after their rank"


def test_without_a_small_disk_its_clause_is_left_out(tmp_path: Path) -> None:
    with Ranks(f"{_HERE}:faulty", tmp_path) as ranks:
        assert verify(ranks, {}, only=["full-disk"]) == []


def test_every_clause_has_its_code_and_all_code_is_used() -> None:
    from keepstep.testing.conformance.torch_ranks import CHECKS

    assert [clause.name for clause in clauses()] == list(CHECKS)
