"""``keepstep checkpoint ls|verify|inspect RUN``: look at the checkpoints of a run.

RUN is the run's folder (its checkpoints lie under ``checkpoints``) or a folder with ``step-*``
folders itself.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from keepstep.checkpoint import catalog, layout, manifest, verify
from keepstep.checkpoint.manifest import Manifest
from keepstep.errors import CheckpointNotFound, ExitCode, KeepstepError, UsageError

app = typer.Typer(name="checkpoint", help="Look at the checkpoints of a run.", no_args_is_help=True)

_OURS = "safetensors"

Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or a folder of checkpoints.")]
Step = Annotated[int | None, typer.Option("--step", help="Only checkpoints of this step.")]


@app.command("ls")
def list_command(run: Run) -> None:
    """List the committed checkpoints, newest first."""
    with _errors():
        root = _root(run)
        infos = catalog.committed(root)
        good = {info.folder for info in infos}
        damaged = [name for name in catalog.published(root) if name not in good]
        unfinished = catalog.unfinished(root)
        if not infos:
            raise _nothing(root, damaged, unfinished)
        # Only where files of other libraries are among them is it worth a column.
        foreign = any(info.layout != _OURS for info in infos)
        rows = [
            [
                str(info.step),
                info.folder,
                str(info.version.world),
                f"{info.version.term}/{info.version.round}",
                _size(info.nbytes),
                _when(info.created),
                *([info.layout] if foreign else []),
                info.version.run,
            ]
            for info in infos
        ]
        head = ["step", "folder", "ranks", "term/round", "size", "committed"]
        _table([*head, *(["layout"] if foreign else []), "run"], rows)
        for name in damaged:
            typer.echo(f"damaged, never used for a restore: {name}")
        for name in unfinished:
            typer.echo(f"not committed: {name}")


@app.command("verify")
def verify_command(
    run: Run,
    step: Step = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Compare sizes and headers only; do not read the data.")
    ] = False,
) -> None:
    """Check that checkpoints are still what was committed; exit code 1 if one is not."""
    with _errors():
        root = _root(run)
        bad = 0
        for folder in _choose(root, step):
            problems = verify.verify(root, folder, deep=not quick)
            typer.echo(f"{folder}: {'BAD' if problems else 'good'}{_layout(root, folder)}")
            for problem in problems:
                typer.echo(f"  {problem.file}: {problem.kind}: {problem.detail}")
            bad += bool(problems)
        if bad:
            raise typer.Exit(ExitCode.NEGATIVE)


@app.command("inspect")
def inspect_command(
    run: Run,
    step: Step = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is in a checkpoint: the newest one, or that of a step."""
    with _errors():
        root = _root(run)
        infos = [info for info in catalog.committed(root) if step in (None, info.step)]
        # A damaged one is shown by its error rather than passed over for an older one.
        folder = infos[0].folder if infos else _choose(root, step)[-1]
        found = catalog.load(root, folder)
        if as_json:
            text = msgspec.json.encode(_summary(folder, found))
            typer.echo(msgspec.json.format(text, indent=2).decode())
        else:
            _show(folder, found)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
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


def _root(run: str) -> Path:
    """The folder of checkpoints that the argument means."""
    path = Path(run)
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise UsageError(f"{run} {what}", advice="give the run's folder, for example runs/<run id>")
    inner = path / "checkpoints"
    if inner.is_dir() and not layout.list_folders(path):
        return inner
    return path


def _choose(root: Path, step: int | None) -> list[str]:
    """Folders with a manifest, oldest step first."""
    folders = [name for name in catalog.published(root) if step in (None, _step_of(name))]
    if not folders:
        where = "" if step is None else f" of step {step}"
        raise _nothing(root, [], catalog.unfinished(root), where)
    return sorted(folders, key=lambda name: (_step_of(name), name))


def _step_of(folder: str) -> int:
    parsed = layout.parse_folder(folder)
    return -1 if parsed is None else parsed.step


def _layout(root: Path, folder: str) -> str:
    """Whose files the checkpoint consists of, if not ours and if it says so readably."""
    try:
        found = manifest.decode((root / folder / layout.MANIFEST).read_bytes()).layout
    except (KeepstepError, OSError):
        return ""  # what is wrong with the manifest is listed
    return "" if found == _OURS else f" ({found} files)"


def _nothing(
    root: Path, damaged: Sequence[str], unfinished: Sequence[str], which: str = ""
) -> CheckpointNotFound:
    return CheckpointNotFound(
        f"there is no committed checkpoint{which}; {len(damaged)} are damaged, "
        f"{len(unfinished)} were never committed",
        where=str(root),
        advice="see what is wrong with 'keepstep checkpoint verify'"
        if damaged
        else "give a run folder that has checkpoints",
    )


def _summary(folder: str, found: Manifest) -> dict[str, Any]:
    return {
        "v": 1,
        "folder": folder,
        "format": found.format,
        "version": found.version,
        "created": found.created,
        "layout": found.layout,
        "bytes": found.nbytes,
        "files": found.files,
        "others": found.others,
        "tensors": found.tensors,
        "rank_tensors": found.rank_tensors,
        "values": {
            "shared": sorted(found.values),
            "by_rank": {str(rank): sorted(keys) for rank, keys in found.rank_values.items()},
        },
    }


def _show(folder: str, found: Manifest) -> None:
    version = found.version
    typer.echo(
        f"{folder}: step {version.step} of run {version.run}, term {version.term}, round "
        f"{version.round}, {version.world} ranks, {_size(found.nbytes)}, committed "
        f"{_when(found.created)}, format {found.format}, {found.layout} files"
    )
    _table(
        ["file", "size", "xxh3-128"],
        [[name, _size(info.size), info.checksum] for name, info in found.all_files().items()],
    )
    _table(
        ["tensor", "dtype", "global shape", "shards"],
        [
            [name, info.dtype, str(list(info.global_shape)), str(len(info.chunks))]
            for name, info in found.tensors.items()
        ],
    )
    if found.rank_tensors:
        _table(
            ["tensor of single ranks", "dtype", "shape", "ranks"],
            [
                [name, owners[0].dtype, str(list(owners[0].shape)), str(len(owners))]
                for name, owners in found.rank_tensors.items()
            ],
        )
    own = sorted({key for values in found.rank_values.values() for key in values})
    typer.echo(f"values, same on all ranks: {', '.join(sorted(found.values)) or '-'}")
    typer.echo(f"values by rank: {', '.join(own) or '-'}")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; without frames, colours and cuts when the output is not a terminal."""
    console = Console()
    if console.is_terminal:
        table = Table(*head)
        for row in rows:
            table.add_row(*row)
        console.print(table, markup=False)
        return
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())


def _size(count: int) -> str:
    """``count`` bytes for people, in powers of 1024."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
