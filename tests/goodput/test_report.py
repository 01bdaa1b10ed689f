from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from keepstep import events as ev
from keepstep.errors import ExitCode, UsageError
from keepstep.goodput.render import _checkpoints_line
from keepstep.goodput.report import build, from_events, to_json
from tests.goodput.runlog import RunLog, four_faults, worked_example


def test_json_form_is_version_1(tmp_path: Path) -> None:
    worked_example().write(tmp_path)
    record = to_json(build(tmp_path))
    assert list(record) == [
        "v",
        "run",
        "engine",
        "wall_s",
        "goodput",
        "categories",
        "faults",
        "checkpoints",
        "heartbeats",
    ]
    assert (record["v"], record["run"], record["engine"]) == (1, "invented", "native")
    assert (record["wall_s"], record["goodput"]) == (303.0, 0.6601)
    assert record["categories"] == {
        "productive": 200.0,
        "lost_work": 50.5,
        "startup": 20.0,
        "detect": 7.5,
        "restart": 15.0,
        "restore": 8.0,
        "checkpoint_stall": 2.0,
        "idle": 0.0,
    }
    assert record["checkpoints"] == {
        "committed": 1,
        "failed": 0,
        "last_step": 100,
        "bytes": 1000,
        "stall_s": {"median": 2.0, "max": 2.0},
        "save_s": {"median": 3.0, "max": 3.0},
        "skipped": 0,
        "every_steps_wanted": None,
    }
    assert record["heartbeats"] == []


def test_each_rank_s_heartbeat_that_came_closest_to_its_limit_is_reported() -> None:
    log = RunLog()
    log.launch(0.0)
    beats = [
        (0, ev.RankBeat(age_s=3.0, limit_s=60.0, section="step")),
        (0, ev.RankBeat(age_s=100.0, limit_s=3600.0, section="section:eval")),
        (1, ev.RankBeat(age_s=1.0, limit_s=60.0, section="step")),
        (1, ev.RankBeat(age_s=31.0, limit_s=60.0, section="step")),
        (1, ev.RankBeat(age_s=2.0, limit_s=60.0, section="step")),
    ]
    for rank, beat in beats:
        log.add(1.0, beat, src="agent", rank=rank)
    record = msgspec.to_builtins(to_json(from_events(log.events)))
    assert record["heartbeats"] == [
        {"rank": 0, "age_s": 3.0, "limit_s": 60.0, "section": "step"},
        {"rank": 1, "age_s": 31.0, "limit_s": 60.0, "section": "step"},
    ]


def test_a_fault_in_json_begins_with_the_keys_of_version_1() -> None:
    record = msgspec.to_builtins(to_json(from_events(worked_example().events)))
    (fault,) = record["faults"]
    assert list(fault.items())[:8] == [
        ("kind", "kill"),
        ("rank", 1),
        ("step", 151),
        ("level", "rank"),
        ("detect_s", 7.5),
        ("recover_s", 31.5),
        ("steps_lost", 51),
        ("survivors_kept", True),
    ]
    assert fault["line"] == "rank 1 killed in step 151; replaced"


def test_checkpoints_are_counted_over_the_whole_folder() -> None:
    log = four_faults()
    log.add(30.0, ev.CheckpointFail(error="disk full"), round=5, step=41)
    found = from_events(log.events).checkpoints
    assert (found.committed, found.failed, found.last_step, found.bytes) == (4, 1, 40, 4000)
    assert (found.stall_s.median, found.stall_s.max) == (0.02, 0.03)
    assert (found.save_s.median, found.save_s.max) == (0.3, 0.35)


def test_skipped_saves_are_counted_and_an_interval_is_named_at_which_storage_keeps_up() -> None:
    log = RunLog()
    end = log.steps(0.0, 1, 40, 1, s=0.5)
    for step in (10, 30):
        log.save(end, 0.1, step, 1, save_s=7.4)
    log.add(end, ev.CheckpointSkip(reason="2 saves are still being written"), round=1, step=20)
    report = from_events(log.events)
    assert (report.checkpoints.skipped, report.checkpoints.every_steps_wanted) == (1, 15)
    text = str(_checkpoints_line(report.checkpoints))
    assert "1 save skipped" in text and "raise checkpoint.every_steps to >= 15" in text


def test_where_the_interval_is_long_enough_for_most_saves_no_other_is_named() -> None:
    log = RunLog()
    end = log.steps(0.0, 1, 40, 1, s=0.5)
    for step, save_s in ((10, 3.0), (20, 30.0), (40, 3.0)):
        log.save(end, 0.1, step, 1, save_s=save_s)
    log.add(end, ev.CheckpointSkip(reason="2 saves are still being written"), round=1, step=30)
    report = from_events(log.events)
    assert report.checkpoints.every_steps_wanted is None
    assert "storage slower than the schedule at times" in str(_checkpoints_line(report.checkpoints))


def test_a_save_stalls_as_long_as_its_slowest_rank() -> None:
    log = RunLog()
    log.steps(0.0, 1, 1, 1)
    for rank, stall_s in enumerate((0.5, 1.5)):
        staged = ev.CheckpointStaged(stall_s=stall_s, bytes=1)
        log.add(2.0, staged, src="rank", rank=rank, round=1, step=1)
    found = from_events(log.events).checkpoints
    assert (found.stall_s.median, found.stall_s.max) == (1.5, 1.5)
    assert (found.committed, found.last_step, found.save_s.median) == (0, None, None)


def test_engine_is_unknown_without_the_launcher() -> None:
    report = from_events(worked_example().without("agent"))
    assert (report.engine, report.run) == ("unknown", "invented")


def test_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    worked_example().write(tmp_path)
    with (tmp_path / "events" / "rank-0-1-1.jsonl").open("ab") as file:
        file.write(b'{"v":1,"ru')
    assert build(tmp_path).goodput == 0.6601


@pytest.mark.parametrize("made", ["", "run", "run/events"])
def test_folder_without_events_is_a_usage_error(tmp_path: Path, made: str) -> None:
    (tmp_path / made).mkdir(parents=True, exist_ok=True)
    with pytest.raises(UsageError) as caught:
        build(tmp_path / "run")
    assert caught.value.exit_code == ExitCode.USAGE
    assert str(tmp_path / "run") in str(caught.value) and caught.value.advice


def test_empty_event_files_are_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "rank-0-1-1.jsonl").touch()
    with pytest.raises(UsageError, match="1 event files are empty"):
        build(tmp_path)


def test_a_damaged_line_does_not_hide_the_rest_of_the_run(tmp_path: Path) -> None:
    worked_example().write(tmp_path)
    whole = build(tmp_path)
    path = tmp_path / "events" / "rank-1-1-1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0\0\0\n" + b"".join(lines[1:]))
    assert build(tmp_path) == whole
