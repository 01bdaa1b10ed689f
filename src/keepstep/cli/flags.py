"""Every flag of ``keepstep run``: torchrun's, each honoured or refused with a reason, and our own.

Pure. A flag of torchrun's that is not on the command line may come from ``PET_<NAME>``, as with
torchrun itself. Names are kept with dashes; the command line takes underscores too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.errors import UsageError

PROCESSES = "Processes"
NODES = "Addresses and nodes"
RESTARTS = "Faults and restarts"
TARGET = "What to run"
OUTPUT = "Output"
SETTINGS = "Settings"
DRY_RUN = "dry-run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag. ``name`` has no leading dashes."""

    name: str
    help: str
    panel: str
    short: str = ""
    metavar: str = ""
    switch: bool = False
    """Takes no value."""
    repeat: bool = False
    """May be given several times; the values add up."""
    pet: bool = True
    """``PET_<NAME>`` is its value where the command line has none."""
    refused: str = ""
    """Why it cannot be honoured; empty: it is."""
    instead: str = ""
    """What to use instead of a refused flag."""
    harmless: tuple[str, ...] = ()
    """Values of a refused flag that ask for nothing: torchrun's own default."""

    @property
    def parameter(self) -> str:
        """The name as a Python identifier."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The variable torchrun reads for it."""
        return f"PET_{self.parameter.upper()}"


def _refused(name: str, why: str, instead: str, **more: bool | tuple[str, ...]) -> Flag:
    return Flag(
        name=name,
        help=f"Refused: {why}.",
        panel=OUTPUT,
        refused=why,
        instead=instead,
        **more,  # type: ignore[arg-type]
    )


