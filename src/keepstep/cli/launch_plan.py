"""From flags, ``PET_*`` and settings to one checked ``Launch``. Pure; the machine is passed in."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from keepstep.agent.launch_spec import TORCHRUN_SIGNALS, Launch
from keepstep.cli.flags import Given, collect
from keepstep.config import Config
from keepstep.config.load import environment_name, load
from keepstep.errors import EngineUnavailable, UsageError
from keepstep.faults.plan import FaultPlan

Mode = Literal["script", "module", "program"]

NOTHING_STARTED = "Nothing was started"
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


@dataclass(slots=True)
class _Reader:
    """Reads flags one by one and keeps every problem, so that all are reported together."""

    given: Mapping[str, Given]
    problems: list[UsageError] = field(default_factory=list)

    def value(self, name: str, default: str = "") -> str:
        return self.given[name].value if name in self.given else default

    def problem(self, name: str, what: str, advice: str = "") -> None:
        """``what`` completes a sentence that begins with the flag and its value."""
        found = self.given[name]
        self.problems.append(
            UsageError(f"{found.source} {found.value} {what}", done=NOTHING_STARTED, advice=advice)
        )

    def number(self, name: str, least: int, most: int, default: int) -> int:
        """A whole number within bounds; ``default`` if not given, or wrong (and noted)."""
        if name not in self.given:
            return default
        number = _whole(self.given[name].value)
        if number is None:
            self.problem(name, "is not a whole number")
        elif not least <= number <= most:
            self.problem(name, f"is out of range: {least} to {most}")
        else:
            return number
        return default

    def only(self, name: str, accepted: Sequence[str], why: str, advice: str = "") -> None:
        """The flag is accepted with certain values only."""
        if name in self.given and self.given[name].value not in accepted:
            self.problem(name, why, advice)


def plan(request: Request, machine: Machine) -> Launch:
    """What ``keepstep run`` is to start.

    Raises:
        UsageError: a flag, a ``PET_*`` variable or a setting cannot be used; flags' problems are
            reported together, then those of the settings together.
        EngineUnavailable: the engine exists but not in this version.
    """
    problems: list[UsageError] = []
    reader = _Reader(collect(request.options, request.environ, problems), problems)
    mode = _mode(reader, request)
    nproc = _nproc(reader, machine)
    _one_node(reader)
    address, port = _endpoint(reader)
    tee, logged = (_streams(reader, name, nproc) for name in ("tee", "redirects"))
    redirects = {rank: streams & ~tee.get(rank, 0) for rank, streams in logged.items()}
    shown = _shown(reader, nproc)
    signals = _signals(reader)
    arguments, names = _arguments(reader)
    raise_all(reader.problems)
    config = _settings(request, reader, arguments, names)
    _check_engine(config)
    config = _with_faults(config, request, nproc)
    config, run_dir = _run_folder(config, request.folder, machine)
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
        master_addr=address,
        master_port=port,
        environ=_rank_environment(request.environ, nproc),
        argv=list(request.argv),
        role=reader.value("role", "default"),
        notice_signals=signals,
    )


def raise_all(problems: Sequence[UsageError]) -> None:
    """Raise the one problem there is, or one error that names all; nothing if there is none."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        said = [
            f"{one.what} ({one.advice[0].lower() + one.advice[1:]})" if one.advice else one.what
            for one in problems
        ]
        raise UsageError(
            f"{len(problems)} problems on the command line: {'; '.join(said)}",
            done=NOTHING_STARTED,
        )


# --- what to run, and how often -------------------------------------------------------------------


def _mode(reader: _Reader, request: Request) -> Mode:
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


def _nproc(reader: _Reader, machine: Machine) -> int:
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
    number = _whole(asked)
    if number is None:
        reader.problem(name, "is neither a whole number nor cpu, gpu or auto")
    elif not 1 <= number <= 1024:
        reader.problem(name, "is not possible: a node has 1 to 1024 ranks")
    else:
        return number
    return 1


# --- addresses ------------------------------------------------------------------------------------


def _one_node(reader: _Reader) -> None:
    several = (
        "asks for more than this node: several nodes are not supported yet; they come with a "
        "later version"
    )
    nodes = reader.value("nnodes", "1")
    if not re.fullmatch(r"[0-9]+(:[0-9]+)?", nodes, re.ASCII):
        reader.problem("nnodes", "is neither a number nor MIN:MAX")
    elif any(int(part) != 1 for part in nodes.split(":")):
        none = int(nodes.split(":")[0]) == 0
        why = "is not possible: a run has at least 1 node" if none else several
        reader.problem("nnodes", why, "Use --nnodes 1, or leave it out")
    if reader.number("node-rank", 0, 2**31 - 1, 0):
        reader.problem("node-rank", several, "Use --node-rank 0, or leave it out")
    reader.only(
        "rdzv-backend",
        ("static", "c10d"),
        "is not a rendezvous that keepstep can use: ranks meet through keepstep's own agent",
        "Leave it out, or use static or c10d, which mean the same on one node",
    )
    if "standalone" in reader.given and "rdzv-endpoint" in reader.given:
        standalone = reader.given["standalone"].source
        reader.problem("rdzv-endpoint", f"contradicts {standalone}", "Leave one of them out")


