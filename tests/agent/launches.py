"""One builder of ``Launch`` for tests: small, and right for any engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.agent.launch_spec import Launch
from keepstep.config.load import load


def launch_of(
    *sets: str, environ: Mapping[str, str] | None = None, folder: Path = Path("/run"), **more: Any
) -> Launch:
    """Two ranks of ``train.py``; ``sets`` as after ``--set``, ``more`` replaces fields."""
    spec = Launch(
        nproc=2,
        mode="script",
        target="train.py",
        args=[],
        config=load(file=None, environ={}, sets=sets, arguments={}),
        run_id="r1",
        run_dir=folder,
        log_dir=folder / "logs",
        tee={0: 0, 1: 0},
        redirects={0: 0, 1: 0},
        local_ranks_filter=None,
        master_addr="127.0.0.1",
        master_port=0,
        environ=dict(environ or {}),
        argv=["keepstep", "run", "train.py"],
        rdzv_endpoint="127.0.0.1:0",
    )
    return dataclasses.replace(spec, **more)
