"""The command ``keepstep``: one module a subcommand, imported only when it is used. No torch."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keepstep.errors import ExitCode, KeepstepError

if TYPE_CHECKING:
    import typer

COMMANDS = ("run", "checkpoint", "report", "version")
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code.

    Args:
        argv: The arguments, without the program's name; ``None``: this process's.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        _write_version()
        return ExitCode.OK
    try:
        return _dispatch(arguments)
    except KeepstepError as error:
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost frame: all else is a bug of ours
        parser_says = getattr(error, "format_message", None)
        if parser_says is not None:
            _say(_about_command_line(arguments, error, str(parser_says())))
            return ExitCode.USAGE
        traceback.print_exc()
        _say(
            "this is a bug of keepstep, not of your script. Please report it with the lines above "
            "and the output of keepstep version."
        )
        return ExitCode.INTERNAL


def _dispatch(arguments: list[str]) -> int:
    import typer.main

    command = typer.main.get_command(_app(arguments))
    result = command(arguments or ["--help"], prog_name="keepstep", standalone_mode=False)
    if not arguments:
        return ExitCode.USAGE
    return result if isinstance(result, int) else ExitCode.OK


def _app(arguments: Sequence[str]) -> typer.Typer:
    """The command line with the subcommand that is used; with all of them where none is known."""
    import typer

    app = typer.Typer(
        name="keepstep",
        help="Fault-tolerant training with PyTorch FSDP: run it, see its checkpoints and its time.",
        add_completion=False,
    )

    @app.callback()
    def root(
        version: bool = typer.Option(False, "--version", help="Show the version and leave."),
    ) -> None:
        if version:
            _write_version()
            raise typer.Exit

    used = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    if used in ("", "run"):
        from keepstep.cli import run

        app.command("run", help=run.HELP, context_settings=run.CONTEXT)(
            run.command(["keepstep", *arguments])
        )
    if used in ("", "checkpoint"):
        from keepstep.cli import checkpoint

        app.add_typer(
            checkpoint.app,
            name="checkpoint",
            help="List, verify, keep, remove and convert checkpoints.",
        )
    if used in ("", "report"):
        from keepstep.cli import report

        app.command("report")(report.report)
    if used in ("", "version"):
        app.command("version", help="Show what is installed.")(_version)
    return app


def _write_version() -> None:
    from keepstep.cli.version import summary

    sys.stdout.write(summary() + "\n")


def _version() -> None:
    from keepstep.cli.version import details

    sys.stdout.write(details() + "\n")


def _about_command_line(arguments: Sequence[str], error: Exception, message: str) -> str:
    """The parser's complaint in our form; the nearest flags are named."""
    what, advice = message.rstrip("."), ""
    unknown = getattr(error, "option_name", "")
    near = getattr(error, "possibilities", None)
    if unknown and unknown in message and "No such option" in message:
        what = f"no such flag {unknown}"
        advice = f"Did you mean {' or '.join(sorted(near))}?" if near else ""
    done = "Nothing was started." if arguments[:1] == ["run"] else ""
    ended = what if what.endswith("?") else f"{what}."
    return " ".join(part for part in (ended, done, advice) if part)


def _say(text: str) -> None:
    sys.stderr.write(f"keepstep: error: {text}\n")
