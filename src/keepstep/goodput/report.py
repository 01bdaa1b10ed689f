"""The report of a run folder: goodput, faults, checkpoints. Read by people and programs, after the
run or during it."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from keepstep import events as ev
from keepstep.errors import UsageError
from keepstep.events import Event
from keepstep.goodput.account import Accounting, split
from keepstep.goodput.faults import Fault, listed
from keepstep.goodput.gather import gather

VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median and maximum in seconds; None without any value."""

    median: float | None
    max: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """Saves of a run: ``bytes`` is the sum of all committed, ``last_step`` the newest committed.

    ``stall_s`` is how long training stood still for a save, ``save_s`` from the first staged shard
    until the commit.
    """

    committed: int
    failed: int
    last_step: int | None
    bytes: int
    stall_s: Spread
    save_s: Spread
    skipped: int = 0
    """Saves that were due and not begun, because storage was behind."""
    every_steps_wanted: int | None = None
    """Where saves were skipped: the interval at which storage keeps up, by the median save and
    step; None if the present one is long enough for these, so that it was slow at times only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """How long a rank once made no progress, in ``section``, and what its launcher allows there:
    where that came closest to its limit. Seconds."""

    rank: int
    age_s: float
    limit_s: float
    section: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All there is to say about a run folder. ``launches``: how often it was started."""

    run: str
    engine: str
    launches: int
    accounting: Accounting
    faults: list[Fault]
    checkpoints: Checkpoints
    heartbeats: list[Heartbeat]
    """By rank; empty where no other launcher limits them."""

    @property
    def wall_s(self) -> float:
        """Seconds from the first to the last evidence."""
        return self.accounting.wall_ns / 1e9

    @property
    def goodput(self) -> float:
        """Productive share of the wall time, 0 to 1."""
        return round(self.accounting.goodput, 4)

    @property
    def categories(self) -> dict[str, float]:
        """Seconds by category; they add up to ``wall_s``."""
        return {name: ns / 1e9 for name, ns in self.accounting.categories_ns.items()}


def build(run_dir: Path) -> Report:
    """The report of the run folder ``run_dir``.

    Raises:
        UsageError: the folder does not exist, is no run folder, has no events, or its events cannot
            be read.
    """
    return from_events(_read(run_dir))


def from_events(events: list[Event]) -> Report:
    """The report of events that were read already.

    Raises:
        UsageError: there are none.
    """
    if not events:
        raise UsageError("there are no events to report on")
    launches = gather(events)
    engines = [launch.engine for launch in launches if launch.engine]
    return Report(
        run=launches[-1].run,
        engine=engines[-1] if engines else "unknown",
        launches=len(launches),
        accounting=split(launches),
        faults=listed(launches),
        checkpoints=_checkpoints(events),
        heartbeats=_heartbeats(events),
    )


def to_json(report: Report) -> dict[str, object]:
    """The report as version 1 of its JSON form. Seconds are floats, ``goodput`` has 4 digits."""
    return {
        "v": VERSION,
        "run": report.run,
        "engine": report.engine,
        "wall_s": report.wall_s,
        "goodput": report.goodput,
        "categories": report.categories,
        "faults": [_fault(fault) for fault in report.faults],
        "checkpoints": asdict(report.checkpoints),
        "heartbeats": [asdict(one) for one in report.heartbeats],
    }


def _fault(fault: Fault) -> dict[str, object]:
    record = asdict(fault)
    for key in ("detect_s", "recover_s"):
        record[key] = None if record[key] is None else round(record[key], 6)
    return record


