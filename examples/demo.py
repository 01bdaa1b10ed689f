"""Show what keepstep does: the main job twice, first undisturbed, then with four faults.

Ends with a table of the faults and with whether both runs have the same weights. The exit code is 0
only if all four faults were found and the weights are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keepstep import events
from keepstep.errors import KeepstepError
from keepstep.events import Event
from keepstep.goodput.faults import Fault
from keepstep.goodput.render import duration, plain_table, split_table
from keepstep.goodput.report import Report, from_events

SCRIPT = Path(__file__).with_name("train_fsdp.py")
SAVE_EVERY = 5
# A hang must be found before the ranks that wait for the hung one run into their own limit, and a
# skipped collective by that limit: it comes while no time limit for a step has been learned.
COLLECTIVE_LIMIT_S = 10
PROGRESS_LIMIT_S = 5
_ENTRY = "import sys; from keepstep.cli.main import main; sys.exit(main())"
_DIGEST = re.compile(r"weights digest: ([0-9a-f]{64})")
_FINISHED = "keepstep: every rank finished"


@dataclass(frozen=True)
class Planned:
    """One fault of the second run."""

    kind: str
    step: int
    rank: int
    what: str


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``digest`` is empty if it printed none."""

    exit_code: int
    seconds: float
    digest: str
    output: list[str]


