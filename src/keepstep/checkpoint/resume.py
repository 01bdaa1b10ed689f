"""Finds the checkpoint of another run, or another library, that a new run starts from.

Used by whoever decides where a run resumes. Nothing is ever written into what is found here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from pathlib import Path

from keepstep.checkpoint import catalog, layout
from keepstep.checkpoint.lineage import is_abandoned, read_resumes
from keepstep.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound

_DCP = ".metadata"
_TERMS = "terms"
_CHECKPOINTS = "checkpoints"

OnDamaged = Callable[[str, int, str], None]
"""Told of a checkpoint that is passed over: folder, step, error."""


def finder(
    path: str | os.PathLike[str] | None, on_damaged: OnDamaged
) -> Callable[[Collection[str]], tuple[int, str]] | None:
    """``find`` in ``path`` with what to exclude as its only argument; None if there is no path.

    The path is made absolute now. ``on_damaged`` is told once of each checkpoint.
    """
    if not path:
        return None
    place, told = Path(path).expanduser().absolute(), set[str]()

    def tell(folder: str, step: int, error: str) -> None:
        if folder not in told:
            told.add(folder)
            on_damaged(folder, step, error)

    return lambda exclude: find(place, exclude, tell)


def find(path: Path, exclude: Collection[str], on_damaged: OnDamaged) -> tuple[int, str]:
    """Step and absolute path of the checkpoint to start from.

    Args:
        path: A checkpoint, which is then the only one that will do; or a folder of checkpoints, or
            a run folder, of which the newest good one is taken; or a folder of torch's distributed
            checkpoints, which has no step (0).
        exclude: Absolute paths of checkpoints that were found damaged.
        on_damaged: Told of each published checkpoint newer than the one taken whose files are not
            what was committed; more than once if this is called more than once.

    Raises:
        CheckpointNotFound: there is none.
        CheckpointCorrupt: the one that was named is damaged.
        CheckpointError: one was written by a newer keepstep.
        OSError: storage failed.
    """
    path = path.absolute()
    named = layout.is_published(path / layout.MANIFEST)
    if named or (path / _DCP).is_file():
        if str(path) in exclude:
            raise CheckpointCorrupt(
                "the checkpoint to start from is damaged",
                where=str(path),
                done="nothing was restored",
                advice="name another one in checkpoint.resume_from",
            )
        return (catalog.load(path.parent, path.name).version.step if named else 0), str(path)
    root = path if layout.list_folders(path) else path / _CHECKPOINTS
    resumes = read_resumes(_terms(root))
    found = [info for info in catalog.committed(root) if not is_abandoned(info.version, resumes)]
    good = [info for info in found if str(root / info.folder) not in exclude]
    _tell_damaged(root, good[0].step if good else 0, on_damaged)
    if good:
        return good[0].step, str(root / good[0].folder)
    raise CheckpointNotFound(
        f"there is no checkpoint to start from in {path}",
        done="nothing was restored",
        advice="name a checkpoint, a folder of checkpoints or a run folder in "
        "checkpoint.resume_from, and see them with 'keepstep checkpoint ls'",
    )


def step_of(root: Path, folder: str) -> int:
    """Step of the checkpoint ``folder``, a name under ``root`` or an absolute path; 0 if it has no.

    Raises:
        CheckpointError: its manifest cannot be used.
        OSError: storage failed.
    """
    path = root / folder
    name = layout.parse_folder(path.name)
    if name is not None:
        return name.step
    if layout.is_published(path / layout.MANIFEST):
        return catalog.load(path.parent, path.name).version.step
    return 0


def _terms(root: Path) -> Path:
    """Where the run that has its checkpoints in ``root`` wrote down its rounds."""
    return root.parent / _TERMS if (root.parent / _TERMS).is_dir() else root / _TERMS


def _tell_damaged(root: Path, step: int, on_damaged: OnDamaged) -> None:
    for folder in reversed(catalog.published(root)):
        name = layout.parse_folder(folder)
        if name is None or name.step <= step:
            continue
        with contextlib.suppress(OSError):
            try:
                catalog.load(root, folder)
            except CheckpointError as error:
                on_damaged(str(root / folder), name.step, str(error))
