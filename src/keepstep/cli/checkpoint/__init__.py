"""``keepstep checkpoint COMMAND RUN``: look at, check, keep, remove and convert checkpoints.

RUN is the run's folder (its checkpoints lie under ``checkpoints``) or a folder with ``step-*``
folders itself. Only ``export`` and ``import`` need torch, and load it when they are used.
"""

from __future__ import annotations

import typer

from keepstep.cli.checkpoint import changing, checking, converting, listing

app = typer.Typer(
    name="checkpoint",
    help="List, verify, keep, remove and convert the checkpoints of a run.",
    no_args_is_help=True,
)
app.command("ls")(listing.list_command)
app.command("inspect")(listing.inspect_command)
app.command("verify")(checking.verify_command)
app.command("pin")(changing.pin_command)
app.command("unpin")(changing.unpin_command)
app.command("rm")(changing.remove_command)
app.command("export")(converting.export_command)
app.command("import")(converting.import_command)
