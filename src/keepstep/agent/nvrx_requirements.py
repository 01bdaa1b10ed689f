"""Whether the packages that are installed are those that NVRx needs. No torch is imported.

Runs in the process of ``keepstep run`` before anything starts: a wrong version of NCCL shows only
hours later, as a restart that hangs.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

from keepstep.agent.ft_command import numbers
from keepstep.config import Config, Parts
from keepstep.errors import EngineUnavailable, UsageError
from keepstep.policy.nvrx_limits import NvrxLimits, nvrx_limits

NVRX = "nvidia-resiliency-ext"
OLDEST_NVRX = "0.4.1"
OLDEST_TORCH = "2.5.1"
OLDEST_NCCL = "2.26.2"
BAD_NCCL = ("2.28.3", "2.28.8")
"""First and last release of NCCL in which aborting a communicator may hang."""
_INSTALL = "pip install 'keepstep[nvrx]'"
_NCCL = re.compile(r"nvidia[-_]nccl[-_]cu\d+", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """Versions by package; empty: not installed."""

    nvrx: str
    torch: str
    nccl: str
    """The package that torch asks for; empty also where torch brings none, as without CUDA."""
    numpy: str


def installed() -> Installed:
    """What is installed for this interpreter, by the packages' metadata."""
    return Installed(
        nvrx=_version(NVRX), torch=_version("torch"), nccl=_nccl(), numpy=_version("numpy")
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _nccl() -> str:
    """By torch's own list: several CUDA versions' packages may be installed, it loads one."""
    try:
        wanted = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    names = [found[0] for line in wanted if (found := _NCCL.match(line))]
    return next((version for name in names if (version := _version(name))), "")


def nccl_problem(version: str) -> str:
    """Why this NCCL cannot be used with in-process restart; empty if it can.

    Args:
        version: As in ``2.28.9``; empty: there is none, so nothing is wrong.
    """
    known = numbers(version)
    first, last = (numbers(one) for one in BAD_NCCL)
    if known and known < numbers(OLDEST_NCCL):
        return (
            f"NCCL {version} is installed, NVRx's in-process restart needs {OLDEST_NCCL} or newer"
        )
    if known and first <= known[:3] <= last:
        return (
            f"NCCL {version} is installed, but in {BAD_NCCL[0]} to {BAD_NCCL[1]} an abort may hang "
            "for ever, so NVRx's in-process restart cannot use them; install an older or newer one"
        )
    return ""


def missing(parts: Parts, found: Installed) -> list[str]:
    """Packages that are not there or too old, one sentence each."""
    if not parts.any_nvrx:
        return []
    said = []
    if not found.nvrx:
        said.append(f"the package {NVRX} is not installed")
    elif numbers(found.nvrx) < numbers(OLDEST_NVRX):
        said.append(f"{NVRX} {found.nvrx} is installed, keepstep needs {OLDEST_NVRX} or newer")
    if not found.torch:
        said.append("torch is not installed")
    if parts.checkpoint == "nvrx" and not found.numpy:
        said.append("NVRx's checkpoints need numpy, which is not installed")
    return said


def problems(parts: Parts, found: Installed, limits: NvrxLimits) -> list[str]:
    """What in-process restart cannot work with, one sentence each."""
    if parts.restart != "nvrx":
        return []
    said = []
    if found.torch and numbers(found.torch) < numbers(OLDEST_TORCH):
        said.append(
            f"torch {found.torch} is installed, NVRx's in-process restart needs {OLDEST_TORCH} or "
            "newer"
        )
    said.append(nccl_problem(found.nccl))
    if limits.pg_timeout <= limits.hard:
        said.append(
            f"restart.pg_timeout_s is {limits.pg_timeout}, but must be above the hard limit of "
            f"{limits.hard} s: torch would end ranks that NVRx was about to free"
        )
    return [one for one in said if one]


def check(config: Config, found: Installed) -> None:
    """Refuse a run that NVRx could not do.

    Args:
        config: All settings.
        found: Versions, from ``installed``.

    Raises:
        EngineUnavailable: a package is missing or too old.
        UsageError: versions or limits that do not work together.
    """
    parts = config.engine.parts
    lacking = missing(parts, found)
    if lacking:
        raise EngineUnavailable(
            f'engine "nvrx" cannot be used: {"; ".join(lacking)}',
            done="Nothing was started",
            advice=f'Install them with {_INSTALL}, or choose engine.name = "native"',
        )
    wrong = problems(parts, found, nvrx_limits(config))
    if wrong:
        raise UsageError(
            f"NVRx's in-process restart cannot be used: {'; '.join(wrong)}",
            done="Nothing was started",
            advice="Correct that, or use NVRx's launcher alone: --engine native --set "
            "engine.launcher=nvrx",
        )
