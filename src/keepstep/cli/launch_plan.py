"""From flags, ``PET_*`` and settings to one checked ``Launch``. Pure; the machine is passed in."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from keepstep.agent.ft_command import IN_PROCESS
from keepstep.agent.launch_spec import TORCHRUN_SIGNALS, Launch
from keepstep.cli.flags import collect
from keepstep.cli.nodes import Conf, read_conf, read_nodes
from keepstep.cli.reader import NOTHING_STARTED, Reader, raise_all, whole
from keepstep.config import Config, Parts
from keepstep.config.load import environment_name, load
from keepstep.errors import UsageError
from keepstep.faults.plan import FaultPlan

_PYNVML = "ignore:The pynvml package is deprecated"
"""NVRx installs pynvml, and torch warns of that in every process that imports it."""
Mode = Literal["script", "module", "program"]

FAULTS_VARIABLE = "KEEPSTEP_FAULTS"
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_STREAMS = re.compile(r"[0-3]|[0-9]{1,9}:[0-3](,[0-9]{1,9}:[0-3])*", re.ASCII)
_UNCATCHABLE = frozenset({"SIGKILL", "SIGSTOP", "SIGCHLD"})


class Machine(Protocol):
    """What a plan must know of the machine; tests pass a fake."""

    def cpu_count(self) -> int:
        """CPUs that this process may use."""

    def gpu_count(self) -> int:
        """GPUs that this process may use."""

    def new_run_id(self) -> str:
        """A run id made of the time."""

    def stored_run_id(self, run_dir: Path) -> str:
        """The id of the run that the folder holds; empty: none yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The command line of ``keepstep run``, taken apart but not yet understood."""

    options: Mapping[str, object]
    """By flag name: a text, ``True``, ``None``, or for repeatable flags a list of texts."""
    target: str
    args: Sequence[str]
    argv: Sequence[str]
    environ: Mapping[str, str]
    folder: Path
    """The working folder; relative paths start here."""


def plan(request: Request, machine: Machine) -> Launch:
    """What ``keepstep run`` is to start.

    Raises:
        UsageError: a flag, a ``PET_*`` variable or a setting cannot be used; flags' problems are
            reported together, then those of the settings together.
    """
    problems: list[UsageError] = []
    reader = Reader(collect(request.options, request.environ, problems), problems)
    mode = _mode(reader, request)
    nproc = _nproc(reader, machine)
    tee, logged = (_streams(reader, name, nproc) for name in ("tee", "redirects"))
    redirects = {rank: streams & ~tee.get(rank, 0) for rank, streams in logged.items()}
    shown = _shown(reader, nproc)
    signals = _signals(reader)
    conf = read_conf(reader)
    config = _config(request, reader, conf)
    launcher = config.engine.parts.launcher
    nodes = read_nodes(reader, launcher, conf)
    if launcher == "nvrx":
        _refuse_for_nvrx(reader, mode)
    raise_all(reader.problems)
    config = _with_faults(config, request, nproc * nodes.count)
    config, run_dir = _run_folder(config, request.folder, machine, nodes.count)
    log_dir = reader.value("log-dir")
    return Launch(
        nproc=nproc,
        mode=mode,
        target=request.target,
        args=list(request.args),
        config=config,
        run_id=config.run.id,
        run_dir=run_dir,
        log_dir=request.folder / log_dir if log_dir else run_dir / "logs",
        tee=tee,
        redirects=redirects,
        local_ranks_filter=shown,
        master_addr=nodes.address,
        master_port=nodes.port,
        nnodes=nodes.count,
        node_rank=nodes.rank,
        rdzv_endpoint=nodes.endpoint,
        rdzv_is_host=nodes.is_host,
        local_addr=nodes.local,
        environ=_rank_environment(request.environ, nproc, config.engine.parts),
        argv=list(request.argv),
        role=reader.value("role", "default"),
        notice_signals=signals,
    )


def _config(request: Request, reader: Reader, conf: Conf) -> Config:
    """All settings; defaults where flags have problems, which are told first.

    Raises:
        UsageError: settings cannot be used, and no flag has a problem.
    """
    arguments, names = _arguments(reader, conf)
    try:
        return _settings(request, reader, arguments, names)
    except UsageError:
        if reader.problems:
            return Config()
        raise


def _refuse_for_nvrx(reader: Reader, mode: Mode) -> None:
    """Flags that only keepstep's own launcher can honour."""
    if mode == "program":
        reader.problems.append(
            UsageError(
                f"{reader.given['no-python'].source} cannot be honoured with NVRx's launcher: "
                "keepstep watches its ranks from inside their Python",
                done=NOTHING_STARTED,
                advice="Use keepstep's own launcher, or give a Python script",
            )
        )
    if reader.value("start-method") == "fork":
        reader.problem(
            "start-method",
            "cannot be honoured: NVRx's launcher starts a fresh interpreter for each rank",
            "Leave it out, or use spawn",
        )


