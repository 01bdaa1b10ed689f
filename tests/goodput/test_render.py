from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from keepstep import events as ev
from keepstep.goodput.render import closing_table, duration, full_report
from keepstep.goodput.report import from_events
from tests.goodput.runlog import RunLog, four_faults, worked_example


def shown(renderable: RenderableType, width: int = 80, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=file, width=width).print(renderable)
    file.seek(0)
    return [line.rstrip() for line in file.read().splitlines()]


@pytest.mark.parametrize("width", [80, 100])
def test_table_shows_each_fault_on_one_line(width: int) -> None:
    lines = shown(closing_table(from_events(four_faults().events)), width)
    rows = [line.split() for line in lines]
    assert ["exception", "1", "13", "exception", "kept", "0.03", "0.62", "1", "yes"] in rows
    assert ["desync", "0", "18", "timeout", "kept", "2.05", "2.75", "1", "yes"] in rows
    assert ["kill", "1", "26", "killed", "rank", "0.05", "1.34", "1", "yes"] in rows
    assert ["hang", "0", "34", "hang", "rank", "4.19", "5.54", "1", "yes"] in rows


def test_split_shows_seconds_share_and_a_bar() -> None:
    lines = shown(closing_table(from_events(worked_example().events)))
    assert "Goodput 66.0% of 5 min 03 s" in lines
    (line,) = [line for line in lines if line.startswith("lost work")]
    assert line.split()[2:5] == ["50.5", "s", "16.7%"]
    assert line.endswith("━━━━")
    assert not [line for line in lines if line.startswith("idle")]


def test_longest_names_fit_into_80_columns() -> None:
    log = RunLog()
    log.launch(0.0)
    log.ready(0.0, 1, 0, [10, 11])
    log.steps(0.0, 99_998, 99_999, 1, s=100.0)
    log.inject(200.0, "exception", 1, 1, 100_000)
    log.restart(800.0, 1, cause="checkpoint", guilty=0, step=100_000, level="respawn")
    log.ready(900.0, 2, 0, [10, 11])
    log.steps(900.0, 1, 1, 2)
    rows = [line.split() for line in shown(closing_table(from_events(log.events)))]
    assert ["exception", "1", "100000", "missed", "-", "-", "-", "-", "-"] in rows
    long = ["checkpoint", "*", "0", "100000", "checkpoint", "respawn", "-", "101.00", "100000"]
    assert [*long, "yes"] in rows
    assert ["*", "not", "injected"] in rows


def test_output_that_is_no_terminal_has_no_escape_codes_and_can_be_ascii() -> None:
    log = four_faults()
    lines = shown(full_report(from_events(log.events)), encoding="ascii")
    text = "\n".join(lines)
    assert "\x1b" not in text and text.isascii()
    assert "rank 0 hang in step 34; replaced" in lines


def test_undisturbed_run_without_saves_says_so() -> None:
    log = RunLog()
    log.launch(0.0)
    log.steps(0.0, 1, 3, 1)
    log.end(3.0)
    lines = shown(full_report(from_events(log.events)))
    assert "No faults." in lines and "No checkpoints." in lines
    assert "run invented, engine native" in lines


def test_section_names_and_failed_saves_are_shown_as_they_are() -> None:
    log = RunLog()
    log.launch(0.0)
    log.ready(0.0, 1, 0, [10, 11])
    log.steps(0.0, 1, 3, 1)
    log.add(1.0, ev.SectionBegin(name="[bold]x"), src="rank", rank=0, round=1)
    log.add(2.0, ev.SectionEnd(name="[bold]x", s=1.0), src="rank", rank=0, round=1)
    log.add(2.5, ev.CheckpointFail(error="disk full"), round=1, step=2)
    lines = shown(full_report(from_events(log.events)))
    assert any(line.startswith("section [bold]x") for line in lines)
    assert "Checkpoints 0 committed (0 bytes), 1 failed" in lines


def test_the_heartbeats_closest_to_their_limit_are_named_first_and_at_most_eight() -> None:
    log = RunLog()
    log.launch(0.0)
    for rank in range(10):
        beat = ev.RankBeat(age_s=1.0 + rank, limit_s=60.0, section="step")
        log.add(1.0, beat, src="agent", rank=rank)
    text = " ".join(shown(closing_table(from_events(log.events))))
    assert "Heartbeats longest silence: rank 9 10.0 s of 60.0 s (step), rank 8" in text
    assert "rank 2 3.00 s of 60.0 s (step), 2 more less close" in text
    assert "Heartbeats" not in " ".join(shown(closing_table(from_events(four_faults().events))))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (9.994, "9.99 s"),
        (9.996, "10.0 s"),
        (119.94, "119.9 s"),
        (119.96, "2 min 00 s"),
        (303.4, "5 min 03 s"),
        (7199.6, "2 h 00 min"),
        (90_000.0, "25 h 00 min"),
    ],
)
def test_durations_are_rounded_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
