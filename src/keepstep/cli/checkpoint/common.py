"""What the commands about checkpoints share: their arguments, errors, tables and progress bars."""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from keepstep.checkpoint import catalog, layout
from keepstep.errors import CheckpointNotFound, ExitCode, KeepstepError, UsageError

Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or a folder of checkpoints.")]
Step = Annotated[int | None, typer.Option("--step", help="Only checkpoints of this step.")]
Which = Annotated[
    list[str],
    typer.Argument(metavar="STEP...", help="Steps, or names of folders where a step has several."),
]

OURS = "safetensors"
"""Layout of our own files."""
_BAR_FROM = 64 << 20
"""Work on fewer bytes is over before a bar can be read."""


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Turn errors into one line on stderr and their exit code."""
    try:
        yield
    except KeepstepError as error:
        typer.echo(f"keepstep: error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    except BrokenPipeError:
        raise  # the reader of our output has seen enough
    except OSError as error:
        typer.echo(f"keepstep: error: the checkpoint cannot be read: {error}", err=True)
        raise typer.Exit(ExitCode.CHECKPOINT) from error


def root_of(run: str) -> Path:
    """The folder of checkpoints that the argument means.

    Raises:
        UsageError: it is no folder.
    """
    path = Path(run)
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise UsageError(f"{run} {what}", advice="give the run's folder, for example runs/<run id>")
    inner = path / "checkpoints"
    if inner.is_dir() and not layout.list_folders(path):
        return inner
    return path


def choose(root: Path, step: int | None) -> list[str]:
    """Folders with a manifest, oldest step first.

    Raises:
        CheckpointNotFound: there are none.
    """
    folders = [name for name in catalog.published(root) if step in (None, step_of(name))]
    if not folders:
        where = "" if step is None else f" of step {step}"
        raise nothing(root, 0, len(catalog.unfinished(root)), where)
    return sorted(folders, key=lambda name: (step_of(name), name))


def choose_one(root: Path, step: int | None) -> str:
    """The folder that a restore would take: the newest good one, or that of ``step``.

    A damaged one is returned, too, rather than passed over, if there is no good one.
    """
    infos = [info for info in catalog.committed(root) if step in (None, info.step)]
    return infos[0].folder if infos else choose(root, step)[-1]


def step_of(folder: str) -> int:
    """The step in a folder's name; -1 if it is no checkpoint's."""
    parsed = layout.parse_folder(folder)
    return -1 if parsed is None else parsed.step


def nothing(root: Path, damaged: int, unfinished: int, which: str = "") -> CheckpointNotFound:
    """The error for a folder without a checkpoint that can be used."""
    return CheckpointNotFound(
        f"there is no committed checkpoint{which}; {damaged} are damaged, "
        f"{unfinished} were never committed",
        where=str(root),
        advice="see what is wrong with 'keepstep checkpoint verify'"
        if damaged
        else "give a run folder that has checkpoints",
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; without frames, colours and cuts when it does not go to a terminal or fit there."""
    console = Console()
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    if console.is_terminal and sum(widths) + 3 * len(widths) < console.width:
        framed = Table(*head)
        for row in rows:
            framed.add_row(*row)
        console.print(framed, markup=False)
        return
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


def size(count: int) -> str:
    """``count`` bytes for people, in powers of 1024."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def when(seconds: float) -> str:
    """A wall time for people."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


@contextlib.contextmanager
def progress_bar(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while ``nbytes`` bytes are worked on; nothing where nobody sees it.

    Yields:
        To be told how many more bytes are done, by any thread.
    """
    console = Console(stderr=True)
    if not console.is_terminal or nbytes < _BAR_FROM:
        yield lambda count: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=nbytes)
        yield lambda count: progress.advance(task, count)


def agreed(question: str, yes: bool) -> bool:
    """Whether the user wants it: said by ``--yes``, or asked on a terminal.

    Raises:
        UsageError: there is nobody to ask.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(
            "this command asks before it removes anything, and its input is no terminal",
            done="nothing was changed",
            advice="give --yes",
        )
    return typer.confirm(question, default=False)
