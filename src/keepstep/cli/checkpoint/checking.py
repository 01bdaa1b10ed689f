"""``keepstep checkpoint verify``: whether checkpoints are still what was committed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from keepstep.checkpoint import layout, manifest, verify
from keepstep.checkpoint.verify import Problem
from keepstep.cli.checkpoint.common import OURS, Run, Step, choose, errors, progress_bar, root_of
from keepstep.errors import ExitCode, KeepstepError

_RANGES = 20


class _Verdict(msgspec.Struct, frozen=True, kw_only=True):
    folder: str
    good: bool
    problems: Sequence[Problem]


def verify_command(
    run: Run,
    step: Step = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Compare sizes and headers only; do not read the data.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that checkpoints are still what was committed; exit code 1 if one is not."""
    with errors():
        root = root_of(run)
        folders = choose(root, step)
        verdicts: list[_Verdict] = []
        total = 0 if quick else sum(_bytes(root, folder) for folder in folders)
        with progress_bar("verifying", total) as more:
            for folder in folders:
                problems = verify.verify(root, folder, deep=not quick, progress=more)
                verdicts.append(_Verdict(folder=folder, good=not problems, problems=problems))
        if as_json:
            found = {"v": 1, "root": str(root), "checkpoints": verdicts}
            typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        else:
            for verdict in verdicts:
                _print(root, verdict)
        if not all(verdict.good for verdict in verdicts):
            raise typer.Exit(ExitCode.NEGATIVE)


def _print(root: Path, verdict: _Verdict) -> None:
    state = "good" if verdict.good else "BAD"
    typer.echo(f"{verdict.folder}: {state}{_layout(root, verdict.folder)}")
    for problem in verdict.problems:
        typer.echo(f"  {problem.file}: {problem.kind}: {problem.detail}")
        # The detail names the first few; who looks for the sectors wants more of them.
        for start, stop in problem.ranges[:_RANGES] if len(problem.ranges) > 1 else ():
            typer.echo(f"    bytes {start} to {stop - 1}")
        if len(problem.ranges) > _RANGES:
            typer.echo(f"    and {len(problem.ranges) - _RANGES} more ranges; --json has them all")


def _bytes(root: Path, folder: str) -> int:
    """How much will be read."""
    try:
        return manifest.decode((root / folder / layout.MANIFEST).read_bytes()).nbytes
    except (KeepstepError, OSError):
        return 0  # what is wrong with the manifest is listed


def _layout(root: Path, folder: str) -> str:
    """Whose files the checkpoint consists of, if not ours and if it says so readably."""
    try:
        found = manifest.decode((root / folder / layout.MANIFEST).read_bytes()).layout
    except (KeepstepError, OSError):
        return ""
    return "" if found == OURS else f" ({found} files)"
