"""Many in-process restarts in one process: what it holds, and the seconds a restart takes."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Spread
from keepstep import events
from keepstep.goodput.report import from_events

LIMITS = (
    *("--set", "restart.max_without_progress=1000000"),
    # A rank whose send gloo has forgotten comes free by the time limit of its collective.
    *("--set", "restart.pg_timeout_s=10", "--set", "restart.abort_limit_s=30"),
)
JOB = harness.ROOT / "tests" / "training" / "restarts_job.py"


def parse_arguments() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--restarts", type=int, default=200)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    harness.wait_for_quiet(args.quiet_s)
    about = harness.machine()
    with tempfile.TemporaryDirectory(prefix="keepstep-restarts-") as name:
        folder = Path(name) / "run"
        words = harness.keepstep_run(folder, args.world, *LIMITS, str(JOB), str(args.restarts))
        harness.note(f"{args.restarts} restarts of {args.world} ranks ...")
        output = harness.run(words)
        seen = events.read(folder)
    lines = [line for line in output.splitlines() if "measured [" in line]
    attempts: list[dict[str, int]] = json.loads(lines[-1].partition("measured ")[2])
    faults = from_events(seen).faults
    seconds = Spread.of([fault.recover_s for fault in faults if fault.recover_s is not None])
    every = max(1, args.restarts // 10)
    shown = [{"restarts": at, **attempts[at]} for at in range(0, args.restarts + 1, every)]
    if args.json:
        results = {"attempts": shown, "restart_s": seconds.rounded(), "faults": len(faults)}
        harness.show_json("restarts", about, results, world=args.world, restarts=args.restarts)
        return
    rows = [
        [
            str(one["restarts"]),
            str(one["threads"]),
            str(one["descriptors"]),
            f"{one['rss_bytes'] / 2**20:.1f}",
            str(one["objects"]),
            str(one["alive"]),
        ]
        for one in shown
    ]
    columns = ("restarts", "threads", "descriptors", "resident MiB", "objects", "not freed")
    harness.show("Rank 0 at the start of an attempt", columns, rows, about)
    print(f"seconds from the exception to the next step of all ranks: {seconds.text(3)}")


if __name__ == "__main__":
    main()
