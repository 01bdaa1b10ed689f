from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep import events
from keepstep.events import KINDS, Event, EventData, Recorder
from keepstep.testing import FakeClock, LineSink

# The file format is read by other programs: a kind may be added, none may go or be renamed.
KNOWN_KINDS = {
    "run.begin run.end node.begin round.begin round.ready restart.begin restart.cause restart.end",
    "rank.start rank.exit rank.suspect rank.hung rank.beat rank.failed rank.joined rank.left",
    "step.end",
    "section.begin section.end checkpoint.begin checkpoint.staged checkpoint.copied",
    "checkpoint.shard",
    "checkpoint.commit checkpoint.fail checkpoint.skip checkpoint.retry checkpoint.memory",
    "checkpoint.unusable restore.begin restore.end",
    "storage.rated storage.stalled storage.moves",
    "fault.injected health.finding stop.notice",
}
HEAD = ["v", "run", "src", "node", "t", "mono", "seq", "kind", "rank", "world", "round", "step"]
SAMPLES: dict[Any, Any] = {
    int: 7,
    float: 1.5,
    str: "text",
    bool: True,
    list[str]: ["a"],
    list[int]: [3, 1],
    dict[str, int]: {"0": 41},
    float | None: 2.5,
}


def sample(kind: type[EventData]) -> EventData:
    return kind(**{field.name: SAMPLES[field.type] for field in msgspec.structs.fields(kind)})


def recorder(sink: LineSink, clock: FakeClock | None = None, **names: Any) -> Recorder:
    return Recorder(sink, run="demo", clock=clock or FakeClock(), **{"src": "rank", **names})


def line(
    t: float = 1.0, seq: int = 1, src: str = "rank", rank: int | None = None, kind: str = "x"
) -> bytes:
    event = Event(v=1, run="demo", src=src, node=0, t=t, mono=t, seq=seq, kind=kind, rank=rank)
    return msgspec.json.encode(event) + b"\n"


def run_of(folder: Path, **files: bytes) -> Path:
    (folder / "events").mkdir()
    for name, data in files.items():
        (folder / "events" / f"{name}.jsonl").write_bytes(data)
    return folder


# --- writing -------------------------------------------------------------------------------------


def test_a_line_has_the_fixed_head_and_the_data() -> None:
    sink = LineSink()
    clock = FakeClock(wall=1000.5, mono=7.25)
    recorder(sink, clock, rank=3, world=4, node=1).emit(
        events.StepEnd(s=0.5, loss=2.0), step=12, round=2
    )
    assert sink.lines[0].endswith(b"\n") and sink.lines[0].count(b"\n") == 1
    assert msgspec.json.decode(sink.lines[0]) == {
        "v": 1,
        "run": "demo",
        "src": "rank",
        "node": 1,
        "t": 1000.5,
        "mono": 7.25,
        "seq": 1,
        "kind": "step.end",
        "rank": 3,
        "world": 4,
        "round": 2,
        "step": 12,
        "data": {"s": 0.5, "loss": 2.0},
    }


def test_the_head_has_no_other_fields() -> None:
    assert [field.name for field in msgspec.structs.fields(Event)] == [*HEAD, "data"]


def test_what_is_not_known_is_absent_and_never_zero() -> None:
    sink = LineSink()
    recorder(sink, src="coordinator").emit(events.StopNotice(signal="SIGTERM"))
    written = msgspec.json.decode(sink.lines[0])
    assert set(written) == {"v", "run", "src", "node", "t", "mono", "seq", "kind", "data"}
    recorder(sink, src="coordinator").emit(events.RoundBegin(reason="r"), rank=0, step=0, round=0)
    written = msgspec.json.decode(sink.lines[1])
    assert (written["rank"], written["step"], written["round"]) == (0, 0, 0)


def test_rank_and_round_default_to_the_recorder_s_own_and_time_can_be_given() -> None:
    sink = LineSink()
    made = recorder(sink, rank=3)
    made.round = 5
    made.emit(events.StopNotice(signal="a"))
    made.emit(events.StopNotice(signal="b"), rank=1, round=6, t=12.0)
    first, second = sink.events
    assert (first.rank, first.round, first.t) == (3, 5, 1_700_000_000.0)
    assert (second.rank, second.round, second.t) == (1, 6, 12.0)


def test_a_kind_that_is_not_registered_is_refused() -> None:
    class Sneaky(EventData):  # type: ignore[misc]
        pass

    class Disguised(events.StepEnd):  # type: ignore[misc]
        pass

    sink = LineSink()
    for data in (Sneaky(), Disguised(s=1.0)):
        with pytest.raises(ValueError, match="not a registered event kind"):
            recorder(sink).emit(data)
    assert sink.lines == []


