"""The command and the environment of NVRx's launcher, ``ft_launcher``. Pure; the watching process.

Spellings of flags are those that 0.4.1, 0.5, 0.6, 0.7 and main all take, but for the few that exist
in some only: those follow from the version. A flag that a version does not know ends its launcher
before any rank starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from keepstep.agent.launch_spec import Launch
from keepstep.policy.nvrx_limits import SECTION, NvrxLimits

PROGRAM = "from nvidia_resiliency_ext.fault_tolerance.launcher import main; main()"
"""What the console script ``ft_launcher`` does, in keepstep's own Python, wherever scripts are
installed. ``-m`` would not do: NVRx's rendezvous imports the launcher's module again by its name,
so a node that it calls unhealthy raises an exception of another class than the one the launcher
catches, and closes the rendezvous for all nodes."""
WORKER = "keepstep.rank.attached"
UNLIMITED = 1_000_000
"""Restarts where the settings have no limit: keepstep's own policy stops the run."""
IN_PROCESS: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_CPP_LOG_LEVEL": "error",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""What NVRx's in-process restart needs of the ranks' environment."""
_NODE_NUMBERS = ("CROSS_SLURM_PROCID", "SLURM_PROCID", "GROUP_RANK")
_SINCE_0_6 = (0, 6)
_ONLY_0_5 = (0, 5)


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 7, 0) of ``0.7.0.dev3+gab12``."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def ft_command(
    spec: Launch, limits: NvrxLimits, *, python: str, rdzv_endpoint: str, version: str
) -> list[str]:
    """The command that starts the ranks of this node.

    Args:
        spec: What is launched; mode script or module.
        limits: Made from ``spec.config``.
        python: The interpreter of launcher and ranks.
        rdzv_endpoint: HOST:PORT where launchers meet; port 0 is a free one, for a single node.
        version: NVRx's, as in ``0.4.1``.
    """
    config = spec.config
    most = config.restart.max_restarts
    values = {
        "nnodes": spec.nnodes,
        "nproc-per-node": spec.nproc,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": rdzv_endpoint,
        "rdzv-id": spec.run_id,
        "rdzv-conf": _rendezvous(spec),
        "role": spec.role,
        "max-restarts": most if most >= 0 else UNLIMITED,
        "monitor-interval": limits.monitor_process_interval,
        "term-timeout": config.run.grace_s,
        "workers-stop-timeout": limits.termination_grace,
        "ft-workload-check-interval": limits.ft_check_interval,
        "ft-initial-rank-heartbeat-timeout": limits.ft_initial,
        "ft-rank-heartbeat-timeout": limits.ft_heartbeat,
        "ft-rank-section-timeouts": f"{SECTION}:{limits.ft_section}",
        "ft-safety-factor": limits.ft_safety_factor,
        "ft-rank-termination-signal": "SIGKILL",
        "ft-restart-policy": "any-failed",
        # It reads counters that EFA does not have, and is on by default in 0.4.1.
        "ft-enable-nic-monitor": False,
        "ft-log-level": "warning",
    }
    if spec.nnodes > 1:
        # No version numbers the nodes by it; it is there for who reads the list of processes.
        values |= {} if spec.node_rank is None else {"node-rank": spec.node_rank}
        values |= {"local-addr": spec.local_addr} if spec.local_addr else {}
    values |= _of_version(spec, numbers(version))
    flags = [f"--{name}={value}" for name, value in values.items()]
    # The launcher replaces ${local_rank} in arguments, and $$ by $; a script gets what was typed.
    arguments = [argument.replace("$", "$$") for argument in spec.args]
    return [python, "-c", PROGRAM, *flags, "--module", WORKER, *arguments]


def _rendezvous(spec: Launch) -> str:
    seconds = max(1, round(spec.config.restart.join_limit_s))  # whole ones only
    given = [f"join_timeout={seconds}"]
    # Without it nobody hosts where the endpoint is an address that the host's name does not give.
    if spec.nnodes > 1 and spec.hosts_rendezvous is not None:
        given.append(f"is_host={str(spec.hosts_rendezvous).lower()}")
    return ",".join(given)


def _of_version(spec: Launch, version: tuple[int, ...]) -> dict[str, object]:
    """Flags that only some versions have."""
    if version >= _SINCE_0_6:
        # Whether restarts make progress is judged once, by keepstep's policy.
        return {"ft-max-no-progress-cycles": 0}
    environ = spec.environ | ft_environment(spec)
    if version[:2] == _ONLY_0_5 and not any(name in environ for name in _NODE_NUMBERS):
        # Only 0.5 refuses to start without a number for each node.
        return {"ft-use-infra-group-rank": False}
    return {}


def ft_environment(spec: Launch) -> dict[str, str]:
    """Variables that the launcher's process, and so every rank, gets beyond ``spec.environ``.

    What the person has set stays as it is; ``contradictions`` says what is wrong with it.
    """
    added: dict[str, str] = {}
    if spec.config.engine.parts.restart == "nvrx":
        added |= IN_PROCESS
    number = _node_number(spec)
    if number:
        added["GROUP_RANK"] = number
    return {name: value for name, value in added.items() if name not in spec.environ}


def launcher_environment(spec: Launch) -> dict[str, str]:
    """The whole environment of the launcher's process.

    Without torchrun's ``PET_*``: keepstep has read them, and they would change the command's
    meaning where it leaves a flag out.
    """
    kept = {name: value for name, value in spec.environ.items() if not name.startswith("PET_")}
    return kept | ft_environment(spec)


def contradictions(spec: Launch) -> list[str]:
    """Warnings about variables that the person has set to something else than NVRx needs."""
    said = []
    parts = spec.config.engine.parts
    if parts.restart == "nvrx":
        for name, value in IN_PROCESS.items():
            found = spec.environ.get(name, value)
            if found.lower() != value:
                said.append(
                    f"{name} is {found}, but NVRx's in-process restart needs {value}; unset it, "
                    "or set it so"
                )
    elif parts.any_nvrx and spec.environ.get("NCCL_NVLS_ENABLE") == "0":
        said.append(
            "NCCL_NVLS_ENABLE is 0, which only NVRx's in-process restart needs; it costs "
            "bandwidth between GPUs"
        )
    number = _node_number(spec)
    found = spec.environ.get("GROUP_RANK", number)
    if parts.launcher == "nvrx" and number and found != number:
        said.append(
            f"GROUP_RANK is {found}, but this is node {number}; NVRx's launcher numbers nodes by "
            "GROUP_RANK"
        )
    return said


def _node_number(spec: Launch) -> str:
    """This node's number; empty where only the rendezvous can tell."""
    return "" if spec.number is None else str(spec.number)
