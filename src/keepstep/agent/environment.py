"""The environment that a rank gets: torchrun's variables, and keepstep's own."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from keepstep.agent.launch_spec import Launch


def free_port(address: str) -> int:
    """A TCP port of ``address`` that nobody uses now.

    Below the range from which the kernel takes ports for outgoing connections, if that works: a
    client that connects to such a port before the server listens may be connected to itself.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    candidates = [random.SystemRandom().randrange(20_000, _ephemeral()) for _ in range(64)]
    for port in (*candidates, 0):
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            try:
                sock.bind((address, port))
            except OSError:
                continue
            return int(sock.getsockname()[1])
    raise OSError(f"no free TCP port at {address}")


def _ephemeral() -> int:
    """The lowest port that the kernel gives to outgoing connections."""
    try:
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32_768
    return low if low > 21_000 else 32_768


def rank_environment(spec: Launch, *, rank: int, round: int, port: int) -> dict[str, str]:
    """Variables of ``rank`` in ``round``, beyond those that all ranks inherit.

    Args:
        spec: What is launched. port: MASTER_PORT of the round.
    """
    size = spec.nproc
    limit = spec.config.restart.max_restarts
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": spec.role,
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(round - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(limit if limit >= 0 else 1_000_000),
        "TORCHELASTIC_RUN_ID": spec.run_id,
        # Rank 0 hosts the store, on a port that no earlier round used: a stale store cannot be met.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "KEEPSTEP_RUN_ID": spec.run_id,
        "KEEPSTEP_RUN_DIR": str(spec.run_dir),
    }


def shared_environment(environ: dict[str, str], nproc: int) -> dict[str, str]:
    """The base environment, with what must be in place before torch loads."""
    shared = dict(environ)
    if nproc > 1:
        shared.setdefault("OMP_NUM_THREADS", "1")
    return shared


def importable(environ: dict[str, str]) -> dict[str, str]:
    """``environ`` for helpers: they import the same keepstep as the agent, wherever it was started
    from."""
    here = str(Path(__file__).resolve().parents[2])
    if not here.endswith("src"):
        return dict(environ)
    known = environ.get("PYTHONPATH", "")
    parts = [here, *[part for part in known.split(":") if part and part != here]]
    return {**environ, "PYTHONPATH": ":".join(parts)}


def node_suffix(spec: Launch) -> str:
    """What is added to the names of this node's files: several nodes share the run folder."""
    if spec.nnodes == 1:
        return ""
    return f"-{socket.gethostname() if spec.node_rank is None else spec.node_rank}"
