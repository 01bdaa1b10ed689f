"""From what the ranks of any system wrote down to how a fault ended. Pure.

Every system's records become ``Mark`` objects first: those of keepstep's event files, and those of
``jobs/training.py``. An attempt is one start of training on all ranks together: a round of
keepstep, a start by a launcher, an iteration of an in-process restart.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.harness import Watched
from keepstep import events
from keepstep.events import Event

Kind = Literal["resumed", "step", "fault", "found"]
DIGEST = "weights digest: "
"""What a job prints at its end, before the digest of its final weights and optimizer state."""


@dataclass(frozen=True)
class Mark:
    """At wall time ``t`` (seconds) something happened in a rank.

    ``resumed``: the rank has its state of ``step``; ``step``: it completed ``step``; ``fault``: it
    is hit in ``step``; ``found``: somebody began to act on it (no rank).
    """

    t: float
    kind: Kind
    rank: int = -1
    world: int = 0
    pid: int = 0
    attempt: str = ""
    step: int = 0


@dataclass(frozen=True)
class Outcome:
    """How one fault ended. Seconds are from the fault; None where there is nothing to tell.

    ``recovered_s``: all ranks of the next attempt that got so far completed a step; ``world``: its
    number of ranks; ``steps_lost`` counts the step that was cut off; ``kept``: every rank that was
    not hit has its process still; ``digest``: of the final weights and optimizer state;
    ``waited_s``: until the job ended or was ended; ``code``: exit code, None if it was ended;
    ``late``: it was ended for not having recovered and come to its end; ``last``: its last words.
    """

    fired: bool
    found_s: float | None
    recovered_s: float | None
    world: int | None
    steps_lost: int | None
    kept: bool | None
    attempts: int
    digest: str | None
    waited_s: float
    code: int | None
    late: bool
    last: str


def read_records(folder: Path) -> list[Mark]:
    """Marks of a job of ``jobs/training.py``; none if it never came so far."""
    path = folder / "marks.jsonl"
    if not path.exists():
        return []
    return [Mark(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def read_events(folder: Path) -> list[Mark]:
    """Marks from the event files of ``keepstep run``; none if it never came so far."""
    if not list((folder / "events").glob("*.jsonl")):
        return []
    return from_events(events.read(folder))


def from_events(seen: Iterable[Event]) -> list[Mark]:
    """Marks from keepstep's events."""
    marks: list[Mark] = []
    world = 0
    for event in sorted(seen, key=lambda event: event.t):
        data, attempt, rank = events.data_of(event), str(event.round), event.rank
        if isinstance(data, events.RoundReady):
            world = len(data.pids)
            marks += [
                Mark(event.t, "resumed", int(number), world, pid, attempt, data.resume)
                for number, pid in data.pids.items()
            ]
        elif isinstance(data, events.RestartBegin):
            marks.append(Mark(event.t, "found"))
        elif rank is not None and isinstance(data, events.StepEnd | events.FaultInjected):
            kind: Kind = "step" if isinstance(data, events.StepEnd) else "fault"
            marks.append(Mark(event.t, kind, rank, world, 0, attempt, event.step or 0))
    return marks


def from_lines(lines: Sequence[tuple[float, str]], found: str) -> list[Mark]:
    """A mark for each line of output in which a launcher tells that it acts on a failure."""
    return [Mark(t, "found") for t, line in lines if re.search(found, line)]


def digest_of(lines: Sequence[tuple[float, str]]) -> str | None:
    """The digest of the final weights, if the job came so far."""
    found = [match[1] for _, line in lines if (match := re.search(DIGEST + "([0-9a-f]{64})", line))]
    return found[-1] if found else None


def step_lengths(marks: Sequence[Mark]) -> list[float]:
    """Seconds from one completed step of rank 0 to the next, in one attempt."""
    steps = [mark for mark in marks if mark.kind == "step" and mark.rank == 0]
    pairs = itertools.pairwise(sorted(steps, key=lambda mark: mark.t))
    return [later.t - mark.t for mark, later in pairs if later.attempt == mark.attempt]


def judge(marks: Sequence[Mark], watched: Watched) -> Outcome:
    """What the marks and the output of one job say about its fault."""
    fault = next((mark for mark in marks if mark.kind == "fault"), None)
    starts: dict[str, dict[int, Mark]] = defaultdict(dict)
    first: dict[str, dict[int, float]] = defaultdict(dict)
    for mark in sorted(marks, key=lambda mark: mark.t):
        if mark.kind == "resumed":
            starts[mark.attempt][mark.rank] = mark
        elif mark.kind == "step":
            first[mark.attempt].setdefault(mark.rank, mark.t)
    after = _next_attempt(fault, starts, first)
    before = starts[fault.attempt] if fault else {}
    found = [mark.t for mark in marks if mark.kind == "found" and fault and mark.t >= fault.t]
    begin = fault.t if fault else 0.0
    pids = {mark.pid for mark in starts[after].values()} if after else set()
    return Outcome(
        fired=fault is not None,
        found_s=min(found) - begin if found else None,
        recovered_s=max(first[after].values()) - begin if after else None,
        world=len(starts[after]) if after else None,
        steps_lost=fault.step - starts[after][0].step if after and fault else None,
        kept=_kept(before, fault, pids) if after and fault else None,
        attempts=len(starts),
        digest=digest_of(watched.lines),
        waited_s=watched.ended - begin if fault else 0.0,
        code=watched.code,
        late=watched.late,
        last=_last_words(watched.lines),
    )


def _next_attempt(
    fault: Mark | None, starts: dict[str, dict[int, Mark]], first: dict[str, dict[int, float]]
) -> str | None:
    """The first attempt after the fault in which every rank completed a step."""
    if fault is None:
        return None
    complete: list[tuple[float, str]] = []
    for attempt, ranks in starts.items():
        world = max(mark.world for mark in ranks.values())
        later = attempt != fault.attempt and min(m.t for m in ranks.values()) >= fault.t
        if later and world == len(ranks) and ranks.keys() <= first[attempt].keys():
            complete.append((max(first[attempt].values()), attempt))
    return min(complete)[1] if complete else None


def _kept(before: dict[int, Mark], fault: Mark, pids: set[int]) -> bool:
    return all(mark.pid in pids for rank, mark in before.items() if rank != fault.rank)


def _last_words(lines: Sequence[tuple[float, str]]) -> str:
    """The last line that names an error, else the last line at all; at most 200 characters."""
    texts = [line.strip() for _, line in lines if line.strip()]
    errors = [text for text in texts if re.search(r"Error\b|exception|failed", text)]
    return (errors or texts or [""])[-1][:200]