# --- what to run, and how often -------------------------------------------------------------------


def _mode(reader: Reader, request: Request) -> Mode:
    chosen = [name for name in ("module", "no-python", "run-path") if name in reader.given]
    if len(chosen) > 1:
        sources = " and ".join(reader.given[name].source for name in chosen)
        reader.problems.append(
            UsageError(
                f"{sources} exclude each other", done=NOTHING_STARTED, advice="Give one of them"
            )
        )
    if "run-path" in chosen and not Path(request.target).is_absolute():
        source = reader.given["run-path"].source
        reader.problems.append(
            UsageError(
                f"{source} needs an absolute path, not {request.target}",
                done=NOTHING_STARTED,
                advice="Give the whole path, or leave the flag out: a script is always run in the "
                "rank's own interpreter",
            )
        )
    if "module" in chosen:
        return "module"
    return "program" if "no-python" in chosen else "script"


def _nproc(reader: Reader, machine: Machine) -> int:
    name = "nproc-per-node"
    asked = reader.value(name, "1")
    if asked in ("cpu", "auto"):
        return (machine.gpu_count() if asked == "auto" else 0) or machine.cpu_count()
    if asked == "gpu":
        count = machine.gpu_count()
        if not count:
            reader.problem(
                name,
                "finds no NVIDIA GPU that this process may use",
                "Check nvidia-smi -L and CUDA_VISIBLE_DEVICES, or use cpu, auto or a number",
            )
        return count or 1
    number = whole(asked)
    if number is None:
        reader.problem(name, "is neither a whole number nor cpu, gpu or auto")
    elif not 1 <= number <= 1024:
        reader.problem(name, "is not possible: a node has 1 to 1024 ranks")
    else:
        return number
    return 1


# --- output and signals ---------------------------------------------------------------------------


def _streams(reader: Reader, name: str, nproc: int) -> dict[int, int]:
    """By local rank, for all of them: 0 none, 1 stdout, 2 stderr, 3 both."""
    text = reader.value(name, "0")
    if not _STREAMS.fullmatch(text):
        reader.problem(
            name,
            "is neither a number from 0 to 3 nor a list of RANK:NUMBER",
            f"Write --{name} 3, or --{name} 0:3,1:2",
        )
        return {}
    if ":" not in text:
        return dict.fromkeys(range(nproc), int(text))
    streams = dict.fromkeys(range(nproc), 0)
    for pair in text.split(","):
        rank, _, number = pair.partition(":")
        if int(rank) not in streams:
            reader.problem(name, f"names local rank {rank}, but there are {nproc}")
            break
        streams[int(rank)] = int(number)
    return streams


def _shown(reader: Reader, nproc: int) -> tuple[int, ...] | None:
    name = "local-ranks-filter"
    if name not in reader.given:
        return None
    ranks = [whole(part.strip()) for part in reader.value(name).split(",")]
    known = [rank for rank in ranks if rank is not None]
    if len(known) != len(ranks):
        reader.problem(name, "is not a comma-separated list of local ranks, as in 0,1")
    for rank in known:
        if not 0 <= rank < nproc:
            reader.problem(name, f"names local rank {rank}, but there are {nproc}")
            break
    return tuple(sorted(set(known)))


def _signals(reader: Reader) -> tuple[str, ...]:
    name = "signals-to-handle"
    text = reader.value(name, ",".join(TORCHRUN_SIGNALS))
    names = [part.strip() for part in text.split(",") if part.strip()]
    for one in names:
        if one not in signal.Signals.__members__:
            reader.problem(name, f"names {one}, which is no signal here", "Write them as SIGUSR1")
        elif one in _UNCATCHABLE:
            reader.problem(name, f"names {one}, which cannot be handled", "Leave it out")
    if not names:
        reader.problem(name, "names no signal", "Leave the flag out for torchrun's default")
    return tuple(dict.fromkeys(names))


# --- settings -------------------------------------------------------------------------------------


