"""Runs ``keepstep checkpoint`` in this process."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from keepstep.cli.checkpoint import app


def run_command(*arguments: str | Path) -> Result:
    """What a command printed and how it ended."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])
