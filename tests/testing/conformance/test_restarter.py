"""The restarter suite can fail: records of runs in which one thing went wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from keepstep.testing.conformance.restarter import Outcome, Record, Runs, clauses, read, verify

_WORLD = 2
_PIDS = (100, 200)


def _begin(rank: int, attempt: int, *, pid: int = 0, round: int = 0, alive: int = 0) -> Record:
    return Record(
        kind="begin",
        rank=rank,
        pid=pid or _PIDS[rank],
        attempt=attempt,
        round=round or attempt,
        size=_WORLD,
        group_rank=rank,
        random=[0.25, 0.5],
        alive=alive,
    )


def _line(kind: str, rank: int, attempt: int, pid: int = 0) -> Record:
    text = f"result of rank {rank}" if kind == "result" else ""
    return msgspec.convert(
        {"kind": kind, "rank": rank, "pid": pid or _PIDS[rank], "attempt": attempt, "text": text},
        Record,
    )


def _attempt(number: int, fails: int | None) -> list[Record]:
    """An attempt of both ranks in which ``fails`` fails and the other waits for it."""
    records = [_begin(rank, number) for rank in range(_WORLD)]
    if fails is not None:
        records += [_line("waits", 1 - fails, number), _line("fault", fails, number)]
    return [*records, *(_line("unwound", rank, number) for rank in range(_WORLD))]


def _results() -> list[Record]:
    return [_line("result", rank, 3) for rank in range(_WORLD)]


def _killed(rank: int) -> Outcome:
    first = [one for one in _attempt(1, rank) if (one.kind, one.rank) != ("unwound", rank)]
    second = [replace_pid(one, 300) if one.rank == rank else one for one in _attempt(2, None)]
    return Outcome(0, [*first, *second, *_results()], "", 0)


def replace_pid(record: Record, pid: int) -> Record:
    return msgspec.structs.replace(record, pid=pid)


class Told(Runs):
    """Runs of which the records are given."""

    def __init__(self, **wrong: Outcome) -> None:
        super().__init__((), Path("nowhere"), world=_WORLD)
        soft = [*_attempt(1, 1), *_attempt(2, 0), *_attempt(3, None), *_results()]
        use = [_begin(0, 1), _begin(1, 1), _line("fault", 0, 1)]
        left = [*_attempt(1, 1), *_attempt(2, 1)]
        self._done = {
            "exceptions": Outcome(0, soft, "", 0),
            "killed-0": _killed(0),
            "killed-1": _killed(1),
            "wrong-use": Outcome(64, use, "", 0),
            "exits": Outcome(76, left, "", 0),
            **{name.replace("_", "-"): outcome for name, outcome in wrong.items()},
        }


def _broken(runs: Runs) -> set[str]:
    return {one.name for one in verify(runs, {}) if not one.held}


def test_a_right_engine_keeps_every_clause() -> None:
    assert _broken(Told()) == set()


def _soft(change: Callable[[Record], Record | None]) -> Told:
    good = Told().exceptions()
    records = [new for one in good.records if (new := change(one)) is not None]
    return Told(exceptions=replace(good, records=records))


def _in_last_attempt(one: Record, **values: object) -> Record:
    last = one.kind == "begin" and one.attempt == 3 and one.rank == 0
    return msgspec.structs.replace(one, **values) if last else one


@pytest.mark.parametrize(
    ("clause", "change"),
    [
        ("attempt-again", lambda one: None if one.attempt == 3 and one.kind == "begin" else one),
        ("restart-in-process", lambda one: _in_last_attempt(one, pid=300)),
        ("higher-round", lambda one: _in_last_attempt(one, round=2)),
        ("higher-round", lambda one: _in_last_attempt(one, round=4)),
        ("same-world", lambda one: _in_last_attempt(one, size=1)),
        ("same-world", lambda one: _in_last_attempt(one, group_rank=1)),
        ("blocked-rank", lambda one: None if one.kind == "waits" else one),
        ("unwound", lambda one: None if one.kind == "unwound" and one.attempt == 1 else one),
        ("random-state", lambda one: _in_last_attempt(one, random=[0.25, 0.75])),
        ("model-freed", lambda one: _in_last_attempt(one, alive=1)),
        ("result", lambda one: None if one.kind == "result" and one.rank else one),
    ],
)
def test_what_goes_wrong_after_an_exception_breaks_its_clause(
    clause: str, change: Callable[[Record], Record | None]
) -> None:
    assert clause in _broken(_soft(change))


@pytest.mark.parametrize(
    ("name", "change", "broken"),
    [
        ("exceptions", {"code": -1}, {"blocked-rank", "result"}),
        ("exceptions", {"code": 76}, {"result"}),
        ("exceptions", {"left": 1}, {"nothing-left"}),
        ("killed_0", {"said": "[rank 1] Exception in thread beats:"}, {"threads-live"}),
        ("killed_0", {"code": 76}, {"rank-0-killed", "survivors-keep-process"}),
        ("killed_1", {"records": []}, {"rank-killed"}),
        ("wrong_use", {"code": 76}, {"wrong-use"}),
        ("exits", {"code": 7}, {"repeated-exit"}),
        ("exits", {"records": []}, {"repeated-exit"}),
    ],
)
def test_an_end_that_is_not_right_breaks_its_clause(
    name: str, change: dict[str, object], broken: set[str]
) -> None:
    good = Told().all()[name.replace("_", "-")]
    assert _broken(Told(**{name: replace(good, **change)})) == broken  # type: ignore[arg-type]


def test_a_survivor_that_gets_another_process_and_a_world_that_shrinks_are_found() -> None:
    good = Told().killed(1)
    moved = [
        replace_pid(one, 400) if one.rank == 0 and one.attempt == 2 else one for one in good.records
    ]
    assert _broken(Told(killed_1=replace(good, records=moved))) == {"survivors-keep-process"}
    small = [
        msgspec.structs.replace(one, size=1) if one.kind == "begin" and one.attempt == 2 else one
        for one in good.records
    ]
    assert _broken(Told(killed_1=replace(good, records=small))) == {"rank-killed"}


def test_wrong_use_that_is_tried_again_breaks_its_clause() -> None:
    good = Told().wrong_use()
    again = replace(good, records=[*good.records, _begin(0, 2)])
    assert _broken(Told(wrong_use=again)) == {"wrong-use"}


def test_records_are_read_in_order_and_a_run_that_wrote_none_has_none(tmp_path: Path) -> None:
    assert read(tmp_path) == []
    lines = [msgspec.json.encode(one) + b"\n" for one in _results()]
    (tmp_path / "records.jsonl").write_bytes(b"".join(lines))
    assert read(tmp_path) == _results()


def test_every_clause_is_broken_by_a_test_here() -> None:
    assert len(clauses()) == 16