FLAGS: tuple[Flag, ...] = (
    Flag(
        name="nproc-per-node",
        metavar="N|cpu|gpu|auto",
        panel=PROCESSES,
        help="Ranks on this node: a number, one a CPU, one a GPU, or auto: GPUs if there are any, "
        "else CPUs. Default 1. With more than one, OMP_NUM_THREADS is 1 unless it is set.",
    ),
    Flag(
        name="start-method",
        metavar="fork|spawn",
        panel=PROCESSES,
        help="fork ranks from a process that has imported torch (milliseconds; the default), or "
        "spawn a fresh interpreter for each, as NVRx's launcher always does.",
    ),
    Flag(name="role", metavar="NAME", panel=PROCESSES, help="ROLE_NAME of the ranks."),
    Flag(
        name="module",
        short="m",
        switch=True,
        panel=TARGET,
        help="SCRIPT is a module's name, as with python -m.",
    ),
    Flag(
        name="no-python",
        switch=True,
        panel=TARGET,
        help="SCRIPT is a program, started without Python.",
    ),
    Flag(
        name="run-path",
        switch=True,
        panel=TARGET,
        help="SCRIPT is an absolute path, run by runpy.run_path (a script always is, here).",
    ),
    Flag(
        name="engine",
        metavar="NAME",
        panel=SETTINGS,
        pet=False,
        help="Who supplies the mechanisms: native, or nvrx for NVRx's (needs the extra of that "
        "name). Settings engine.checkpoint, engine.restart and engine.launcher choose one alone.",
    ),
    Flag(
        name=DRY_RUN,
        panel=SETTINGS,
        switch=True,
        pet=False,
        help="Check everything, print the command and the environment that are added, and start "
        "nothing.",
    ),
    Flag(
        name="config",
        metavar="FILE",
        panel=SETTINGS,
        pet=False,
        help="A TOML file with settings. No file is read unless it is named here.",
    ),
    Flag(
        name="set",
        metavar="SECTION.KEY=VALUE",
        panel=SETTINGS,
        repeat=True,
        pet=False,
        help="One setting; may be repeated. Stronger than the file and than the environment "
        "(KEEPSTEP_SECTION__KEY), weaker than a flag.",
    ),
    Flag(
        name="run-dir",
        metavar="DIR",
        panel=SETTINGS,
        pet=False,
        help="Folder for events, logs and checkpoints; the same folder again continues its run. "
        "Default ./runs/<run id>.",
    ),
    Flag(
        name="max-restarts",
        metavar="N",
        panel=RESTARTS,
        help="Restarts allowed in all; -1, the default: as many as make progress.",
    ),
    Flag(
        name="monitor-interval",
        metavar="SECONDS",
        panel=RESTARTS,
        help="How often ranks show that they live (heartbeat.interval_s). An exit is seen at once "
        "in any case.",
    ),
    Flag(
        name="shutdown-timeout",
        metavar="SECONDS",
        panel=RESTARTS,
        help="Time that ranks have to commit a checkpoint after a signal (run.grace_s).",
    ),
    Flag(
        name="signals-to-handle",
        metavar="NAMES",
        panel=RESTARTS,
        help="Signals that stop the run with a checkpoint, comma-separated. Default "
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT.",
    ),
    Flag(
        name="on-hang",
        metavar="restart|report",
        panel=RESTARTS,
        pet=False,
        help="What to do with a rank that makes no progress: end and replace it, or only report.",
    ),
    Flag(
        name="fault",
        metavar="KIND@STEP:RANK",
        panel=RESTARTS,
        repeat=True,
        pet=False,
        help="A fault to inject, once in the run; may be repeated. KEEPSTEP_FAULTS adds more, "
        "comma-separated.",
    ),
    Flag(
        name="log-dir",
        metavar="DIR",
        panel=OUTPUT,
        help="Folder for the ranks' logs. Default: logs in the run folder.",
    ),
    Flag(
        name="redirects",
        short="r",
        metavar="N|RANK:N,...",
        panel=OUTPUT,
        help="Output that goes to the logs only: 1 stdout, 2 stderr, 3 both, 0 none; for all "
        "ranks, or by local rank.",
    ),
    Flag(
        name="tee",
        short="t",
        metavar="N|RANK:N,...",
        panel=OUTPUT,
        help="Output that goes to the logs and to the terminal; numbers as for --redirects.",
    ),
    Flag(
        name="local-ranks-filter",
        metavar="RANKS",
        panel=OUTPUT,
        help="Show only these local ranks' output on the terminal, as in 0,1.",
    ),
    Flag(
        name="nnodes",
        metavar="N|N:N",
        panel=NODES,
        help="Number of nodes. Several only with NVRx's launcher; with keepstep's own they come "
        "with a later version.",
    ),
    Flag(
        name="node-rank",
        metavar="N",
        panel=NODES,
        help="This node's number, from 0. With several nodes in a Kubernetes Job, "
        "JOB_COMPLETION_INDEX stands in for it.",
    ),
    Flag(
        name="rdzv-backend",
        metavar="static|c10d",
        panel=NODES,
        help="Accepted as with torchrun; on one node both mean the same, since ranks meet through "
        "keepstep's own agent. NVRx's launcher uses c10d.",
    ),
    Flag(
        name="rdzv-endpoint",
        metavar="HOST[:PORT]",
        panel=NODES,
        help="MASTER_ADDR and MASTER_PORT of the ranks; must be this machine. With several nodes "
        "where their launchers meet, the same on each; default port 29400.",
    ),
    Flag(name="rdzv-id", metavar="ID", panel=NODES, help="Run id. Default: made of the time."),
    Flag(
        name="rdzv-conf",
        metavar="KEY=VALUE,...",
        panel=NODES,
        help="timeout or join_timeout in seconds (restart.join_limit_s), rank=0, is_host=true "
        "(with several nodes false too); other keys are refused.",
    ),
    Flag(
        name="standalone",
        switch=True,
        panel=NODES,
        help="One node and a free port, which is the default here.",
    ),
    Flag(
        name="master-addr",
        metavar="HOST",
        panel=NODES,
        help="MASTER_ADDR of the ranks; must be this machine. Default 127.0.0.1.",
    ),
    Flag(
        name="master-port",
        metavar="PORT",
        panel=NODES,
        help="MASTER_PORT of the ranks. Default 0: a free one for each round.",
    ),
    Flag(
        name="local-addr",
        metavar="HOST",
        panel=NODES,
        help="This machine's address, used as MASTER_ADDR where none is given; with several "
        "nodes the one that others reach it at.",
    ),
    _refused(
        "event-log-handler",
        "keepstep writes its own events and has no handlers of torch's",
        "Read events/ in the run folder, or use keepstep report",
        harmless=("null",),
    ),
    _refused(
        "duplicate-stdout-filters",
        "no filtered copies of the output are written",
        "Filter the files in logs/ in the run folder",
    ),
    _refused(
        "duplicate-stderr-filters",
        "no filtered copies of the output are written",
        "Filter the files in logs/ in the run folder",
    ),
    _refused(
        "logs-specs",
        "keepstep writes its own logs and loads no class for them",
        "Use --log-dir, --tee and --redirects",
        pet=False,
    ),
    _refused(
        "numa-binding",
        "ranks are not bound to CPUs yet",
        "Bind in the script with os.sched_setaffinity, by LOCAL_RANK",
        pet=False,
    ),
    _refused(
        "virtual-local-rank",
        "LOCAL_RANK is always the rank's number on its node",
        "Choose the device in the script with torch.cuda.set_device(LOCAL_RANK)",
        switch=True,
    ),
)
BY_NAME: Mapping[str, Flag] = {flag.name: flag for flag in FLAGS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """One flag's value and where it stood: ``--tee`` or ``PET_TEE``."""

    value: str
    source: str
    typed: bool
    """On the command line, not from the environment."""


def collect(
    options: Mapping[str, object], environ: Mapping[str, str], problems: list[UsageError]
) -> dict[str, Given]:
    """The flags that somebody gave, by name; switches that are on have the value ``"1"``.

    Repeatable flags are not among them. An empty variable counts as not given.

    Args:
        options: What stood on the command line, by name: a text, ``True``, or ``None``.
        environ: The environment, for ``PET_*``.
        problems: Gets one error for each flag that is refused.
    """
    given: dict[str, Given] = {}
    for flag in FLAGS:
        if flag.repeat:
            continue
        try:
            found = _find(flag, options, environ)
        except UsageError as error:
            problems.append(error)
            continue
        if found is None:
            continue
        if not flag.refused:
            given[flag.name] = found
        elif found.value not in flag.harmless:
            problems.append(
                UsageError(
                    f"{found.source} cannot be honoured: {flag.refused}",
                    done="Nothing was started",
                    advice=flag.instead,
                )
            )
    return given


def _find(flag: Flag, options: Mapping[str, object], environ: Mapping[str, str]) -> Given | None:
    option = options.get(flag.name)
    if option not in (None, False):
        value = "1" if option is True else str(option)
        return Given(value=value, source=f"--{flag.name}", typed=True)
    value = environ.get(flag.variable, "") if flag.pet else ""
    if not value:
        return None
    if flag.switch:
        try:
            on = bool(int(value))
        except ValueError:
            raise UsageError(
                f"{flag.variable} is {value!r} but must be 0 or 1", done="Nothing was started"
            ) from None
        if not on:
            return None
        value = "1"
    return Given(value=value, source=flag.variable, typed=False)
