"""``keepstep checkpoint pin``, ``unpin`` and ``rm``: what stays and what goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from keepstep.checkpoint import catalog, layout
from keepstep.cli.checkpoint.common import Run, Which, agreed, errors, root_of, size, step_of
from keepstep.errors import CheckpointNotFound, UsageError


def pin_command(
    run: Run,
    which: Which,
    reason: Annotated[str, typer.Option("--reason", help="Why, for whoever reads ls.")] = "",
) -> None:
    """Keep checkpoints: retention and rm leave them alone."""
    with errors():
        root = root_of(run)
        for folder in _folders(root, which, catalog.published(root)):
            was = not catalog.pin(root, folder, reason)
            typer.echo(f"{folder}: {'was pinned already' if was else 'pinned'}")


def unpin_command(run: Run, which: Which) -> None:
    """Leave pinned checkpoints to retention again."""
    with errors():
        root = root_of(run)
        for folder in _folders(root, which, catalog.published(root)):
            was = catalog.unpin(root, folder)
            typer.echo(f"{folder}: {'no longer pinned' if was else 'was not pinned'}")


def remove_command(
    run: Run,
    which: Which,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also the last good one, pinned ones, and what was never committed.",
        ),
    ] = False,
) -> None:
    """Remove checkpoints; the last good one and pinned ones only with --force."""
    with errors():
        root = root_of(run)
        folders = _folders(root, which, layout.list_folders(root))
        if not force:
            _refuse(root, folders)
        nbytes = sum(_size(root / folder) for folder in folders)
        many = f"{len(folders)} checkpoints" if len(folders) > 1 else "1 checkpoint"
        named = f"{many} ({size(nbytes)}): {', '.join(folders)}"
        if not agreed(f"Remove {named}?", yes):
            typer.echo("nothing was removed")
            return
        for folder in folders:
            catalog.remove(root, folder)
        typer.echo(f"removed {named}")


def _folders(root: Path, which: Sequence[str], among: Sequence[str]) -> list[str]:
    """The folders that the arguments name, in their order.

    Raises:
        CheckpointNotFound: there is none for one of them.
        UsageError: a step has several folders, of which one must be named.
    """
    found: list[str] = []
    for one in which:
        named = [name for name in among if name == one]
        steps = [name for name in among if one.isdecimal() and step_of(name) == int(one)]
        if not named and not steps:
            raise CheckpointNotFound(
                f"there is no checkpoint {one if not one.isdecimal() else f'of step {one}'}",
                where=str(root),
                done="nothing was changed",
                advice="see what is there with 'keepstep checkpoint ls'",
            )
        if len(steps) > 1:
            raise UsageError(
                f"step {one} has {len(steps)} folders: {', '.join(steps)}",
                where=str(root),
                done="nothing was changed",
                advice="name the folder instead of the step",
            )
        found += [name for name in named or steps if name not in found]
    return found


def _refuse(root: Path, folders: Sequence[str]) -> None:
    """Raise UsageError if one of ``folders`` must not go without being asked for twice."""
    good = [info.folder for info in catalog.committed(root)]
    pinned = [folder for folder in folders if catalog.is_pinned(root, folder)]
    unfinished = set(catalog.unfinished(root)).intersection(folders)
    why, advice = "", ""
    if good and set(good) <= set(folders):
        why = f"{good[0]} is the last good checkpoint: without it nothing can be restored"
        advice = "keep it, or give --force"
    elif pinned:
        why = f"{', '.join(pinned)} {'is' if len(pinned) == 1 else 'are'} pinned"
        advice = "unpin it first, or give --force"
    elif unfinished:
        why = f"{', '.join(sorted(unfinished))} was never committed: a save may be in flight"
        advice = "leave it to the next commit, which removes what is overtaken, or give --force"
    if why:
        raise UsageError(why, where=str(root), done="nothing was removed", advice=advice)


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.iterdir())
