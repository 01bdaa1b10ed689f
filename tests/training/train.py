"""The main job under ``keepstep run``, with faults, and what came of it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from keepstep.events import Event
from keepstep.goodput.report import build, to_json
from tests.process.job import Job

SCRIPT = Path(__file__).parents[2] / "examples" / "train_fsdp.py"
LIMIT_S = 240.0
PATIENT = ("--set", "restart.pg_timeout_s=10", "--set", "restart.abort_limit_s=30")
"""Very rarely gloo forgets a send when a round is aborted (see rank/groups.py). Then the rank is
free after the time limit of its collective; by default it would be replaced before that."""
STEPS = 30
EVERY = 5


@dataclass(frozen=True)
class Outcome:
    """One finished run."""

    digest: str
    faults: list[dict[str, object]]
    committed: list[int]
    events: list[Event]
    err: str

    def seen(self, *keys: str) -> list[tuple[object, ...]]:
        """The report's faults, reduced to some of their values."""
        return [tuple(fault[key] for key in keys) for fault in self.faults]


def train(
    folder: Path,
    world: int,
    faults: Sequence[str] = (),
    *,
    flags: Sequence[str] = (),
    steps: int = STEPS,
    seed: int = 0,
    during: Callable[[Job], None] = lambda job: None,
) -> Outcome:
    """Run the main job to its end.

    Args:
        folder: For everything. world: Ranks. faults: As on the command line.
        during: Called while it runs.
    """
    options = [*(part for fault in faults for part in ("--fault", fault)), *PATIENT]
    options += ["--set", "checkpoint.when_busy=wait", *flags]  # no save that is due is left out
    arguments = [str(SCRIPT), "--steps", str(steps), "--every-steps", str(EVERY)]
    arguments += ["--eval-every", "10", "--seed", str(seed)]
    with Job(folder, flags=options, arguments=arguments, nproc=world, preload=True) as job:
        during(job)
        code = job.wait(LIMIT_S)
        assert code == 0, job.ending
    found = re.findall(r"weights digest: ([0-9a-f]{64})", job.out)
    assert found, "the run printed no digest"
    report = to_json(build(job.run_dir))
    listed = report["faults"]
    assert isinstance(listed, list)
    return Outcome(
        digest=found[-1],
        faults=listed,
        committed=[event.step or 0 for event in job.events("checkpoint.commit")],
        events=job.events(),
        err=job.err,
    )


@cache
def undisturbed_run(world: int) -> Outcome:
    """A native run of ``world`` ranks in which nothing happens; made once."""
    with tempfile.TemporaryDirectory() as name:
        return train(Path(name), world)
