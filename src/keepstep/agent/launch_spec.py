"""What one ``keepstep run`` is to start, as plain values.

Made by the command line, read by the agent, in the same process. A module of its own, so that the
agent does not import the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from keepstep.config import Config

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""Environment variable: the pod's number in an Indexed Job of Kubernetes."""
TORCHRUN_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""Signals that torchrun handles unless it is told otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Everything the agent needs; all of it has been checked."""

    nproc: int
    """Ranks on this node, at least 1."""
    mode: Literal["script", "module", "program"]
    """``script``: a Python file (or a folder or archive with ``__main__.py``); ``module``: as with
    ``python -m``; ``program``: an executable, no Python."""
    target: str
    """The script as given, the module's dotted name, or the program's absolute path."""
    args: list[str]
    """The target's own arguments."""
    config: Config
    """The settings; ``run.id`` and ``run.dir`` are filled in."""
    run_id: str
    run_dir: Path
    """Absolute; exists and can be written to."""
    log_dir: Path
    """Absolute; exists and can be written to."""
    tee: dict[int, int]
    """By local rank, for all of them: what goes to its log and to the terminal (0 nothing,
    1 stdout, 2 stderr, 3 both)."""
    redirects: dict[int, int]
    """By local rank, for all of them: what goes to its log only; numbers as in ``tee``."""
    local_ranks_filter: tuple[int, ...] | None
    """Local ranks whose output may reach the terminal; ``None``: all."""
    master_addr: str
    """Address of this machine, without brackets; with several nodes the host of
    ``rdzv_endpoint``."""
    master_port: int
    """0: a free one for each round."""
    environ: dict[str, str]
    """The environment that every rank's own variables are added to."""
    argv: list[str]
    """keepstep's own command line, for the record."""
    nnodes: int = 1
    """Nodes of the job, at least 1; several only with NVRx's launcher."""
    node_rank: int | None = None
    """This node's number, below ``nnodes``; ``None``: nobody said."""
    rdzv_endpoint: str = ""
    """HOST:PORT where the nodes' launchers meet, an IPv6 address in brackets; port 0: a free one,
    with one node only."""
    rdzv_is_host: bool | None = None
    """Whether this node's launcher hosts the rendezvous; ``None``: the host's name tells."""
    local_addr: str = ""
    """This machine's address for other nodes; empty: found out."""
    role: str = "default"
    """ROLE_NAME of the ranks."""
    lease: int = 0
    """Number of the lease on the folder of checkpoints; 0: none is held, or not yet."""
    notice_signals: tuple[str, ...] = TORCHRUN_SIGNALS
    """Signals at which ranks get the notice and ``run.grace_s`` seconds to commit."""

    @property
    def world(self) -> int:
        """Ranks of the whole job."""
        return self.nproc * self.nnodes

    @property
    def number(self) -> int | None:
        """This node's number; None where only the launcher's rendezvous can tell."""
        if self.nnodes == 1:
            return 0
        if self.node_rank is not None:
            return self.node_rank
        index = self.environ.get(INDEX_VARIABLE, "")
        return int(index) if index.isdecimal() else None

    @property
    def hosts_rendezvous(self) -> bool | None:
        """Whether this node hosts what the nodes meet through; None: the host's name tells."""
        if self.rdzv_is_host is not None:
            return self.rdzv_is_host
        return None if self.number is None else self.number == 0
