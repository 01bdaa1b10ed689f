"""Without ``keepstep run``: plain ``python`` and torchrun, with ``keepstep.run`` and the
Checkpointer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import keepstep
from keepstep.checkpoint import layout
from tests.training import gated_run
from tests.training.gated_run import read_record, undisturbed

PLAIN = Path(__file__).with_name("standalone_plain.py")
LIMIT_S = 100
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def _python(
    folder: Path, *arguments: str | Path, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    source = str(Path(keepstep.__file__).parents[1])
    known = os.environ.get("PYTHONPATH", "")
    variables = {"PYTHONPATH": f"{source}:{known}", "OMP_NUM_THREADS": "1"}
    variables |= {"KEEPSTEP_CHECKPOINT__WHEN_BUSY": "wait", **(environ or {})}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=folder,
        env={**os.environ, **variables},
    )


def _found(done: subprocess.CompletedProcess[str], pattern: str) -> Sequence[str]:
    assert done.returncode == 0, done.stderr[-3000:]
    return re.findall(pattern, done.stdout)


def test_a_plain_python_script_with_keepstep_run_goes_on_where_it_died(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    wanted = _found(_python(whole, PLAIN, "run", "14"), "first (1) digest (.*)")
    died = _python(cut, PLAIN, "run", "14", "13")
    assert died.returncode == 9
    found = _found(_python(cut, PLAIN, "run", "14"), "first (11) digest (.*)")
    assert found[0][1] == wanted[0][1]
    # Where nothing says otherwise the checkpoints are in the working folder.
    folders = layout.list_folders(cut / "runs" / "plain" / "checkpoints")
    assert folders == ["step-00000005", "step-00000010", "step-00000014"]


def test_torchrun_with_keepstep_run_goes_on_where_it_died_to_the_launchers_weights(
    tmp_path: Path,
) -> None:
    gates = tmp_path / "gates"
    gates.mkdir()
    environ = {"GATES": str(gates), "KEEPSTEP_CHECKPOINT__DIR": str(tmp_path / "checkpoints")}
    script: list[str | Path] = [gated_run.SCRIPT, "--steps", "30", "--every-steps", "5"]
    script += ["--eval-every", "10"]
    died = _python(tmp_path, *TORCHRUN, *script, environ={**environ, "LEAVE_AT": "13"})
    assert died.returncode == 1 and "exitcode  : 9" in died.stderr
    done = _python(tmp_path, *TORCHRUN, *script, environ=environ)
    digests = _found(done, "weights digest: (.*)")
    assert (digests[0], read_record(gates)) == undisturbed()
    lines = [(gates / f"record-{rank}").read_text().count("\n") for rank in (0, 1)]
    assert lines == [13 + 20, 13 + 20]  # the steps after 10 were done again, no others
    assert layout.list_folders(tmp_path / "checkpoints")[-1] == "step-00000030"


def test_torchrun_with_a_checkpointer_alone_saves_and_restores(tmp_path: Path) -> None:
    script: list[str | Path] = [PLAIN, "checkpointer", tmp_path / "saved", "8", "5"]
    first = _found(_python(tmp_path, *TORCHRUN, *script), "restored 0 digest ([0-9a-f]{64})")
    second = _found(_python(tmp_path, *TORCHRUN, *script), "restored 5 digest ([0-9a-f]{64})")
    assert len(first) == 2 and sorted(first) == sorted(second)
