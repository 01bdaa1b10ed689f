"""What the agent says of storage."""

from __future__ import annotations

import os
from collections.abc import Sequence

from keepstep import events
from keepstep.agent.storage_watch import StorageWatch
from keepstep.checkpoint.storage import Rated
from keepstep.config import Config
from keepstep.config.settings import CheckpointSettings
from keepstep.events import EventData
from keepstep.wire.messages import JobEnd, Message, Ping


class Shards:
    """Shards that are being written."""

    def __init__(self) -> None:
        self.finished = 0
        self.writing: list[int] = []

    @property
    def steps(self) -> Sequence[int]:
        return self.writing


class Told:
    """A watch over storage, what it said, and a coordinator that answers if it may."""

    def __init__(self, rated: Rated | None = None, nproc: int = 2, every: int = 100) -> None:
        self.lines: list[str] = []
        self.events: list[tuple[EventData, int | None]] = []
        self.pings: list[int] = []
        self.answers = True
        self.taken = ""
        self.shards = Shards()
        settings = CheckpointSettings(stall_s=10.0, write_limit_s=100.0, every_steps=every)
        self.watch = StorageWatch(
            Config(checkpoint=settings),
            nproc,
            rated or Rated("ext4 at /", 0.0, ""),
            emit=lambda event, step=None: self.events.append((event, step)),
            say=self.lines.append,
            tell=self._ping,
            lost=lambda: self.taken,
        )

    def _ping(self, message: Message) -> None:
        assert isinstance(message, Ping)
        self.pings.append(message.number)

    def look(self, now: float) -> JobEnd | None:
        pid = os.getpid()
        end = self.watch.look(self.shards, pid, pid, now)
        if self.answers:
            self.watch.answered(self.pings[-1])
        return end


RATED = Rated("lustre at /fsx", 100.0, "checkpoint.rated_mb_s")


def test_the_first_save_says_once_how_long_a_save_takes() -> None:
    told = Told(RATED)
    told.watch.staged(5, 10**9, 0.5)
    assert told.lines == []  # the other rank's shard is not known yet
    told.watch.staged(5, 10**9, 0.5)
    told.watch.staged(10, 10**9, 0.5)
    told.watch.staged(10, 10**9, 0.5)
    (line,) = told.lines
    assert "a checkpoint of 2 GB takes 20 s at the rated 100 MB/s of lustre at /fsx" in line
    ((event, step),) = told.events
    assert (event, step) == (
        events.StorageRated(file_system="lustre at /fsx", mb_s=100.0, bytes=2 * 10**9, save_s=20.0),
        5,
    )


def test_saves_that_come_faster_than_storage_takes_them_are_warned_of_once() -> None:
    told = Told(RATED, nproc=1)
    told.watch.staged(100, 2 * 10**9, 0.0)  # how long a step takes is not known yet
    assert len(told.lines) == 1
    for step in (200, 300):
        told.watch.staged(step, 2 * 10**9, 0.1)
    assert len(told.lines) == 2
    assert told.lines[1].startswith("warning: a checkpoint is due every 100 steps")


def test_the_interval_is_the_one_that_is_seen_where_the_script_has_its_own_settings() -> None:
    told = Told(RATED, nproc=1, every=0)
    for step in (50, 100, 150):
        told.watch.staged(step, 2 * 10**9, 0.1)
    assert len(told.lines) == 2
    assert told.lines[1].startswith("warning: a checkpoint is due every 50 steps")


def test_a_save_in_between_is_not_taken_for_the_interval() -> None:
    told = Told(RATED, nproc=1, every=0)
    for step in (1000, 2000, 2002):
        told.watch.staged(step, 2 * 10**9, 0.1)
    assert len(told.lines) == 1


def test_nothing_is_said_of_the_speed_of_storage_that_is_not_rated() -> None:
    told = Told(nproc=1)
    told.watch.staged(100, 2 * 10**9, 0.1)
    assert (told.lines, told.events) == ([], [])


def test_a_writer_that_stands_still_is_told_of_and_one_that_goes_on() -> None:
    told = Told()
    told.look(1.0)
    told.shards.writing = [7, 7]
    for now in (2.0, 5.0, 11.0):
        told.look(now)
    assert told.lines == []
    told.look(12.0)
    told.look(30.0)
    pid = os.getpid()
    (line,) = told.lines
    head = f"storage has taken nothing for 10 s: save of step 7, writer process {pid}, state "
    assert line.startswith(head) and line.endswith("; training goes on")
    told.shards.writing, told.shards.finished = [7], 1
    told.look(32.0)
    assert told.lines[1:] == ["storage goes on after 30 s in which the writer waited for it"]
    kinds = [(type(event).__name__, step) for event, step in told.events]
    assert kinds == [("StorageStalled", 7), ("StorageMoves", None)]


def test_a_coordinator_that_does_not_answer_is_told_of_and_ends_the_run_in_the_end() -> None:
    told = Told()
    assert told.look(1.0) is None
    told.answers = False
    for now in (2.0, 5.0, 11.0, 12.0, 50.0, 101.0):
        assert told.look(now) is None
    assert told.pings == [1, 2]
    (line,) = told.lines
    assert "the coordinator, process" in line and "has not answered" in line and "10 s" in line
    end = told.look(102.0)
    assert end is not None and end.exit_code == 65 and not end.graceful
    assert "for 100 s (checkpoint.write_limit_s)" in end.reason


def test_a_coordinator_that_answers_late_is_forgiven() -> None:
    told = Told()
    told.answers = False
    for now in (1.0, 12.0):
        told.look(now)
    told.answers = True
    for now in (90.0, 91.0, 200.0):
        assert told.look(now) is None
    assert told.lines[-1] == "storage goes on after 90 s in which the coordinator waited for it"


def test_a_folder_that_was_lost_is_told_once() -> None:
    told = Told()
    told.look(1.0)
    told.taken = "the checkpoint folder was taken over by run 'x' on far"
    for now in (2.0, 3.0):
        told.look(now)
    assert told.lines == [f"{told.taken}: nothing that this run saves is committed any more"]
