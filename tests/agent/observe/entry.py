"""``keepstep run`` with the fake launcher in place of NVRx's; NVRx and torch are not needed.

The module of the ranks is in ``FAKE_WORKER``, how often they are started again in
``FAKE_RESTARTS``.
"""

from __future__ import annotations

import functools
import os
import sys
from unittest import mock

from keepstep.agent import launch as launching
from keepstep.agent.launch_spec import Launch
from keepstep.agent.nvrx_requirements import Installed
from keepstep.agent.observe.observer import Observer
from keepstep.cli import run as commands
from keepstep.cli.main import main

_FOUND = Installed(nvrx="0.4.1", torch="2.13.0", nccl="", numpy="2.0.0")


def _command(spec: Launch, *_: object, python: str, **__: object) -> list[str]:
    worker = os.environ.get("FAKE_WORKER", "tests.agent.observe.fake_rank")
    restarts = os.environ.get("FAKE_RESTARTS", "100")
    module = "tests.agent.observe.fake_launcher"
    return [python, "-m", module, str(spec.nproc), restarts, worker, *spec.args]


def run() -> int:
    """The command line of ``keepstep``, with what is installed and started replaced."""
    observer = functools.partial(Observer, store_host="tests.agent.observe.fake_store")
    with (
        mock.patch.object(commands, "installed", lambda: _FOUND),
        mock.patch.object(launching, "installed", lambda: _FOUND),
        mock.patch.object(launching, "ft_command", _command),
        mock.patch.object(launching, "Observer", observer),
    ):
        return main()


if __name__ == "__main__":
    sys.exit(run())
