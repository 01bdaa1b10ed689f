"""Seconds from a fault until every rank has completed a step again.

One run of ``examples/train_fsdp.py`` for each number of ranks and each kind of fault, with the
fault several times in it. All times come from the run's events: the fault is ``fault.injected``,
"found" is ``restart.begin``, and the end is the last rank's first ``step.end`` in the new round.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Spread
from keepstep import events
from keepstep.events import Event
from keepstep.goodput.report import from_events

EVERY = 5
FIRST = 8
APART = 5


@dataclass(frozen=True)
class Case:
    """One kind of fault on one rank."""

    kind: str
    last_rank: bool

    def rank(self, world: int) -> int:
        return world - 1 if self.last_rank else 0


CASES = (
    Case("exception", last_rank=False),
    Case("kill", last_rank=False),
    Case("kill", last_rank=True),
    Case("hang", last_rank=True),
)


@dataclass(frozen=True)
class Result:
    """Seconds, over the repetitions. ``limit`` is the time without progress that was allowed."""

    fault: str
    rank: int
    world: int
    times: int
    step: Spread
    found: Spread
    recovered: Spread
    limit: float | None

    def row(self) -> list[str]:
        beyond = self.recovered.median - self.step.median - (self.limit or 0.0)
        return [
            self.fault,
            str(self.rank),
            str(self.world),
            f"{self.step.median:.3f}",
            "-" if self.limit is None else f"{self.limit:.1f}",
            self.found.text(),
            self.recovered.text(),
            f"{beyond:.2f}",
        ]

    def plain(self) -> dict[str, object]:
        return {
            "fault": self.fault,
            "rank": self.rank,
            "world": self.world,
            "times": self.times,
            "limit_s": self.limit,
            "step_s": self.step.rounded(),
            "found_s": self.found.rounded(),
            "recovered_s": self.recovered.rounded(),
        }


def measure(case: Case, world: int, times: int, limit_s: float, folder: Path) -> Result:
    """One run with ``times`` faults of the kind.

    Raises:
        SystemExit: the run failed, or a fault was not found.
    """
    last = FIRST + APART * (times - 1)
    at = range(FIRST, last + 1, APART)
    faults = [f"--fault={case.kind}@{step}:{case.rank(world)}" for step in at]
    sets = ["--set", f"heartbeat.min_limit_s={limit_s}"]
    words = [*sets, *faults, str(harness.TRAIN), "--steps", str(last + 4)]
    harness.run(harness.keepstep_run(folder, world, *words, "--every-steps", str(EVERY)))
    seen = events.read(folder)
    listed = [fault for fault in from_events(seen).faults if fault.injected]
    found = [fault.detect_s for fault in listed if fault.detect_s is not None]
    recovered = [fault.recover_s for fault in listed if fault.recover_s is not None]
    if not len(found) == len(recovered) == times:
        raise SystemExit(f"{case.kind}: {len(recovered)} of {times} faults were recovered from")
    return Result(
        fault=case.kind,
        rank=case.rank(world),
        world=world,
        times=times,
        step=Spread.of(step_times(seen)),
        found=Spread.of(found),
        recovered=Spread.of(recovered),
        limit=hang_limit(seen),
    )


def step_times(seen: list[Event]) -> list[float]:
    """Lengths of rank 0's steps, without the first of each round, which is longer."""
    lengths: list[float] = []
    rounds: set[int | None] = set()
    for event in seen:
        if event.kind == events.StepEnd.kind and event.rank == 0:
            data = events.data_of(event)
            if event.round in rounds and isinstance(data, events.StepEnd):
                lengths.append(data.s)
            rounds.add(event.round)
    return lengths


def hang_limit(seen: list[Event]) -> float | None:
    """The highest limit with which a hang was found."""
    data = [events.data_of(event) for event in seen if event.kind == events.RankHung.kind]
    return max((one.limit_s for one in data if isinstance(one, events.RankHung)), default=None)


def parse_arguments() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--times", type=int, default=7, help="faults in a run")
    parser.add_argument("--limit-s", type=float, default=3.0, help="heartbeat.min_limit_s")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    harness.wait_for_quiet(args.quiet_s)
    about, results = harness.machine(), []
    with tempfile.TemporaryDirectory(prefix="keepstep-recovery-") as name:
        for world in args.worlds:
            for place, case in enumerate(CASES):
                harness.note(f"{case.kind} on rank {case.rank(world)}, {world} ranks ...")
                folder = Path(name) / f"{world}-{place}"
                results.append(measure(case, world, args.times, args.limit_s, folder))
    if args.json:
        plain = [result.plain() for result in results]
        harness.show_json("recovery", about, plain, min_limit_s=args.limit_s)
        return
    columns = ("fault", "rank", "of", "step", "limit", "found", "next step", "beyond")
    rows = [result.row() for result in results]
    title = f"Recovery: seconds, median of {args.times} (lowest-highest)"
    harness.show(title, columns, rows, about)
    print("found, next step: after the fault; next step: completed by all ranks")
    print("limit: time without progress until a rank hangs; beyond: without limit and step")


if __name__ == "__main__":
    main()