def test_numbers_have_no_gap_over_threads() -> None:
    sink = LineSink()
    made = recorder(sink)

    def emit() -> None:
        for _ in range(200):
            made.emit(events.CheckpointBegin())

    threads = [threading.Thread(target=emit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event.seq for event in sink.events] == list(range(1, 601))


# --- the list of kinds ---------------------------------------------------------------------------


def test_the_list_of_kinds_is_closed() -> None:
    assert set(KINDS) == set(" ".join(KNOWN_KINDS).split())
    assert all(cls.kind == kind for kind, cls in KINDS.items())
    assert all(re.fullmatch(r"[a-z]+\.[a-z]+", kind) for kind in KINDS)


def test_what_begins_has_an_end() -> None:
    for kind in KINDS:
        if kind.endswith(".begin") and kind not in ("node.begin", "round.begin"):
            name = kind.removesuffix("begin")
            assert KINDS.keys() & {f"{name}end", f"{name}commit", f"{name}ready"}, kind


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_is_documented_and_comes_back_as_it_was(kind: str) -> None:
    assert KINDS[kind].__doc__ != EventData.__doc__
    sink = LineSink()
    data = sample(KINDS[kind])
    recorder(sink).emit(data, step=1)
    (event,) = sink.events
    assert event.kind == kind
    assert events.data_of(event) == data


def test_data_of_a_kind_that_is_not_known_is_none() -> None:
    event = msgspec.json.decode(line(kind="later.kind"), type=Event)
    assert events.data_of(event) is None


def test_data_that_does_not_fit_its_kind_is_an_error() -> None:
    event = msgspec.json.decode(line(kind="step.end"), type=Event)
    with pytest.raises(msgspec.ValidationError):
        events.data_of(event)


# --- reading -------------------------------------------------------------------------------------


def test_a_last_line_cut_by_a_kill_is_left_out_and_no_damage(tmp_path: Path) -> None:
    whole = line(seq=1) + line(seq=2)
    for cut in range(1, len(line(seq=2))):
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(whole[:-cut])
        damaged: list[events.Damage] = []
        assert [event.seq for event in events.read_file(path, damaged)] == [1]
        assert damaged == []


def test_damaged_lines_in_the_middle_are_passed_over_and_counted(tmp_path: Path) -> None:
    bad = [b"\0\0\0\n", b"{}\n", b'{"v":1,"ru' + line(seq=9), b"\xff\xfe\n", b"\n", b'"text"\n']
    run = run_of(tmp_path, a=line(1, 1) + b"".join(bad) + line(2, 2), b=line(3, 3))
    reading = events.read_run(run)
    assert [event.seq for event in reading.events] == [1, 2, 3]
    assert [damage.line for damage in reading.damaged] == [2, 3, 4, 5, 6, 7]
    assert {damage.path.name for damage in reading.damaged} == {"a.jsonl"}
    assert all(damage.error for damage in reading.damaged)
    assert events.read(run) == reading.events


@given(data=st.binary(max_size=200), places=st.lists(st.integers(0, 4000), max_size=4))
def test_no_damage_to_a_file_makes_it_unreadable(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, places: list[int]
) -> None:
    content = bytearray(b"".join(line(seq=number) for number in range(20)))
    for place in places:
        content[place % len(content)] ^= 1 << (place % 8)
    path = tmp_path_factory.mktemp("damage") / "x.jsonl"
    path.write_bytes(bytes(content) + data)
    found = list(events.read_file(path))
    assert len(found) >= 20 - 2 * len(places)  # a lost line end takes its neighbour along


def test_text_that_is_no_utf8_is_damage_not_an_error(tmp_path: Path) -> None:
    bad = line(seq=1).replace(b"demo", b"de\xffo")
    run = run_of(tmp_path, a=bad + line(seq=2))
    reading = events.read_run(run)
    assert [event.seq for event in reading.events] == [2]
    assert [damage.line for damage in reading.damaged] == [1]


def test_events_of_all_processes_come_in_time_order(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        agent=line(2.0, 1, "agent") + line(1.0, 2, "agent"),
        rank0=line(2.0, 2, rank=0) + line(2.0, 1, rank=0),
        rank1=line(2.0, 1, rank=1) + line(0.5, 2, rank=1),
    )
    order = [(event.t, event.src, event.rank, event.seq) for event in events.read(run)]
    assert order == [
        (0.5, "rank", 1, 2),
        (1.0, "agent", None, 2),
        (2.0, "agent", None, 1),
        (2.0, "rank", 0, 1),
        (2.0, "rank", 0, 2),
        (2.0, "rank", 1, 1),
    ]


def test_other_files_and_unknown_kinds_and_fields_do_not_matter(tmp_path: Path) -> None:
    later = msgspec.json.encode({**msgspec.json.decode(line(kind="later.kind")), "zone": "b"})
    run = run_of(tmp_path, a=later + b"\n")
    (run / "events" / "notes.txt").write_text("not events")
    assert [event.kind for event in events.read(run)] == ["later.kind"]


def test_a_run_without_events_has_none(tmp_path: Path) -> None:
    assert events.read(tmp_path) == []
