"""Which faults a run injects: ``KIND@STEP:RANK`` parsed and looked up.

The launcher parses the plan to refuse a wrong one; each rank parses it again to know its own part.
A fault fires once in a run, over all incarnations of its rank: the rank claims it in the run folder
first.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from keepstep.errors import UsageError

KINDS: dict[str, str] = {
    "exception": "the rank raises",
    "desync": "the rank skips a collective, the others run into their time limit",
    "kill": "the rank's process gets SIGKILL",
    "hang": "the rank sleeps for ever",
    "spin": "the rank never gives the interpreter lock back",
    "stop": "the rank's process gets SIGSTOP",
    "oom": "the kernel kills the rank's process for lack of memory",
    "exit": "the rank's process ends with exit code 3",
}
_FORM = "KIND@STEP:RANK, as in kill@12:1"
_SPEC = re.compile(r"(?P<kind>[^@:]*)@(?P<step>[^@:]*):(?P<rank>[^@:]*)")
_COUNT = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault: ``kind`` strikes ``rank`` in ``step``; ``index`` is its place in the plan."""

    kind: str
    step: int
    rank: int
    index: int

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}:{self.rank}"


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All faults of a run, in the order given."""

    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, specs: Sequence[str], world: int) -> FaultPlan:
        """Read ``specs``, each ``KIND@STEP:RANK``, for a job of ``world`` ranks.

        Raises:
            UsageError: one or more of them cannot be used; the message names all.
        """
        faults: list[Fault] = []
        problems: list[str] = []
        for index, spec in enumerate(specs):
            fault = _parse(spec, index, world)
            if isinstance(fault, str):
                problems.append(f"the fault {spec!r} cannot be used: {fault}")
            else:
                faults.append(fault)
        if problems:
            raise UsageError(
                "; ".join(problems),
                advice=f"A fault is {_FORM}; kinds are {', '.join(KINDS)}",
            )
        return cls(faults=tuple(faults))

    def due(self, rank: int, step: int) -> tuple[Fault, ...]:
        """The faults of ``rank`` in ``step``, in the plan's order, fired or not."""
        return tuple(f for f in self.at(step) if f.rank == rank)

    def at(self, step: int) -> tuple[Fault, ...]:
        """The faults of all ranks in ``step``, in the plan's order, fired or not."""
        return tuple(fault for fault in self.faults if fault.step == step)


def claim(run_dir: Path, index: int) -> bool:
    """Whether the fault at place ``index`` may fire now: true once in a run.

    Raises:
        OSError: the run folder cannot be written.
    """
    folder = run_dir / "faults"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(folder / f"{index}.fired", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    os.close(fd)
    return True


def claimed(run_dir: Path, index: int) -> bool:
    """Whether the fault at place ``index`` has fired."""
    return (run_dir / "faults" / f"{index}.fired").exists()


def _parse(spec: str, index: int, world: int) -> Fault | str:
    """The fault, or what is wrong with ``spec``."""
    match = _SPEC.fullmatch(spec.strip())
    if match is None:
        return f"it has not the form {_FORM}"
    kind = match["kind"].strip()
    if kind not in KINDS:
        near = difflib.get_close_matches(kind.lower(), KINDS, n=1, cutoff=0.0)
        return f"there is no kind {kind!r} (the nearest is {near[0]!r})"
    numbers: dict[str, int] = {}
    for name in ("step", "rank"):
        text = match[name].strip()
        if not _COUNT.fullmatch(text):
            return f"the {name} {text!r} is not a whole number"
        numbers[name] = int(text)
    if numbers["step"] < 1:
        return f"step {numbers['step']} does not exist, the first step is 1"
    if not 0 <= numbers["rank"] < world:
        return f"rank {numbers['rank']} does not exist, the job has ranks 0 to {world - 1}"
    return Fault(kind=kind, step=numbers["step"], rank=numbers["rank"], index=index)
