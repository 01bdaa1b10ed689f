"""``keepstep report RUN``: where the time of a run went and what its faults cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from keepstep.goodput.render import full_report
from keepstep.goodput.report import build, to_json


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON, version 1.")] = False,
) -> None:
    """Show goodput, faults and checkpoints of a run, finished or not.

    Raises:
        UsageError: RUN is no run folder, or has no events.
    """
    result = build(run)
    if json:
        encoded = msgspec.json.encode(to_json(result))
        typer.echo(msgspec.json.format(encoded, indent=2).decode())
    else:
        Console().print(full_report(result))
