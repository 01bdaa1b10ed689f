"""``keepstep checkpoint ls`` and ``inspect``: what is there, and what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from keepstep.checkpoint import catalog, layout
from keepstep.checkpoint.manifest import Manifest
from keepstep.checkpoint.writer import owner
from keepstep.cli.checkpoint.common import (
    OURS,
    Run,
    Step,
    choose_one,
    errors,
    nothing,
    root_of,
    size,
    step_of,
    table,
    when,
)
from keepstep.errors import CheckpointCorrupt

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A folder of a checkpoint as ``ls`` shows it.

    ``state`` is good, damaged or unfinished. What an unreadable folder does not tell is None;
    ``bytes`` are then those on storage.
    """

    step: int
    folder: str
    state: str
    pinned: bool
    reason: str = ""
    problem: str = ""
    created: float | None = None
    bytes: int
    world: int | None = None
    run: str | None = None
    term: int | None = None
    round: int | None = None
    layout: str = OURS


def list_command(run: Run, as_json: AsJson = False) -> None:
    """List the checkpoints, newest first: step, state, time, size, world and run."""
    with errors():
        root = root_of(run)
        rows = _rows(root)
        if as_json:
            found = {"v": 1, "root": str(root), "checkpoints": rows}
            typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
            return
        if rows:
            _print(rows)
        if all(row.state != "good" for row in rows):
            damaged = sum(row.state == "damaged" for row in rows)
            raise nothing(root, damaged, len(rows) - damaged)


def _rows(root: Path) -> list[Row]:
    good = {info.folder: info for info in catalog.committed(root)}
    rows = [
        Row(
            step=info.step,
            folder=info.folder,
            state="good",
            pinned=info.pinned,
            reason=catalog.pin_reason(root, info.folder),
            created=info.created,
            bytes=info.nbytes,
            world=info.version.world,
            run=info.version.run,
            term=info.version.term,
            round=info.version.round,
            layout=info.layout,
        )
        for info in good.values()
    ]
    published = set(catalog.published(root))
    rows += [
        _other(root, folder, folder in published)
        for folder in layout.list_folders(root)
        if folder not in good
    ]
    order = {folder: place for place, folder in enumerate(good)}
    rows.sort(key=lambda row: (-row.step, order.get(row.folder, len(order)), row.folder))
    return rows


def _other(root: Path, folder: str, published: bool) -> Row:
    """A folder that no restore takes."""
    version = owner(root / folder)
    problem = "" if published else "it was never committed, or a save of it is in flight"
    if published:
        try:
            catalog.load(root, folder)
        except (CheckpointCorrupt, OSError) as error:
            problem = error.what if isinstance(error, CheckpointCorrupt) else str(error)
    return Row(
        step=step_of(folder),
        folder=folder,
        state="damaged" if published else "unfinished",
        pinned=catalog.is_pinned(root, folder),
        reason=catalog.pin_reason(root, folder),
        problem=problem,
        bytes=_on_storage(root / folder),
        world=None if version is None else version.world,
        run=None if version is None else version.run,
        term=None if version is None else version.term,
        round=None if version is None else version.round,
    )


def _on_storage(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        try:
            total += path.lstat().st_size
        except OSError:
            continue  # a save that goes on renames its files
    return total


def _print(rows: list[Row]) -> None:
    # Only where files of other libraries are among them is it worth a column.
    foreign = any(row.layout != OURS for row in rows)
    head = ["step", "state", "committed", "size", "world", "run", "term/round", "folder"]
    table(
        [*head, *(["files"] if foreign else [])],
        [
            [
                str(row.step),
                f"{row.state}, pinned" if row.pinned else row.state,
                "-" if row.created is None else when(row.created),
                size(row.bytes),
                _or_dash(row.world),
                _or_dash(row.run),
                "-" if row.term is None else f"{row.term}/{row.round}",
                row.folder,
                *([row.layout] if foreign else []),
            ]
            for row in rows
        ],
    )
    for row in rows:
        if row.state == "damaged":
            typer.echo(f"{row.folder} is damaged and never used for a restore: {row.problem}")
        if row.pinned and row.reason:
            typer.echo(f"{row.folder} is pinned: {row.reason}")


def _or_dash(value: object) -> str:
    return str(value) if value not in (None, "") else "-"


def inspect_command(run: Run, step: Step = None, as_json: AsJson = False) -> None:
    """Show what is in a checkpoint: the newest one, or that of a step."""
    with errors():
        root = root_of(run)
        folder = choose_one(root, step)
        found = catalog.load(root, folder)
        if as_json:
            text = msgspec.json.encode(_summary(folder, found))
            typer.echo(msgspec.json.format(text, indent=2).decode())
        else:
            _show(folder, found)


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
        f"{version.round}, {version.world} ranks, {size(found.nbytes)}, committed "
        f"{when(found.created)}, format {found.format}, {found.layout} files"
    )
    table(
        ["file", "size", "xxh3-128"],
        [[name, size(info.size), info.checksum] for name, info in found.all_files().items()],
    )
    table(
        ["tensor", "dtype", "global shape", "shards"],
        [
            [name, info.dtype, str(list(info.global_shape)), str(len(info.chunks))]
            for name, info in found.tensors.items()
        ],
    )
    if found.rank_tensors:
        table(
            ["tensor of single ranks", "dtype", "shape", "ranks"],
            [
                [name, owners[0].dtype, str(list(owners[0].shape)), str(len(owners))]
                for name, owners in found.rank_tensors.items()
            ],
        )
    own = sorted({key for values in found.rank_values.values() for key in values})
    typer.echo(f"values, same on all ranks: {', '.join(sorted(found.values)) or '-'}")
    typer.echo(f"values by rank: {', '.join(own) or '-'}")
