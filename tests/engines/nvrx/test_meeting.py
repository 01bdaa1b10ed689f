"""Where ranks meet under NVRx: one number a turn, nothing read from an older cycle."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from keepstep.engines.nvrx import library
from keepstep.engines.nvrx.meeting import OutsideStore, Turn, meeting
from keepstep.errors import UsageError


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """What torch and NVRx open once a process is not left behind by a test."""
    library.inprocess()
    dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )


@pytest.fixture
def address() -> Iterator[str]:
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    yield f"127.0.0.1:{store.port}"
    del store


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, port: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    monkeypatch.setenv("MASTER_PORT", str(port))


def met(turn: Turn) -> int:
    """The round's number after the turn's meeting."""
    meeting(turn)
    return turn.round


def test_all_ranks_of_a_turn_get_one_number_and_each_turn_a_higher_one(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[tuple[int, int]] = []
    for port, iteration in ((7001, 0), (7001, 1), (7002, 0), (7002, 1)):
        pair = []
        for rank in (0, 1):
            as_rank(monkeypatch, rank, port)
            pair.append(met(Turn(address, 10.0, iteration)))
        numbers.append((pair[0], pair[1]))
    assert numbers == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_turn_that_is_aborted_is_not_waited_for(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(monkeypatch, 1, 7001)
    turn = Turn(address, 10.0)
    turn.aborted = True
    with pytest.raises(RuntimeError, match="aborted"):
        meeting(turn)


def test_a_turn_whose_rank_0_never_comes_ends_with_the_time_limit(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(monkeypatch, 1, 7001)
    with pytest.raises(dist.DistStoreError):
        meeting(Turn(address, 0.2))


@pytest.mark.parametrize("wrong", ["", "host", "host:", ":7", "host:x"])
def test_an_address_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        Turn(wrong, 1.0).host_and_port()


def test_an_ipv6_address_loses_its_brackets() -> None:
    assert Turn("[::1]:29500", 1.0).host_and_port() == ("::1", 29500)


def test_the_wrappers_store_has_nvrxs_barrier_although_torch_has_one_of_its_own(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_rank(monkeypatch, 0, 7001)
    mixin = library.inprocess().StoreMixin
    arguments = Turn(address, 10.0).store_arguments()
    stores = [OutsideStore.of(mixin)(**arguments) for _ in range(2)]
    assert isinstance(stores[0], mixin)
    assert stores[0].critical_ranks == ()
    passed: list[int] = []

    def wait(number: int, store: Any) -> None:
        store.barrier(
            ranks=[number],
            group_name="test",
            rendezvous_count=2,
            timeout=timedelta(seconds=10),
        )
        passed.append(number)

    threads = [threading.Thread(target=wait, args=pair) for pair in enumerate(stores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(passed) == [0, 1]
