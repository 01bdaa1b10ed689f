"""``keepstep run``: flags as torchrun has them, everything checked, then over to the agent.

Runs in the process that becomes the agent; no torch here.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from keepstep.agent.ft_command import contradictions
from keepstep.agent.launch_spec import Launch
from keepstep.agent.nvrx_requirements import check, installed
from keepstep.cli.dry_run import dry_run
from keepstep.cli.flags import DRY_RUN, FLAGS, Flag
from keepstep.cli.launch_plan import Request, plan
from keepstep.cli.machine import ThisMachine, check_address, prepare_folders
from keepstep.cli.reader import NOTHING_STARTED
from keepstep.cli.target import check_target
from keepstep.config import env
from keepstep.errors import ExitCode, UsageError
from keepstep.policy.differences import differences

_TARGET = "script"
_REST = "arguments"

HELP = (
    "Run a training script on this node, and keep it running.\n\n"
    "Takes the place of torchrun: the same flags (with dashes or underscores), the same PET_* "
    "variables, the same environment for ranks. A flag that cannot be honoured is refused with the "
    "reason, never ignored. Flags stand before SCRIPT; everything after it belongs to the script."
)


def run(argv: list[str], options: dict[str, object], target: str, args: list[str]) -> int:
    """Check everything, then start the ranks; returns the exit code.

    Args:
        argv: keepstep's own command line.
        options: By flag name, as ``Request`` has them.
        target: Script, module or program.
        args: The target's arguments.

    Raises:
        KeepstepError: something cannot be used; nothing was started.
    """
    environ = env.snapshot()
    folder = Path.cwd()
    request = Request(
        options=options, target=target, args=args, argv=argv, environ=environ, folder=folder
    )
    launch = plan(request, ThisMachine(environ))
    found = installed()
    check(launch.config, found)
    launch = dataclasses.replace(launch, target=check_target(launch.mode, target, environ, folder))
    if launch.nnodes == 1:
        check_address(launch.master_addr, launch.master_port)
    _tell(launch)
    if options.get(DRY_RUN):
        print(dry_run(launch, environ, python=sys.executable, version=found.nvrx), end="")
        return ExitCode.OK
    limit_s = launch.config.checkpoint.stall_s
    prepare_folders(launch.run_dir, launch.log_dir, launch.run_id, limit_s)
    from keepstep.agent.launch import launch as start

    return start(launch)


def _tell(launch: Launch) -> None:
    """Say once what NVRx does otherwise, and which variables stand in its way."""
    for one in differences(launch.config.engine.parts):
        print(f"keepstep: difference {one.clause}: {one.text}", file=sys.stderr)
    for warning in contradictions(launch):
        print(f"keepstep: warning: {warning}", file=sys.stderr)


def command(argv: list[str]) -> Callable[..., int]:
    """The function that typer makes the command of: one parameter for each flag.

    Args:
        argv: keepstep's own command line, for the record.
    """

    def call(**values: object) -> int:
        target = values.pop(_TARGET)
        rest = values.pop(_REST)
        if not isinstance(target, str) or not target:
            raise UsageError(
                "no script was given",
                done=NOTHING_STARTED,
                advice="Write it after the flags: keepstep run --nproc-per-node 2 train.py; "
                "keepstep run --help lists the flags",
            )
        options = {flag.name: values[flag.parameter] for flag in FLAGS}
        return run(argv, options, target, list(rest) if isinstance(rest, list | tuple) else [])

    parameters = list(_parameters())
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call


def _parameters() -> Iterator[inspect.Parameter]:
    keyword = inspect.Parameter.KEYWORD_ONLY
    for flag in FLAGS:
        yield inspect.Parameter(
            flag.parameter, keyword, default=_default(flag), annotation=_annotation(flag)
        )
    target = typer.Argument(
        help="Script, module or program to run.", metavar="SCRIPT", show_default=False
    )
    rest = typer.Argument(help="Its arguments.", metavar="ARGUMENTS...", show_default=False)
    yield inspect.Parameter(_TARGET, keyword, default="", annotation=Annotated[str, target])
    yield inspect.Parameter(
        _REST, keyword, default=None, annotation=Annotated[list[str] | None, rest]
    )


def _default(flag: Flag) -> object:
    return False if flag.switch else None


def _annotation(flag: Flag) -> object:
    names = [f"-{flag.short}"] if flag.short else []
    option = typer.Option(
        f"--{flag.name}",
        *names,
        help=flag.help,
        metavar=flag.metavar or " ",
        rich_help_panel=flag.panel,
        hidden=bool(flag.refused),
        show_default=False,
    )
    if flag.switch:
        return Annotated[bool, option]
    if flag.repeat:
        return Annotated[list[str] | None, option]
    return Annotated[str | None, option]


CONTEXT = {
    "allow_interspersed_args": False,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
"""How the parser is to behave: stop at the script, and take both spellings of a flag."""