def _endpoint(reader: _Reader) -> tuple[str, int]:
    """MASTER_ADDR (without brackets) and MASTER_PORT. What was typed counts before ``PET_*``."""
    host, endpoint_port = _host_and_port(reader)
    addresses = {
        "rdzv-endpoint": host,
        "master-addr": _bare(reader.value("master-addr")),
        "local-addr": _bare(reader.value("local-addr")),
    }
    address = _agreed(reader, addresses, "the address") or "127.0.0.1"
    reader.number("master-port", 0, 65535, 0)
    ports = {"rdzv-endpoint": endpoint_port, "master-port": reader.value("master-port")}
    port = _whole(_agreed(reader, ports, "the port")) or 0
    return address, port


def _host_and_port(reader: _Reader) -> tuple[str, str]:
    endpoint = reader.value("rdzv-endpoint")
    match = re.fullmatch(r"(\[[^\]]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?", endpoint, re.ASCII)
    if not endpoint:
        return "", ""
    if match is None or int(match[2] or 0) > 65535:
        reader.problem(
            "rdzv-endpoint", "is not HOST:PORT", "Write an IPv6 address in brackets, [::1]:29500"
        )
        return "", ""
    return _bare(match[1]), match[2] or ""


def _agreed(reader: _Reader, values: Mapping[str, str], what: str) -> str:
    """The one value that flags give for the same thing; empty if none does."""
    named = {name: value for name, value in values.items() if value}
    typed = {name: value for name, value in named.items() if reader.given[name].typed}
    chosen = typed or named
    if len(set(chosen.values())) > 1:
        said = " and ".join(
            f"{reader.given[name].source} {value}" for name, value in chosen.items()
        )
        reader.problems.append(
            UsageError(
                f"{said} give {what} of the ranks' rendezvous in different ways",
                done=NOTHING_STARTED,
                advice="Give one of them",
            )
        )
    return next(iter(chosen.values()), "")


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


# --- output and signals ---------------------------------------------------------------------------


def _streams(reader: _Reader, name: str, nproc: int) -> dict[int, int]:
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


def _shown(reader: _Reader, nproc: int) -> tuple[int, ...] | None:
    name = "local-ranks-filter"
    if name not in reader.given:
        return None
    ranks = [_whole(part.strip()) for part in reader.value(name).split(",")]
    known = [rank for rank in ranks if rank is not None]
    if len(known) != len(ranks):
        reader.problem(name, "is not a comma-separated list of local ranks, as in 0,1")
    for rank in known:
        if not 0 <= rank < nproc:
            reader.problem(name, f"names local rank {rank}, but there are {nproc}")
            break
    return tuple(sorted(set(known)))


def _signals(reader: _Reader) -> tuple[str, ...]:
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


def _arguments(reader: _Reader) -> tuple[dict[str, tuple[object, bool]], dict[str, str]]:
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
    limit = _join_limit(reader)
    if limit is not None:
        values["restart.join_limit_s"] = (limit, reader.given["rdzv-conf"].typed)
        names["restart.join_limit_s"] = reader.given["rdzv-conf"].source
    return values, names


def _seconds(reader: _Reader, name: str) -> float | None:
    try:
        return float(reader.value(name))
    except ValueError:
        reader.problem(name, "is not a number of seconds")
        return None


def _join_limit(reader: _Reader) -> float | None:
    """Seconds that ``--rdzv-conf`` gives for joining; its other keys must ask for nothing."""
    limits: list[str] = []
    text = reader.value("rdzv-conf")
    for pair in text.split(",") if text.strip() else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            reader.problem("rdzv-conf", "is not a list of KEY=VALUE")
            return None
        if key in ("timeout", "join_timeout"):
            limits.append(value)
        elif (key, value.lower()) not in {("rank", "0"), ("is_host", "true"), ("is_host", "1")}:
            reader.problem(
                "rdzv-conf",
                f"sets {key} to {value}, which has no meaning here: ranks meet through keepstep's "
                "own agent",
                "Use timeout or join_timeout, or the settings of section restart",
            )
    if len(set(limits)) > 1:
        reader.problem("rdzv-conf", "gives two limits for joining", "Give one of them")
    try:
        return float(limits[0]) if limits else None
    except ValueError:
        reader.problem("rdzv-conf", f"gives {limits[0]}, which is not a number of seconds")
        return None


def _settings(
    request: Request,
    reader: _Reader,
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


def _check_engine(config: Config) -> None:
    if config.engine.name != "native":
        raise EngineUnavailable(
            f"engine {config.engine.name} comes with a later version",
            done=NOTHING_STARTED,
            advice="Use --engine native, or leave it out",
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


def _run_folder(config: Config, folder: Path, machine: Machine) -> tuple[Config, Path]:
    """The settings with run id and folder filled in, and the folder."""
    asked = config.run.id
    stored = machine.stored_run_id(folder / config.run.dir) if config.run.dir else ""
    if asked and stored and asked != stored:
        raise UsageError(
            f"{folder / config.run.dir} holds the run {stored}, not {asked}",
            done=NOTHING_STARTED,
            advice="Leave the run id out to continue that run, or choose another --run-dir",
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


def _rank_environment(environ: Mapping[str, str], nproc: int) -> dict[str, str]:
    """What torchrun adds for all ranks: one thread each, and output that is not held back."""
    added = {"PYTHONUNBUFFERED": "1"}
    if nproc > 1:
        added["OMP_NUM_THREADS"] = "1"
    return added | dict(environ)


def _texts(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list | tuple) else []


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text, re.ASCII) else None