def _arguments(reader: Reader, conf: Conf) -> tuple[dict[str, tuple[object, bool]], dict[str, str]]:
    """Settings that flags give, as (value, typed on the command line), and what to call them."""
    most = 2**31 - 1
    reads: dict[str, tuple[str, Callable[[str], object]]] = {
        "max-restarts": (
            "restart.max_restarts",
            lambda name: reader.number(name, -1, most, -1),
        ),
        "monitor-interval": ("heartbeat.interval_s", lambda name: _seconds(reader, name)),
        "shutdown-timeout": ("run.grace_s", lambda name: _seconds(reader, name)),
        "on-hang": ("heartbeat.on_hang", reader.value),
        "engine": ("engine.name", reader.value),
        "run-dir": ("run.dir", reader.value),
        "rdzv-id": ("run.id", reader.value),
    }
    values: dict[str, tuple[object, bool]] = {}
    names: dict[str, str] = {}
    for flag, (setting, read) in reads.items():
        if flag in reader.given:
            values[setting] = (read(flag), reader.given[flag].typed)
            names[setting] = reader.given[flag].source
    reader.only(
        "start-method",
        ("fork", "spawn"),
        "is not supported: ranks are forked from keepstep's own server process or spawned",
        "Use fork, which is what forkserver is for, or spawn",
    )
    if "start-method" in reader.given:
        found = reader.given["start-method"]
        values["rank.start_method"] = (found.value, found.typed)
        names["rank.start_method"] = found.source
    if conf.join_limit_s is not None:
        values["restart.join_limit_s"] = (conf.join_limit_s, reader.given["rdzv-conf"].typed)
        names["restart.join_limit_s"] = reader.given["rdzv-conf"].source
    return values, names


def _seconds(reader: Reader, name: str) -> float | None:
    try:
        return float(reader.value(name))
    except ValueError:
        reader.problem(name, "is not a number of seconds")
        return None


def _settings(
    request: Request,
    reader: Reader,
    arguments: Mapping[str, tuple[object, bool]],
    names: Mapping[str, str],
) -> Config:
    """All settings. What came from ``PET_*`` ranks with the environment, below ``--set``."""
    environ = dict(request.environ)
    labels = dict(names)
    for setting, (value, typed) in arguments.items():
        variable = environment_name(setting)
        if not typed and variable not in environ:
            environ[variable] = str(value)
            labels[variable] = names[setting]
    file = reader.value("config")
    return load(
        file=request.folder / file if file else None,
        environ=environ,
        sets=_texts(request.options.get("set")),
        arguments={setting: value for setting, (value, typed) in arguments.items() if typed},
        labels=labels,
    )


def _with_faults(config: Config, request: Request, world: int) -> Config:
    """The faults of the settings, then of ``KEEPSTEP_FAULTS``, then of ``--fault``."""
    variable = request.environ.get(FAULTS_VARIABLE, "")
    faults = (
        *config.faults.inject,
        *(part.strip() for part in variable.split(",") if part.strip()),
        *_texts(request.options.get("fault")),
    )
    FaultPlan.parse(faults, world)
    return replace(config, faults=replace(config.faults, inject=faults))


def _run_folder(config: Config, folder: Path, machine: Machine, nodes: int) -> tuple[Config, Path]:
    """The settings with run id and folder filled in, and the folder."""
    asked = config.run.id
    stored = machine.stored_run_id(folder / config.run.dir) if config.run.dir else ""
    if asked and stored and asked != stored:
        raise UsageError(
            f"{folder / config.run.dir} holds the run {stored}, not {asked}",
            done=NOTHING_STARTED,
            advice="Leave the run id out to continue that run, or choose another --run-dir",
        )
    if nodes > 1 and not asked and not stored:
        raise UsageError(
            f"{nodes} nodes need one run id, and none was given",
            done=NOTHING_STARTED,
            advice="Give --rdzv-id, the same on every node",
        )
    run_id = asked or stored or machine.new_run_id()
    if not _RUN_ID.fullmatch(run_id):
        raise UsageError(
            f"{run_id!r} cannot be a run id",
            done=NOTHING_STARTED,
            advice="Use letters, digits, points, dashes and underscores, at most 128, the first a "
            "letter or digit",
        )
    run_dir = folder / (config.run.dir or Path("runs", run_id))
    return replace(config, run=replace(config.run, id=run_id, dir=str(run_dir))), run_dir


def _rank_environment(environ: Mapping[str, str], nproc: int, parts: Parts) -> dict[str, str]:
    """What torchrun adds for all ranks: one thread each, and output that is not held back; and
    what the engine needs."""
    added = {"PYTHONUNBUFFERED": "1"}
    if parts.restart == "nvrx":
        added |= IN_PROCESS
    if nproc > 1:
        added["OMP_NUM_THREADS"] = "1"
    result = added | dict(environ)
    if parts.any_nvrx:
        given = result.get("PYTHONWARNINGS", "")
        result["PYTHONWARNINGS"] = f"{given},{_PYNVML}" if given else _PYNVML
    return result


def _texts(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list | tuple) else []
