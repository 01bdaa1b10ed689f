"""What ``keepstep run --dry-run`` prints: command and environment, ready to be pasted. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from keepstep.agent.environment import rank_environment
from keepstep.agent.ft_command import ft_command, launcher_environment
from keepstep.agent.launch_spec import Launch
from keepstep.policy.nvrx_limits import nvrx_limits
from keepstep.wire.types import ATTACH_VARIABLE

_PORT = "MASTER_PORT"


def dry_run(spec: Launch, environ: Mapping[str, str], *, python: str, version: str) -> str:
    """Lines for a shell: variables beyond ``environ``, sorted, then the command.

    Args:
        spec: What would be launched.
        environ: The environment of ``keepstep run`` itself.
        python: Its interpreter.
        version: NVRx's; only with its launcher.
    """
    if spec.config.engine.parts.launcher == "nvrx":
        command = ft_command(
            spec,
            nvrx_limits(spec.config),
            python=python,
            rdzv_endpoint=spec.rdzv_endpoint,
            version=version,
        )
        notes = [
            f"# NVRx's launcher (version {version}) on this node, for {spec.nproc} of "
            f"{spec.world} ranks.",
            f"# keepstep run also sets {ATTACH_VARIABLE}, which tells ranks the script and where "
            "its",
            "# shared memory and the store outside the ranks are; none of it exists in a dry run.",
        ]
        return _lines(notes, launcher_environment(spec), environ, command)
    own = rank_environment(spec, rank=0, round=1, port=spec.master_port)
    notes = [f"# Rank 0 of {spec.world} in round 1; other ranks differ in RANK and its like."]
    if spec.master_port == 0:
        del own[_PORT]
        notes.append(f"# {_PORT} is a free port, another one in each round.")
    starts = {"script": [python], "module": [python, "-m"], "program": []}
    command = [*starts[spec.mode], spec.target, *spec.args]
    return _lines(notes, spec.environ | own, environ, command)


def _lines(
    notes: Iterable[str],
    wanted: Mapping[str, str],
    environ: Mapping[str, str],
    command: Iterable[str],
) -> str:
    gone = sorted(name for name in environ if name not in wanted)
    added = [
        f"{name}={shlex.quote(wanted[name])}"
        for name in sorted(wanted)
        if environ.get(name) != wanted[name]
    ]
    unset = ["env", *(f"-u {name}" for name in gone)] if gone else []
    words = [shlex.quote(word) for word in command]
    return "\n".join([*notes, " \\\n".join([*unset, *added, *words]), ""])
