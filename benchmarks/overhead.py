"""What running under keepstep costs a step, against plain torchrun.

The same loop (``overhead_job.py``) in three ways, in turn and several times: under torchrun, under
``keepstep run`` without saving, and with a checkpoint every ten steps. Its own timer measures from
one turn of the loop to the next, the same in each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Spread

JOB = Path(__file__).with_name("overhead_job.py")
EVERY = 10
WAYS = {
    "torchrun": "torchrun",
    "keepstep": "keepstep run",
    "saving": f"same, saving each {EVERY}",
}


def command(way: str, args: argparse.Namespace, folder: Path) -> list[str]:
    """The job in one of the three ways."""
    job = [str(JOB), "--preset", args.preset, "--steps", str(args.steps)]
    if way == "torchrun":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*launcher, f"--nproc-per-node={args.world}", *job, "--plain"]
    every = EVERY if way == "saving" else 0
    return harness.keepstep_run(
        folder, args.world, "--set", f"checkpoint.every_steps={every}", *job
    )


def timed(output: str) -> tuple[list[float], float]:
    """Seconds of each step, and the last loss."""
    lines = [line for line in output.splitlines() if "timed {" in line]
    document = json.loads(lines[-1].partition("timed ")[2])
    return document["steps"], document["loss"]


def parse_arguments() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--times", type=int, default=5, help="runs of each way")
    parser.add_argument("--steps", type=int, default=100, help="timed steps in a run")
    parser.add_argument("--preset", default="tiny", help="size of the model, as in the example")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    harness.wait_for_quiet(args.quiet_s)
    about = harness.machine()
    means: dict[str, list[float]] = {way: [] for way in WAYS}
    medians: dict[str, list[float]] = {way: [] for way in WAYS}
    losses: set[float] = set()
    with tempfile.TemporaryDirectory(prefix="keepstep-overhead-") as name:
        for turn in range(args.times):
            for way in WAYS:
                harness.note(f"{turn + 1} of {args.times}: {WAYS[way]} ...")
                steps, loss = timed(harness.run(command(way, args, Path(name) / f"{way}-{turn}")))
                means[way].append(statistics.fmean(steps))
                medians[way].append(statistics.median(steps))
                losses.add(loss)
    if len(losses) > 1:
        raise SystemExit(f"the runs did not do the same: their last losses are {sorted(losses)}")
    report(args, about, means, medians)


def report(
    args: argparse.Namespace,
    about: dict[str, object],
    means: dict[str, list[float]],
    medians: dict[str, list[float]],
) -> None:
    """Print what was measured. Ratios are of neighbours, which saw the same machine."""
    rows, plain = [], []
    for way, title in WAYS.items():
        mean, median = Spread.of(means[way]), Spread.of(medians[way])
        pairs = zip(means[way], means["torchrun"], strict=True)
        ratio = Spread.of([mine / base for mine, base in pairs])
        typical = median.median / Spread.of(medians["torchrun"]).median
        cells = [title, f"{1e3 * median.median:.2f}", f"{typical:.3f}"]
        milliseconds = Spread(1e3 * mean.median, 1e3 * mean.low, 1e3 * mean.high)
        rows.append([*cells, milliseconds.text(1), ratio.text(3)])
        plain.append(
            {
                "way": way,
                "median_step_s": median.rounded(),
                "mean_step_s": mean.rounded(),
                "mean_ratio": ratio.rounded(),
                "median_ratio": round(typical, 4),
            }
        )
    if args.json:
        harness.show_json("overhead", about, plain, world=args.world, steps=args.steps)
        return
    columns = ("way", "median step", "ratio", "mean step", "ratio")
    title = f"Step time in ms, {args.world} ranks, {args.times} runs of {args.steps} steps each"
    harness.show(title, columns, rows, about)
    print(
        "mean step and its ratio: median of the runs (lowest-highest); only the mean has the saves"
    )


if __name__ == "__main__":
    main()
