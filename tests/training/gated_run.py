"""Launches of the gated main job: several in the same run folder, stopped at chosen places."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from keepstep.checkpoint import layout
from keepstep.clock import SYSTEM
from keepstep.events import Event
from tests.process.job import Job

SCRIPT = Path(__file__).with_name("gated_train.py")
STEPS = 30
EVERY = 5
LIMIT_S = 240.0
WAITING = ("--set", "checkpoint.when_busy=wait")
"""Each save that is due is made, however slow storage is here: which ones there are is known."""


class Launch(Job):
    """One ``keepstep run`` of the gated main job; launches in the same folder share the run.

    Args:
        folder: Holds the run, the gates and a folder for each launch's output.
        name: Of this launch. steps, every, arguments: for the script. flags: for keepstep.
        faults: To inject, as on the command line. closed: gates that are closed at the start.
        run_dir: The run folder; by default ``run`` in ``folder``.
    """

    def __init__(
        self,
        folder: Path,
        name: str = "first",
        *,
        steps: int = STEPS,
        every: int = EVERY,
        faults: Sequence[str] = (),
        flags: Sequence[str] = (),
        arguments: Sequence[str] = (),
        closed: Sequence[str] = (),
        environ: dict[str, str] | None = None,
        run_dir: Path | None = None,
    ) -> None:
        self.gates = folder / "gates"
        self.gates.mkdir(exist_ok=True)
        for gate in closed:
            self.close(gate)
        script = [str(SCRIPT), "--steps", str(steps), "--every-steps", str(every)]
        super().__init__(
            folder / name,
            flags=[*(part for fault in faults for part in ("--fault", fault)), *WAITING, *flags],
            arguments=[*script, "--eval-every", "10", *arguments],
            environ={**(environ or {}), "GATES": str(self.gates)},
            preload=True,
            run_dir=run_dir or folder / "run",
        )
        self._begun = 0.0

    def __enter__(self) -> Launch:
        self._begun = SYSTEM.wall()
        super().__enter__()
        return self

    def events(self, *kinds: str) -> list[Event]:
        """Events of this launch."""
        return [event for event in super().events(*kinds) if event.t >= self._begun]

    def end(self) -> int:
        """The exit code."""
        return self.wait(LIMIT_S)

    # --- gates ------------------------------------------------------------------------------------

    def close(self, gate: str) -> None:
        """Ranks that come to ``gate`` stand still."""
        (self.gates / f"{gate}.closed").touch()

    def open(self, gate: str) -> None:
        """Ranks that stand at ``gate`` go on."""
        (self.gates / f"{gate}.closed").unlink()

    def at(self, gate: str) -> None:
        """Wait until both ranks stand at ``gate``."""
        reached = [self.gates / f"{gate}.reached-{rank}" for rank in (0, 1)]
        self.until(lambda: all(path.exists() for path in reached), f"both ranks at gate {gate}")

    def committed_is(self, step: int) -> None:
        """Wait until the checkpoint of ``step`` is committed."""
        self.until(lambda: step in self.commits(), f"step {step} is committed")

    # --- what came of it --------------------------------------------------------------------------

    @property
    def digest(self) -> str:
        """The weights' digest that the script printed at its end."""
        found = re.findall(r"weights digest: ([0-9a-f]{64})", self.out)
        return found[-1] if found else ""

    @property
    def checkpoints(self) -> Path:
        """The checkpoints' folder."""
        return self.run_dir / "checkpoints"

    def commits(self) -> list[int]:
        """Steps committed in this launch."""
        return [event.step or 0 for event in self.events("checkpoint.commit")]

    def resumes(self) -> list[object]:
        """Steps that this launch's rounds resumed from."""
        return [data["resume"] for data in self.data("round.ready")]

    def refused(self) -> list[object]:
        """Folders that were found damaged."""
        return [data["folder"] for data in self.data("checkpoint.unusable")]

    def said(self, *words: str) -> int:
        """How many of keepstep's lines hold all of ``words``."""
        ours = [line for line in self.err.splitlines() if line.startswith("keepstep: ")]
        return sum(all(word in line for word in words) for line in ours)

    def record(self) -> dict[int, dict[int, dict[str, object]]]:
        """By rank and step what the run last did there."""
        return read_record(self.gates)


def read_record(gates: Path) -> dict[int, dict[int, dict[str, object]]]:
    """The record that the script left, by rank and step; the last entry of a step counts."""
    found: dict[int, dict[int, dict[str, object]]] = {}
    for rank in (0, 1):
        lines = map(json.loads, (gates / f"record-{rank}").read_text().splitlines())
        found[rank] = {line.pop("step"): line for line in lines}
    return found


@cache
def undisturbed() -> tuple[str, dict[int, dict[int, dict[str, object]]]]:
    """Digest and record of a run in which nothing happens; made once."""
    with tempfile.TemporaryDirectory() as name:
        with Launch(Path(name)) as run:
            assert run.end() == 0, run.ending
        assert run.commits() == list(range(EVERY, STEPS + 1, EVERY))
        return run.digest, run.record()


def flip(root: Path, step: int, rank: int = 0) -> None:
    """Change one bit in the middle of a rank's shard of ``step``."""
    path = root / f"step-{step:08d}" / layout.shard_name(rank)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def keepstep(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run another command of keepstep."""
    entry = "import sys; from keepstep.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", entry, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def tree(root: Path) -> dict[str, int]:
    """Every file below ``root`` with its size."""
    return {
        str(path.relative_to(root)): path.stat().st_size
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
