"""The systems that are compared: how each is started, what is set, and where its marks are."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness, outcomes
from benchmarks.harness import Watched
from benchmarks.outcomes import Mark

JOBS = Path(__file__).parent / "jobs"
NVRX = "nvidia-resiliency-ext"
RESTARTS = 3


@dataclass(frozen=True)
class Job:
    """What all systems train, and the limits that they get. ``fault`` is KIND@STEP:RANK or empty.

    ``limit_s``: keepstep's ``heartbeat.min_limit_s``; ``group_timeout_s``: gloo's, of the others.
    """

    world: int
    steps: int
    every: int
    fault: str
    limit_s: float
    group_timeout_s: float


@dataclass(frozen=True)
class System:
    """One system. ``about`` is what is set, for the page; ``fired`` is there from the fault on."""

    name: str
    title: str
    about: Callable[[Job], str]
    command: Callable[[Job, Path], list[str]]
    marks: Callable[[Path, Watched], list[Mark]]
    fired: str
    package: str = ""

    @property
    def missing(self) -> bool:
        """Whether its package is not installed."""
        return bool(self.package) and harness.version(self.package) == harness.NOT_INSTALLED


# --- keepstep -------------------------------------------------------------------------------------


def _keepstep(engine: str) -> Callable[[Job, Path], list[str]]:
    def command(job: Job, folder: Path) -> list[str]:
        words = ["--engine", engine, "--set", f"heartbeat.min_limit_s={job.limit_s:g}"]
        words += [f"--fault={job.fault}"] if job.fault else []
        script = [str(harness.TRAIN), "--steps", str(job.steps), "--every-steps", str(job.every)]
        return harness.keepstep_run(folder, job.world, *words, *script)

    return command


def _keepstep_marks(folder: Path, watched: Watched) -> list[Mark]:
    return outcomes.read_events(folder)


# --- others ---------------------------------------------------------------------------------------


def _script(name: str, job: Job, folder: Path) -> list[str]:
    words = [str(JOBS / name), "--folder", str(folder), "--steps", str(job.steps)]
    words += ["--every-steps", str(job.every), "--group-timeout-s", f"{job.group_timeout_s:g}"]
    return [*words, f"--fault={job.fault}"] if job.fault else words


def _torchrun(job: Job, folder: Path) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
    launcher += [f"--nproc-per-node={job.world}", f"--max-restarts={RESTARTS}"]
    return [*launcher, *_script("torchrun_job.py", job, folder)]


def _ft_launcher(*flags: str) -> Callable[[Job, Path], list[str]]:
    def command(job: Job, folder: Path) -> list[str]:
        module = "nvidia_resiliency_ext.fault_tolerance.launcher"
        launcher = [sys.executable, "-m", module, "--nnodes=1", f"--nproc-per-node={job.world}"]
        launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
        launcher += [f"--max-restarts={RESTARTS}", "--ft-restart-policy=min-healthy"]
        launcher += ["--ft-enable-nic-monitor=False", *flags]
        return [*launcher, *_script("nvrx_job.py", job, folder)]

    return command


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _others_marks(found: str) -> Callable[[Path, Watched], list[Mark]]:
    def marks(folder: Path, watched: Watched) -> list[Mark]:
        return [*outcomes.read_records(folder), *outcomes.from_lines(watched.lines, found)]

    return marks


_NVRX_FOUND = r"current run failed|FT timeout elapsed|fn_ex|term_ex|failed \(exitcode"

SYSTEMS = (
    System(
        "torchrun",
        "torchrun",
        lambda job: (
            f"`torchrun --standalone --max-restarts={RESTARTS}`; gloo's time-out "
            f"{job.group_timeout_s:g} s (default: 30 min), nothing else sees a hang"
        ),
        _torchrun,
        _others_marks(r"failed \(exitcode"),
        "fault.fired",
    ),
    System(
        "nvrx-default",
        "NVRx, default",
        lambda job: (
            "`ft_launcher` and `inprocess.Wrapper` with their defaults, "
            f"`--ft-restart-policy=min-healthy --max-restarts={RESTARTS} "
            f"--ft-enable-nic-monitor=False`; gloo's time-out {job.group_timeout_s:g} s, "
            "as in NVRx's examples"
        ),
        _ft_launcher(),
        _others_marks(_NVRX_FOUND),
        "fault.fired",
        NVRX,
    ),
    System(
        "nvrx-example",
        "NVRx, as in its example",
        lambda job: (
            "the same with what the launch script of NVRx's example sets: "
            "`--monitor-interval=5 --ft-rank-heartbeat-timeout=12 "
            "--ft-initial-rank-heartbeat-timeout=12`"
        ),
        _ft_launcher(
            "--monitor-interval=5",
            "--ft-rank-heartbeat-timeout=12",
            "--ft-initial-rank-heartbeat-timeout=12",
        ),
        _others_marks(_NVRX_FOUND),
        "fault.fired",
        NVRX,
    ),
    System(
        "nvrx-tuned",
        "NVRx, tuned by keepstep",
        lambda job: f"`keepstep run --engine nvrx`; `heartbeat.min_limit_s` {job.limit_s:g}",
        _keepstep("nvrx"),
        _keepstep_marks,
        "faults/0.fired",
        NVRX,
    ),
    System(
        "native",
        "keepstep, native",
        lambda job: f"`keepstep run`; `heartbeat.min_limit_s` {job.limit_s:g}",
        _keepstep("native"),
        _keepstep_marks,
        "faults/0.fired",
    ),
)
BY_NAME = {system.name: system for system in SYSTEMS}
DEFAULT = ("torchrun", "nvrx-default", "nvrx-tuned", "native")
"""What is measured if nothing else is asked for: these fit into eight minutes."""
