"""Scripts that save with NVRx's writers in processes of their own, and what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.helpers import leaks
from tests.helpers.leaks import MARK

LIMIT_S = 60.0
HEAD = """
import os, sys
from pathlib import Path
import torch
from keepstep.engines.nvrx.shards import NvrxShardWriter
from keepstep.wire.types import Version

def version(step, world=1):
    return Version(run="run", term=1, round=1, step=step, world=world)
"""
"""How a script begins: ``version`` is that of tests.checkpoint.torch_worlds."""


def start(
    folder: Path, script: str, arguments: Sequence[object] = (), **options: object
) -> subprocess.Popen[str]:
    """Run ``script`` from a file, as a user would; what it prints can be read from ``stdout``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "script.py"
    path.write_text(script)
    search = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, str(path), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": search, "GLOO_SOCKET_IFNAME": "lo"},
    )


def run(folder: Path, script: str, arguments: Sequence[object] = ()) -> str:
    """Run ``script`` to its end; returns what it printed."""
    with start(folder, script, arguments) as process:
        out, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    return out


def family() -> set[psutil.Process]:
    """Living processes that this test has started, orphans too."""
    return leaks.processes(os.environ[MARK])


def shown(process: subprocess.Popen[str]) -> str:
    """The next line that the script prints."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, process.stderr.read() if process.stderr else ""
    return line