def plan(world: int, steps: int) -> list[Planned]:
    """The four faults, on different ranks as far as there are so many, rank 0 among them."""
    return [
        Planned("desync", 2, 1, "skips a collective that the others enter"),
        Planned("exception", steps * 33 // 100, 0, "raises an exception"),
        Planned("kill", steps * 60 // 100, 2 % world, "its process gets SIGKILL"),
        Planned("hang", steps * 82 // 100, 3 % world, "sleeps for ever"),
    ]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__.split("\n")[0])
    parser.add_argument("--nproc", type=int, default=4, help="ranks, at least 2 (default 4)")
    parser.add_argument("--steps", type=int, default=40, help="at least 12 (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="of both runs")
    parser.add_argument(
        "--disturbed-seed",
        type=int,
        help="another seed for the second run: shows how different weights are reported",
    )
    parser.add_argument(
        "--engine",
        choices=("native", "nvrx"),
        default="native",
        help="whose mechanisms both runs use (nvrx: pip install 'keepstep[nvrx]')",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep both run folders in DIR")
    args = parser.parse_args(arguments)
    if args.nproc < 2:
        parser.error(f"--nproc {args.nproc}: with fewer than 2 ranks nobody survives a fault")
    if args.steps < 12:
        parser.error(f"--steps {args.steps}: the four faults need at least 12 steps")
    for name in ("undisturbed", "disturbed"):
        if args.keep and (args.keep / name).exists():
            parser.error(f"--keep {args.keep}: there is a folder {name} already")
    return args


def first_limit(engine: str) -> str:
    """The setting that ends a skipped collective: NVRx interrupts a step that takes too long, and a
    collective's own limit must be above that."""
    return "nvrx.soft_limit_s" if engine == "nvrx" else "restart.pg_timeout_s"


def command(args: argparse.Namespace, run_dir: Path, seed: int, faults: list[Planned]) -> list[str]:
    """``keepstep run`` as a user would call it."""
    script = Path(sys.executable).with_name("keepstep")
    program = [str(script)] if script.exists() else [sys.executable, "-c", _ENTRY]
    limits = [
        *("--engine", args.engine),
        *("--set", f"{first_limit(args.engine)}={COLLECTIVE_LIMIT_S}"),
        *("--set", f"heartbeat.min_limit_s={PROGRESS_LIMIT_S}"),
    ]
    injected = [f"--fault={fault.kind}@{fault.step}:{fault.rank}" for fault in faults]
    job = [str(SCRIPT), "--steps", str(args.steps), "--every-steps", str(SAVE_EVERY)]
    options = ["--nproc-per-node", str(args.nproc), "--run-dir", str(run_dir), *limits]
    return [*program, "run", *options, *injected, *job, "--seed", str(seed)]


def run(words: list[str], *, show: bool) -> Outcome:
    """Run ``words`` to the end. ``show`` passes its output on, but not the report at its end."""
    began = time.monotonic()
    output: list[str] = []
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                output.append(line.rstrip("\n"))
                if show:
                    print(f"  {output[-1]}", flush=True)
                show = show and not output[-1].startswith(_FINISHED)
        except KeyboardInterrupt:
            process.terminate()  # it takes its ranks with it
            process.wait()
            raise
    found = [match[1] for line in output if (match := _DIGEST.search(line))]
    seconds = time.monotonic() - began
    return Outcome(process.returncode, seconds, found[-1] if found else "", output)


def found_by(fault: Fault | None, planned: Planned, seen: list[Event]) -> str:
    """In a few words what gave a fault away."""
    if fault is None or fault.cause is None:
        return "not found"
    match fault.cause:
        case "exception":
            return "reported by the rank"
        case "killed":
            return f"ended by {match[0]}" if (match := re.search(r"signal \d+", fault.line)) else ""
        case "hang":
            return "learned time limit"
        case "timeout" | "unknown":
            ran_out = any(
                event.kind == events.RankFailed.kind
                and event.data.get("failure") == "timeout"
                and event.round == injected.round
                for injected in seen
                if injected.kind == events.FaultInjected.kind
                and (injected.data.get("fault"), injected.rank) == (planned.kind, planned.rank)
                for event in seen
            )
            return "collective time limit" if ran_out else "learned time limit"
    return fault.cause


def find(report: Report, planned: Planned) -> Fault | None:
    """The report's entry for a planned fault."""
    for fault in report.faults:
        if fault.injected and (fault.kind, fault.rank) == (planned.kind, planned.rank):
            return fault
    return None


def fault_table(report: Report, faults: list[Planned], seen: list[Event]) -> Table:
    """Each planned fault: who was hit, how it was found, what was done, what it cost."""
    table = plain_table("Faults", show_header=True)
    for name in ("fault", "rank\nhit", "found by", "level"):
        table.add_column(Text(name), justify="right" if name == "rank\nhit" else "left")
    for name in ("found\nafter", "next step\nafter", "steps\nlost"):
        table.add_column(Text(name), justify="right", no_wrap=True)
    table.add_column(Text("others\nkept"))
    for planned in faults:
        fault = find(report, planned)
        known = found_by(fault, planned, seen)
        style = "bold red" if known == "not found" else ""
        cells = ["-"] * 5
        if fault is not None:
            times = [
                "-" if value is None else duration(value)
                for value in (fault.detect_s, fault.recover_s)
            ]
            lost = "-" if fault.steps_lost is None else str(fault.steps_lost)
            kept = {None: "-", True: "yes", False: "no"}[fault.survivors_kept]
            cells = [fault.level or "-", *times, lost, kept]
        table.add_row(planned.kind, str(planned.rank), Text(known, style=style), *cells)
    return table


def problems(
    undisturbed: Outcome, disturbed: Outcome, report: Report, faults: list[Planned]
) -> list[str]:
    """What is not as it should be; empty if all is well."""
    told = []
    if disturbed.exit_code:
        told.append(f"the second run ended with exit code {disturbed.exit_code}, not 0")
    for planned in faults:
        fault = find(report, planned)
        if fault is None:
            told.append(f"{planned.kind} on rank {planned.rank} never fired")
        elif fault.cause is None:
            told.append(f"{planned.kind} on rank {planned.rank} was not found")
    if undisturbed.digest != disturbed.digest:
        told.append("the weights differ")
    return told


@contextlib.contextmanager
def folder(keep: Path | None) -> Iterator[Path]:
    """Where the run folders lie."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="keepstep-demo-") as name:
            yield Path(name)
    else:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep


def short(digest: str) -> str:
    return f"{digest[:12]}..." if digest else "none"


def say(text: str = "") -> None:
    print(text, flush=True)


def show_verdict(
    report: Report,
    seen: list[Event],
    faults: list[Planned],
    undisturbed: Outcome,
    disturbed: Outcome,
) -> int:
    """Print the tables; returns the exit code."""
    console = Console(highlight=False)
    console.print(fault_table(report, faults, seen))
    equal = undisturbed.digest == disturbed.digest
    say("  found after: from the fault until keepstep knew of it;")
    say("  next step after: from the fault until all ranks had completed a step again")
    say()
    verdict = Text("EQUAL", style="bold green") if equal else Text("DIFFERENT", style="bold red")
    console.print(Text.assemble(("Final weights", "bold"), "  ", verdict))
    say(f"  undisturbed {short(undisturbed.digest)}, with faults {short(disturbed.digest)}")
    say()
    console.print(split_table(report))
    say()
    wrong = problems(undisturbed, disturbed, report, faults)
    for problem in wrong:
        say(f"demo: FAILED: {problem}")
    if not wrong:
        say(
            f"demo: all {len(faults)} faults were found, and the weights are those of the "
            "undisturbed run"
        )
    return 1 if wrong else 0


def demonstrate(args: argparse.Namespace, root: Path) -> int:
    """Both runs and the verdict; returns the exit code."""
    faults = plan(args.nproc, args.steps)
    say(f"demo: {args.nproc} ranks train examples/{SCRIPT.name} for {args.steps} steps")
    say("demo: 1. undisturbed ...")
    words = command(args, root / "undisturbed", args.seed, [])
    undisturbed = run(words, show=False)
    if undisturbed.exit_code or not undisturbed.digest:
        say("\n".join(f"  {line}" for line in undisturbed.output[-40:]))
        say(f"demo: FAILED: the undisturbed run ended with exit code {undisturbed.exit_code}")
        return 1
    say(f"demo:    done in {duration(undisturbed.seconds)}; weights {short(undisturbed.digest)}")
    say("demo: 2. the same with four faults:")
    for fault in faults:
        say(f"demo:    {fault.kind}: at step {fault.step} rank {fault.rank} {fault.what}")
    first = "a step" if args.engine == "nvrx" else "a collective"
    say(
        f"demo:    limits: {first} {COLLECTIVE_LIMIT_S} s ({first_limit(args.engine)}); without "
        f"progress {PROGRESS_LIMIT_S} s\n"
        "demo:    (heartbeat.min_limit_s), or longer if the steps so far took long\n"
        f"demo:    a checkpoint each {SAVE_EVERY} steps"
    )
    seed = args.seed if args.disturbed_seed is None else args.disturbed_seed
    disturbed = run(command(args, root / "disturbed", seed, faults), show=True)
    say()
    seen = events.read(root / "disturbed")
    try:
        report = from_events(seen)
    except KeepstepError as error:
        say(f"demo: FAILED: the second run cannot be reported on: {error}")
        return 1
    code = show_verdict(report, seen, faults, undisturbed, disturbed)
    if args.keep:
        say(f"demo: look again with: keepstep report {shlex.quote(str(root / 'disturbed'))}")
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        with folder(args.keep) as root:
            return demonstrate(args, root)
    except KeyboardInterrupt:
        say("demo: stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