def _read(run_dir: Path) -> list[Event]:
    if not run_dir.is_dir():
        raise UsageError(
            f"there is no folder {run_dir}",
            advice="Give the run folder: what --run-dir named, by default runs/RUN_ID",
        )
    folder = run_dir / "events"
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise UsageError(
            f"{run_dir} has no events: there is no file {folder / '*.jsonl'}",
            advice="Give the run folder itself, not its events or checkpoints folder",
        )
    try:
        events = ev.read(run_dir)
    except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(
            f"the events of {run_dir} cannot be read: {error}",
            where=_damaged(files),
            advice="Move that file out of the folder and run the command again",
        ) from error
    if not events:
        raise UsageError(
            f"{run_dir} has no events: its {len(files)} event files are empty",
            advice="Try again once the run has started",
        )
    return events


def _damaged(files: list[Path]) -> str:
    """The first file that cannot be read, and after how many good lines."""
    for path in files:
        good = 0
        try:
            for _ in ev.read_file(path):
                good += 1
        except (msgspec.DecodeError, UnicodeDecodeError, OSError):
            return f"{path}, line {good + 1}"
    return ""


def _checkpoints(events: list[Event]) -> Checkpoints:
    steps: list[int] = []
    sizes: list[int] = []
    save_s: list[float] = []
    stalls: dict[tuple[int | None, int | None, int], float] = {}
    seen: Counter[tuple[int | None, int | None, int | None]] = Counter()
    failed = 0
    skipped: list[int] = []
    for event in events:
        if not event.kind.startswith("checkpoint."):
            continue
        try:
            data = ev.data_of(event)
        except msgspec.ValidationError:
            continue
        if isinstance(data, ev.CheckpointCommit):
            steps += [] if event.step is None else [event.step]
            sizes.append(data.bytes)
            save_s.append(data.save_s)
        elif isinstance(data, ev.CheckpointFail):
            failed += 1
        elif isinstance(data, ev.CheckpointSkip):
            skipped.append(event.step or 0)
        elif isinstance(data, ev.CheckpointStaged):
            # The slowest rank decides; the same step may be saved again in a later launch.
            mine = (event.rank, event.round, event.step)
            seen[mine] += 1
            save = (event.round, event.step, seen[mine])
            stalls[save] = max(stalls.get(save, 0.0), data.stall_s)
    return Checkpoints(
        committed=len(sizes),
        failed=failed,
        last_step=max(steps, default=None),
        bytes=sum(sizes),
        stall_s=_spread(list(stalls.values())),
        save_s=_spread(save_s),
        skipped=len(skipped),
        every_steps_wanted=_interval(events, save_s, {*steps, *skipped}) if skipped else None,
    )


def _interval(events: list[Event], save_s: list[float], due: set[int]) -> int | None:
    """Steps in the time of a save, if more than between the steps ``due``: then one save is over
    before the next."""
    step_s = [s for e in events if e.kind == ev.StepEnd.kind if (s := _number(e, "s"))]
    if not step_s or not save_s:
        return None
    wanted = math.ceil(statistics.median(save_s) / statistics.median(step_s))
    ordered = sorted(due)
    now = min((b - a for a, b in itertools.pairwise(ordered)), default=0)
    return wanted if wanted > now else None


def _number(event: Event, name: str) -> float:
    value = event.data.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _heartbeats(events: list[Event]) -> list[Heartbeat]:
    """For each rank the one that came closest to its limit."""
    found: dict[int, Heartbeat] = {}
    for event in events:
        if event.kind != ev.RankBeat.kind or event.rank is None:
            continue
        try:
            data = ev.data_of(event)
        except msgspec.ValidationError:
            continue
        if isinstance(data, ev.RankBeat):
            beat = Heartbeat(
                rank=event.rank,
                age_s=round(data.age_s, 6),
                limit_s=round(data.limit_s, 6),
                section=data.section,
            )
            before = found.setdefault(event.rank, beat)
            if beat.age_s * before.limit_s > before.age_s * beat.limit_s:
                found[event.rank] = beat
    return [found[rank] for rank in sorted(found)]


def _spread(values: list[float]) -> Spread:
    if not values:
        return Spread(median=None, max=None)
    return Spread(median=round(statistics.median(values), 6), max=round(max(values), 6))
