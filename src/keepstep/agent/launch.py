"""``launch``: from a checked ``Launch`` to an exit code. The agent's process."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from keepstep import __version__, events
from keepstep.agent.agent import Agent
from keepstep.agent.console import Console
from keepstep.agent.environment import importable, shared_environment
from keepstep.agent.ft_command import ft_command, launcher_environment
from keepstep.agent.health_watch import checks_of, refuse_bad_start
from keepstep.agent.launch_spec import Launch
from keepstep.agent.nvrx_requirements import installed
from keepstep.agent.observe.observer import Observer
from keepstep.agent.run_folder import RunFolder
from keepstep.checkpoint import storage
from keepstep.checkpoint.lease_keeper import LeaseKeeper
from keepstep.errors import ExitCode
from keepstep.faults import triggers
from keepstep.faults.plan import FaultPlan
from keepstep.goodput.render import closing_table
from keepstep.goodput.report import build
from keepstep.health import run_all
from keepstep.policy.nvrx_limits import nvrx_limits
from keepstep.ports import Finding, HealthCheck
from keepstep.wire.messages import JobEnd


class Runner(Protocol):
    """The node's own process: starts and replaces ranks itself, or watches who does."""

    recorder: events.Recorder
    failed_later: list[int]
    """Ranks that ended with an unexpected exit code after the job was over."""

    def run(self) -> JobEnd:
        """Run the job to its end."""

    def notice(self, number: int) -> None:
        """Signal handler: the run is asked to stop."""

    def found(self, finding: Finding) -> None:
        """Record a health finding."""

    def close_files(self) -> bool:
        """Write the last events; False if storage does not take them."""


def launch(spec: Launch) -> int:
    """Run the job; returns keepstep's exit code.

    Raises:
        UsageError: the run folder or a fault cannot be used.
        FolderInUse: another job saves into the folder of checkpoints.
        CheckpointNotWritable: checkpoints cannot be written.
    """
    spec = _completed(spec)
    _check_faults(spec)
    folder = RunFolder(spec)
    console = Console()
    lease = _lease(spec, console)
    try:
        if spec.number == 0:  # one node holds it for all
            lease.begin()
        checks = checks_of(spec)
        findings = run_all(checks)
        refuse_bad_start(findings)
        if spec.number == 0:
            spec = dataclasses.replace(spec, lease=lease.claim())
        agent = _runner(spec, console, checks, lease.lost)
        agent.recorder.emit(
            events.RunBegin(
                argv=spec.argv,
                engine="nvrx" if spec.config.engine.parts.any_nvrx else "native",
                world=spec.world,
                version=__version__,
            )
        )
        for finding in findings:
            agent.found(finding)
        console.say(f"run {spec.run_id}: {spec.world} ranks, run folder {spec.run_dir}")
        with _signals_noticed(spec, agent):
            end = agent.run()
        code, reason = int(end.exit_code), end.reason
        if not code and agent.failed_later:
            code = int(ExitCode.NEGATIVE)
            reason = f"{reason}, but ranks {agent.failed_later} ended with an error afterwards"
        agent.recorder.emit(events.RunEnd(exit_code=code, reason=reason))
        written = agent.close_files()
        console.close()
        console.say(f"{reason} (exit code {code})")
        if written:
            console.tables(closing_table(build(spec.run_dir)))
        else:
            console.say("storage did not take the last events: there is no report of times")
        return code
    finally:
        lease.close()
        folder.close()


def _lease(spec: Launch, console: Console) -> LeaseKeeper:
    """Keeps other jobs out of the folder of checkpoints, and this run's earlier start."""
    return LeaseKeeper(
        Path(spec.config.checkpoint.dir),
        spec.run_id,
        relieves=True,
        say=console.say,
        environ=importable(spec.environ),
        log=spec.log_dir / "lease.log",
    )


def _runner(
    spec: Launch, console: Console, checks: list[HealthCheck], lost: Callable[[], str]
) -> Runner:
    """Who runs the job here, by the engine's launcher; ``lost`` says if the folder is lost."""
    if spec.config.engine.parts.launcher == "native":
        settings = spec.config.checkpoint
        found = storage.file_system(Path(settings.dir))
        return Agent(spec, console, checks, lost, storage.rated(found, settings.rated_mb_s))
    limits = nvrx_limits(spec.config)
    command = ft_command(
        spec,
        limits,
        python=sys.executable,
        rdzv_endpoint=spec.rdzv_endpoint,
        version=installed().nvrx,
    )
    environ = launcher_environment(spec)
    return Observer(spec, command, environ, limits, console, checks, lost=lost)


def _completed(spec: Launch) -> Launch:
    """Fill in what follows from other values."""
    config = spec.config
    root = config.checkpoint.dir or str(spec.run_dir / "checkpoints")
    checkpoint = dataclasses.replace(config.checkpoint, dir=str(Path(root).absolute()))
    run = dataclasses.replace(config.run, id=spec.run_id, dir=str(spec.run_dir))
    return dataclasses.replace(
        spec,
        config=dataclasses.replace(config, checkpoint=checkpoint, run=run),
        environ=shared_environment(spec.environ, spec.nproc),
    )


def _check_faults(spec: Launch) -> None:
    triggers.check_means(FaultPlan.parse(spec.config.faults.inject, world=spec.world).faults)


@contextmanager
def _signals_noticed(spec: Launch, agent: Runner) -> Iterator[None]:
    """The signals that mean "stop" go to the agent."""
    before = {
        name: signal.signal(signal.Signals[name], lambda number, _: agent.notice(number))
        for name in spec.notice_signals
    }
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)
