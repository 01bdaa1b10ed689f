"""What a test needs from the machine, and what happens where it is missing.

Mark a test ``@pytest.mark.needs("root", "strace")``, or call ``needs("root")`` inside it. Where
something is missing the test is skipped with a sentence that says what; with the environment
variable ``KEEPSTEP_NO_SKIP=1`` (CI) it fails instead.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

_CGROUPS = Path("/sys/fs/cgroup")


class Strictness:
    """Whether missing things fail a test; set once, at the start of the session."""

    no_skip = False


def _runs(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    return done.returncode == 0


def _root() -> str:
    return "" if os.geteuid() == 0 else "it must run as root"


def _strace() -> str:
    if shutil.which("strace") is None:
        return "the program strace is not installed"
    if not _runs("strace", "-f", "-o", os.devnull, "true"):
        return "strace may not trace processes here (ptrace is forbidden)"
    return ""


def _netns() -> str:
    if shutil.which("ip") is None:
        return "the program ip (package iproute2) is not installed"
    if not _runs("unshare", "--net", "true"):
        return "network namespaces may not be made here"
    return ""


def _cgroup_memory() -> str:
    legacy = _CGROUPS / "memory"
    base, file = (legacy, "memory.limit_in_bytes") if legacy.is_dir() else (_CGROUPS, "memory.max")
    probe = base / f"keepstep-probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError as error:
        return f"no memory cgroup can be made under {base} ({error.strerror})"
    try:
        return "" if (probe / file).exists() else f"{base} does not limit memory (no {file})"
    finally:
        probe.rmdir()


def _loop_mount() -> str:
    for program in ("mkfs.ext4", "mount", "fsfreeze"):
        if shutil.which(program) is None:
            return f"the program {program} is not installed"
    return "" if _runs("losetup", "--find") else "there are no loop devices here"


def _nvrx() -> str:
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        return "the package nvidia-resiliency-ext is not installed (or not made for this Python)"
    return ""


_PROBES: dict[str, Callable[[], str]] = {
    "root": _root,
    "strace": _strace,
    "netns": _netns,
    "cgroup_memory": _cgroup_memory,
    "loop_mount": _loop_mount,
    "nvrx": _nvrx,
}
PRIVILEGED = frozenset({"root", "netns", "cgroup_memory", "loop_mount"})


@functools.cache
def missing(what: str) -> str:
    """Why the machine lacks ``what``; empty if it has it.

    Raises:
        ValueError: ``what`` is not one of root, strace, netns, cgroup_memory, loop_mount, nvrx.
    """
    if what not in _PROBES:
        raise ValueError(f"unknown need {what!r}; known: {', '.join(_PROBES)}")
    return _PROBES[what]()


def needs(*what: str) -> None:
    """Go on if the machine has all of ``what``; otherwise skip the test, or fail it in CI."""
    for name in what:
        reason = missing(name)
        if reason and Strictness.no_skip:
            pytest.fail(f"needs {name}: {reason} (and KEEPSTEP_NO_SKIP=1 allows no skip)", False)
        if reason:
            pytest.skip(f"needs {name}: {reason}")
