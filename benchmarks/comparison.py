"""Recovery of torchrun, NVRx and keepstep from the same faults in the same training, in one run.

Each run has one fault. Systems take turns, so that all see the same machine. A run that has not
ended by a limit after its fault is ended; that it did not recover is its result.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness, outcomes, page
from benchmarks.harness import Spread
from benchmarks.outcomes import Outcome
from benchmarks.page import Cell
from benchmarks.recovery import CASES, EVERY, FIRST, Case
from benchmarks.systems import BY_NAME, DEFAULT, SYSTEMS, Job, System

STEPS = FIRST + 4
"""As a run of the benchmark of recovery with one fault."""
FAULTS = dict(zip(("exception", "kill-first", "kill-last", "hang"), CASES, strict=True))
TITLES = {
    "exception": "Exception on rank 0",
    "kill-first": "SIGKILL of rank 0",
    "kill-last": "SIGKILL of the last rank",
    "hang": "The last rank hangs",
}
Key = tuple[str, str]


class Comparison:
    """All runs of one call of the benchmark: ``cells`` by fault and system.

    Args:
        args: As parsed.
        systems: In the order of the tables.
        folder: Gets a folder for each run.
        scratch: Where jobs leave what they do not clean up, as sockets; its path is short.
    """

    def __init__(
        self, args: argparse.Namespace, systems: Sequence[System], folder: Path, scratch: Path
    ) -> None:
        self.args, self.systems, self.folder, self.scratch = args, systems, folder, scratch
        self.cells: dict[Key, list[Outcome]] = defaultdict(list)
        self.expected: str | None = None
        self.steps: dict[str, list[float]] = {}
        self._runs = 0

    def measure(self) -> None:
        """One undisturbed run of each system, then all faults in turn.

        Raises:
            SystemExit: without any fault the systems end with different weights.
        """
        digests: set[str | None] = set()
        for system in self.systems:
            harness.note(f"undisturbed: {system.title} ...")
            outcome, self.steps[system.name] = self._one(system, None)
            if outcome.digest is None:
                harness.note(f"    it did not come to its end: {outcome.last}")
            digests |= {outcome.digest} - {None}
        if len(digests) > 1:
            raise SystemExit(f"the systems did not do the same: their weights are {digests}")
        self.expected = next(iter(digests), None)
        for turn in range(self.args.repeat):
            for fault in self.args.faults:
                for system in self.systems:
                    if not self._is_hopeless(fault, system):
                        self._turn(turn, fault, system)

    def _is_hopeless(self, fault: str, system: System) -> bool:
        """Whether it has run into the time limit with this fault, and would only wait again."""
        late = [one for one in self.cells[fault, system.name] if one.late]
        return bool(late) and not self.args.patient

    def _turn(self, turn: int, fault: str, system: System) -> None:
        outcome, _ = self._one(system, FAULTS[fault])
        self.cells[fault, system.name].append(outcome)
        got = self.cell(fault, system, [outcome]).row()
        text = ", ".join(f"{name} {value}" for name, value in zip(page.COLUMNS, got, strict=True))
        harness.note(f"{turn + 1} of {self.args.repeat}, {fault}: {text}")
        if outcome.recovered_s is None:
            harness.note(f"    {outcome.last}")

    def _one(self, system: System, case: Case | None) -> tuple[Outcome, list[float]]:
        """Run it once; also the seconds of its steps."""
        self._runs += 1
        name = f"{self._runs:03}-{system.name}-{case.kind if case else 'undisturbed'}"
        folder = self.folder / name
        folder.mkdir()
        words = system.command(self.job(case), folder)
        watched = harness.watch(
            words,
            fired=folder / system.fired,
            until=outcomes.DIGEST,
            limit_s=self.args.limit_s,
            environ={"TMPDIR": str(self.scratch)},
        )
        (folder / "output.txt").write_text("\n".join(line for _, line in watched.lines), "utf-8")
        marks = system.marks(folder, watched)
        outcome = outcomes.judge(marks, watched)
        return outcome, outcomes.step_lengths(marks)

    def job(self, case: Case | None) -> Job:
        """What is trained, with the fault of ``case``."""
        world = self.args.ranks
        return Job(
            world=world,
            steps=STEPS,
            every=EVERY,
            fault=f"{case.kind}@{FIRST}:{case.rank(world)}" if case else "",
            limit_s=self.args.hang_limit_s,
            group_timeout_s=self.args.group_timeout_s,
        )

    def cell(self, fault: str, system: System, runs: Sequence[Outcome]) -> Cell:
        """``runs`` of ``system`` with ``fault``, for a table."""
        return Cell(
            title=system.title,
            world=self.args.ranks,
            limit_s=self.args.limit_s,
            expected=self.expected,
            outcomes=runs,
        )

    def tables(self) -> dict[str, list[Cell]]:
        """For each fault, by its title, a cell of each system."""
        return {
            TITLES[fault]: [
                self.cell(fault, system, self.cells[fault, system.name]) for system in self.systems
            ]
            for fault in self.args.faults
        }

    def settings(self) -> list[list[str]]:
        """For each system what is set, and its steps when nothing disturbs."""
        return [
            [
                system.title,
                system.about(self.job(None)),
                f"{Spread.of(steps).median:.3f}" if (steps := self.steps[system.name]) else "-",
            ]
            for system in self.systems
        ]

    def plain(self) -> list[dict[str, object]]:
        """Every run, for JSON."""
        return [
            {
                "fault": fault,
                "system": name,
                "expected_digest": self.expected,
                "runs": [dataclasses.asdict(one) for one in runs],
            }
            for (fault, name), runs in self.cells.items()
        ]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--repeat", type=int, default=3, metavar="N", help="runs of each system with each fault")
    add("--systems", nargs="+", choices=BY_NAME, default=list(DEFAULT), metavar="NAME")
    add("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME")
    add("--limit-s", type=float, default=30.0, help="seconds from the fault until a job ends")
    add("--hang-limit-s", type=float, default=3.0, help="keepstep's heartbeat.min_limit_s")
    add("--group-timeout-s", type=float, default=10.0, help="gloo's time-out in other systems")
    add("--patient", action="store_true", help="repeat also what ran into the limit once")
    add("--write", type=Path, metavar="PAGE", help="put the tables into this Markdown page")
    add("--json", type=Path, metavar="FILE", help="write every run to this file")
    add("--keep", type=Path, metavar="FOLDER", help="new folder for all output and records")
    add("--quiet-s", type=float, default=0.0, help="wait at most so long for a quiet machine")
    return parser.parse_args(words)


def shown(words: Sequence[str]) -> str:
    """The command as it stands in the page: all but where copies of the results go."""
    kept: list[str] = []
    skip = False
    for word in words:
        copies = word.partition("=")[0] in ("--json", "--keep")
        if not (skip or copies):
            kept.append(word)
        skip = copies and "=" not in word
    return shlex.join(["python", "-m", "benchmarks.comparison", *kept])


def main() -> None:
    args = parse_arguments()
    systems = [system for system in SYSTEMS if system.name in args.systems]
    for system in systems:
        if system.missing:
            harness.note(f"left out: {system.title}: {system.package} is not installed")
    systems = [system for system in systems if not system.missing]
    harness.wait_for_quiet(args.quiet_s)
    about = harness.machine()
    if args.keep:
        args.keep.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="keepstep-comparison-") as name:
        done = Comparison(args, systems, args.keep or Path(name), Path(name))
        done.measure()
    command = shown(sys.argv[1:])
    generated = page.tables(about, command, done.settings(), done.tables())
    if args.json:
        document = {"v": 1, "benchmark": "comparison", "machine": about, "command": command}
        document |= {"settings": done.settings(), "results": done.plain()}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if args.write:
        page.rewrite(args.write, lambda text: page.replaced(text, generated))
    else:
        print(generated)


if __name__ == "__main__":
    main()
