"""One real ``keepstep run`` over the fake launcher, in a folder of the test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.process.job import Job

_ROOT = str(Path(__file__).parents[3])
LAUNCHER_ONLY = ("--set", "engine.launcher=nvrx")
IN_PROCESS = (*LAUNCHER_ONLY, "--set", "engine.restart=nvrx")
_LIMITS = {
    "heartbeat.min_limit_s": "1",
    "heartbeat.interval_s": "0.05",
    "nvrx.soft_limit_s": "1.5",
    "restart.settle_s": "0.3",
}


class Watched(Job):
    """As ``Job``; ``arguments`` are those of ``fake_rank``.

    Args:
        restarts: How often the launcher starts the ranks again. worker: the ranks' module.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        flags: Sequence[str] = LAUNCHER_ONLY,
        nproc: int = 2,
        restarts: int = 100,
        worker: str = "tests.agent.observe.fake_rank",
        script: str = "raise AssertionError('the fake ranks do not run it')",
    ) -> None:
        limits = [word for name in _LIMITS.items() for word in ("--set", "=".join(name))]
        super().__init__(
            folder,
            script,
            flags=[*limits, *flags],
            arguments=arguments,
            nproc=nproc,
            environ={
                "PYTHONPATH": _ROOT,
                "FAKE_RESTARTS": str(restarts),
                "FAKE_WORKER": worker,
            },
        )

    def __enter__(self) -> Watched:
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.agent.observe.entry", *self._command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.folder,
                env=self._environ,
                start_new_session=True,
            )
        return self
