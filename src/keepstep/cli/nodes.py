"""How many nodes a job has and where they meet, from torchrun's flags. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.cli.reader import NOTHING_STARTED, Reader, whole
from keepstep.errors import UsageError

RENDEZVOUS_PORT = 29400
"""Where torchrun's launchers meet unless a port is given."""
_MOST_NODES = 65_536
_IS_HOST = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conf:
    """What ``--rdzv-conf`` says; ``None``: nothing."""

    join_limit_s: float | None = None
    is_host: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """The job's nodes; the fields are as in ``Launch``."""

    count: int
    rank: int | None
    address: str
    port: int
    local: str
    is_host: bool | None

    @property
    def endpoint(self) -> str:
        """HOST:PORT, with an IPv6 address in brackets."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


def read_nodes(reader: Reader, launcher: str, conf: Conf) -> Nodes:
    """The nodes that the flags ask for; what cannot be is noted in ``reader``.

    Args:
        reader: The flags.
        launcher: ``native`` or ``nvrx``, which takes several nodes.
        conf: From ``read_conf``.
    """
    count = _count(reader, launcher)
    rank = _rank(reader, launcher, count)
    if launcher == "nvrx" and count > 1:
        accepted: tuple[str, ...] = ("c10d",)
        why = "is not a rendezvous that NVRx's launcher can use"
        advice = "Leave it out, or use c10d"
    else:
        accepted = ("static", "c10d")
        why = "is not a rendezvous that keepstep can use: ranks meet through keepstep's own agent"
        advice = "Leave it out, or use static or c10d, which mean the same on one node"
    reader.only("rdzv-backend", accepted, why, advice)
    for name in ("rdzv-endpoint", *(("nnodes",) if count > 1 else ())):
        if "standalone" in reader.given and name in reader.given:
            standalone = reader.given["standalone"].source
            reader.problem(name, f"contradicts {standalone}", "Leave one of them out")
    address, port = _endpoint(reader, count)
    local = _bare(reader.value("local-addr")) if count > 1 else ""
    return Nodes(
        count=count, rank=rank, address=address, port=port, local=local, is_host=conf.is_host
    )


def _count(reader: Reader, launcher: str) -> int:
    name = "nnodes"
    asked = _range(reader)
    if asked is None:
        reader.problem(name, "is neither a number nor MIN:MAX")
        return 1
    least, most = asked
    if least == 0:
        reader.problem(
            name,
            "is not possible: a run has at least 1 node",
            "Use --nnodes 1, or leave it out",
        )
    elif launcher == "nvrx" and least != most:
        reader.problem(
            name,
            "asks for a changing number of nodes: keepstep never goes on with fewer ranks than "
            "it began with",
            f"Use --nnodes {most}",
        )
    elif launcher == "nvrx" and most > _MOST_NODES:
        reader.problem(name, f"is out of range: 1 to {_MOST_NODES}")
    elif launcher == "native" and (least, most) != (1, 1):
        reader.problem(name, _SEVERAL, "Use --nnodes 1, or leave it out; " + _OTHER)
    else:
        return most
    return 1


_SEVERAL = (
    "asks for more than this node: several nodes are not supported yet; they come with a later "
    "version"
)
_OTHER = "NVRx's launcher takes several (--engine nvrx)"


def _range(reader: Reader) -> tuple[int, int] | None:
    """Least and most nodes, as written; ``None`` if it cannot be read."""
    match = re.fullmatch(r"([0-9]{1,18})(?::([0-9]{1,18}))?", reader.value("nnodes", "1"), re.ASCII)
    return (int(match[1]), int(match[2] or match[1])) if match else None


def _rank(reader: Reader, launcher: str, count: int) -> int | None:
    name = "node-rank"
    if name not in reader.given:
        return None
    if launcher == "native":
        if reader.number(name, 0, 2**31 - 1, 0):
            reader.problem(name, _SEVERAL, "Use --node-rank 0, or leave it out; " + _OTHER)
        return 0
    return reader.number(name, 0, count - 1, 0)


# --- addresses ------------------------------------------------------------------------------------


def _endpoint(reader: Reader, count: int) -> tuple[str, int]:
    """MASTER_ADDR (without brackets) and MASTER_PORT. What was typed counts before ``PET_*``."""
    host, endpoint_port = _host_and_port(reader)
    addresses = {"rdzv-endpoint": host, "master-addr": _bare(reader.value("master-addr"))}
    if count == 1:
        addresses["local-addr"] = _bare(reader.value("local-addr"))
    address = _agreed(reader, addresses, "the address")
    reader.number("master-port", 0, 65535, 0)
    ports = {"rdzv-endpoint": endpoint_port, "master-port": reader.value("master-port")}
    port = whole(_agreed(reader, ports, "the port"))
    if count == 1:
        return address or "127.0.0.1", port or 0
    if not address:
        reader.problem(
            "nnodes",
            "needs an address at which the nodes meet",
            "Give --rdzv-endpoint HOST:PORT, the same on every node",
        )
    if port == 0:
        name = "rdzv-endpoint" if endpoint_port else "master-port"
        reader.problem(name, "gives port 0, which other nodes cannot know", "Give a port")
    return address, RENDEZVOUS_PORT if port is None else port


def _host_and_port(reader: Reader) -> tuple[str, str]:
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


def _agreed(reader: Reader, values: Mapping[str, str], what: str) -> str:
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


# --- rdzv-conf ------------------------------------------------------------------------------------


def read_conf(reader: Reader) -> Conf:
    """What ``--rdzv-conf`` says of joining and hosting; its other keys must ask for nothing."""
    limits: list[str] = []
    is_host: bool | None = None
    several = (_range(reader) or (1, 1))[1] > 1
    text = reader.value("rdzv-conf")
    for pair in text.split(",") if text.strip() else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            reader.problem("rdzv-conf", "is not a list of KEY=VALUE")
            return Conf()
        if key in ("timeout", "join_timeout"):
            limits.append(value)
        elif several and key == "is_host" and value.lower() in _IS_HOST:
            is_host = _IS_HOST[value.lower()]
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
        return Conf(join_limit_s=float(limits[0]) if limits else None, is_host=is_host)
    except ValueError:
        reader.problem("rdzv-conf", f"gives {limits[0]}, which is not a number of seconds")
        return Conf()
