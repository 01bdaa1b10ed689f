"""What ranks agree on before a save: which ones failed, whether the next is skipped, memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from keepstep.errors import CheckpointError, NotEnoughMemory, SaveFailed
from keepstep.rank import exchange, room
from keepstep.rank.admission import Account, Admission, Report, busy
from keepstep.rank.room import Need
from keepstep.rank.save import Save
from keepstep.testing import FakeClock


class _Pending:
    """A save of which the test says how far it is."""

    def __init__(self) -> None:
        self.writing = True
        self.error: SaveFailed | None = None

    def failed(self, error: SaveFailed) -> None:
        self.error, self.writing = error, False

    def staged(self) -> bool:
        return True

    def done(self) -> bool:
        return not self.writing

    def wait(self, timeout_s: float) -> None:
        if self.error is not None:
            raise self.error


class _Ranks:
    """Accounts of several ranks; ``agree`` asks each in a thread, as collectives would."""

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = world
        self.clock = FakeClock()
        self.accounts = [Account(self.clock) for _ in range(world)]
        self.pending: list[list[_Pending]] = []
        self.collectives = 0
        self._here = threading.local()
        self._barrier = threading.Barrier(world)
        self._given: list[Any] = [None] * world
        monkeypatch.setattr(exchange, "numbers", self._gather)
        monkeypatch.setattr(exchange, "gather", self._gather)

    def _gather(self, value: Any) -> list[Any]:
        self._given[self._here.rank] = value
        self._barrier.wait()
        given = list(self._given)
        if self._barrier.wait() == 0:
            self.collectives += 1
        return given

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.world

        def one(rank: int) -> None:
            self._here.rank = rank
            try:
                results[rank] = call(rank)
            except (CheckpointError, NotEnoughMemory) as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def begin(self, step: int) -> list[_Pending]:
        made = [_Pending() for _ in range(self.world)]
        for account, pending in zip(self.accounts, made, strict=True):
            account.add(Save(step, pending))
        self.pending.append(made)
        return made

    def agree(self, slots: int = 2, skip: bool = True) -> list[Admission]:
        return self.each(lambda rank: self.accounts[rank].agree(rank, self.world, slots, skip=skip))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> _Ranks:
    return _Ranks(3, monkeypatch)


def test_all_ranks_begin_or_all_skip_by_what_the_busiest_has_to_do(ranks: _Ranks) -> None:
    assert [one.reason for one in ranks.agree()] == ["", "", ""]
    first, second = ranks.begin(5), ranks.begin(10)
    ranks.clock.advance(3.0)
    for rank in (0, 1):
        first[rank].writing = False
    assert {one.reason for one in ranks.agree()} == {
        "2 saves are still being written, the oldest (step 5) for 3.0 s"
    }
    assert [one.reason for one in ranks.agree(skip=False)] == ["", "", ""]
    first[2].writing = False
    assert [one.reason for one in ranks.agree()] == ["", "", ""]
    second[0].writing = False
    assert ranks.collectives == 4, "one each time"


def test_what_rank_0_has_committed_is_forgotten_on_every_rank(ranks: _Ranks) -> None:
    first = ranks.begin(5)
    ranks.begin(10)
    for pending in first:
        pending.writing = False
    ranks.agree()
    assert [[save.step for save in one.saves] for one in ranks.accounts] == [[10]] * 3


def test_other_ranks_wait_for_rank_0_s_commit(ranks: _Ranks) -> None:
    first = ranks.begin(5)
    for rank in (1, 2):
        first[rank].writing = False  # their shards are written, nothing is published yet
    ranks.agree()
    assert [[save.step for save in one.saves] for one in ranks.accounts] == [[5]] * 3


def test_a_save_that_failed_anywhere_is_told_on_every_rank_once(ranks: _Ranks) -> None:
    first = ranks.begin(5)
    first[1].failed(SaveFailed("disk full", where="rank 1"))
    admissions = ranks.agree()
    for rank, told in enumerate(admissions):
        ((step, error),) = told.failed
        assert step == 5 and "disk full" in str(error)
        assert ("failed on rank 1" in str(error)) == (rank != 1)
    assert ranks.collectives == 2
    assert all(pending.error for pending in first), "nobody waits for it any more"
    assert [one.failed for one in ranks.agree()] == [[], [], []]
    assert [one.saves for one in ranks.accounts] == [[], [], []]


def test_a_rank_alone_asks_nobody() -> None:
    clock = FakeClock()
    account = Account(clock)
    pending = _Pending()
    account.add(Save(1, pending))
    assert account.agree(0, 1, 1, skip=True).reason.startswith("1 save is")
    pending.failed(SaveFailed("disk full"))
    ((step, error),) = account.agree(0, 1, 1, skip=True).failed
    assert (step, error.what) == (1, "disk full")


def test_a_writer_that_says_nothing_of_itself_is_asked_whether_it_is_done() -> None:
    class Plain:
        over = False

        def staged(self) -> bool:
            return True

        def done(self) -> bool:
            return self.over

        def wait(self, timeout_s: float) -> None:
            raise SaveFailed("refused")

    plain = Plain()
    save = Save(3, plain)
    assert save.in_work and save.failure is None
    plain.over = True
    assert not save.in_work
    assert save.failure is not None and save.failure.what == "refused"


def test_a_skipped_save_is_over_and_no_error() -> None:
    save = Save(3, None, "busy")
    assert save.skipped and save.staged() and save.done() and save.failure is None
    save.wait(0.0)


def test_a_report_goes_as_a_few_numbers() -> None:
    report = Report(failed=1, open=2, oldest=3, step=4, age_ms=5)
    assert report.numbers() == [1, 2, 3, 4, 5]
    assert busy([report], 3) == ""


# --- memory ---------------------------------------------------------------------------------------


def _need(node: str, size: int, available: int, error: str = "") -> Need:
    where = f"memory of {node}"
    return Need(node=node, size=size, available=available, limit=6400, where=where, error=error)


def test_the_node_with_the_least_memory_decides_for_all() -> None:
    roomy = [_need("a", 100, 5000)] * 4
    assert room.decide(roomy, 2).slots == 2
    answer = room.decide([*roomy, _need("b", 100, 350), _need("b", 100, 320)], 2)
    assert answer.slots == 1
    assert "memory of b" in answer.statement and "320 bytes" in answer.statement


def test_ranks_of_one_node_need_memory_together() -> None:
    assert room.decide([_need("a", 100, 900)] * 4, 2).slots == 2
    answer = room.decide([_need("a", 100, 600)] * 4, 2)
    assert answer.slots == 1 and "2 copies do not fit" in answer.statement
    with pytest.raises(NotEnoughMemory, match="memory of a"):
        room.decide([_need("a", 100, 450)] * 4, 2)


def test_a_rank_that_cannot_save_is_named_on_every_rank() -> None:
    with pytest.raises(CheckpointError, match="rank 1 cannot save: number cannot be kept"):
        room.decide([_need("a", 1, 9), _need("a", 0, 9, "number cannot be kept")], 2)


def test_every_rank_looks_before_anyone_takes_and_all_come_to_the_same_answer(
    ranks: _Ranks,
) -> None:
    sizes = [1000, 3000, 2000]
    answers = ranks.each(lambda rank: room.agree(lambda: sizes[rank], 2, 3))
    assert [size for size, _ in answers] == sizes
    assert len({msgspec.json.encode(answer) for _, answer in answers}) == 1
    assert ranks.collectives == 1


def test_a_rank_with_an_error_of_its_own_still_answers_the_others(ranks: _Ranks) -> None:
    def size_of(rank: int) -> int:
        if rank == 2:
            raise CheckpointError("number cannot be kept")
        return 10

    answers = ranks.each(lambda rank: room.agree(lambda: size_of(rank), 2, 3))
    assert [type(one) for one in answers] == [CheckpointError] * 3
    assert [str(one) for one in answers] == [
        "rank 2 cannot save: number cannot be kept.",
        "rank 2 cannot save: number cannot be kept.",
        "number cannot be kept.",
    ]


def test_a_node_is_this_machine_and_container() -> None:
    assert room.node_id() == room.node_id() != ""
