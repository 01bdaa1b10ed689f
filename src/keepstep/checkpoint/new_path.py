"""A file or folder that appears whole under its name, or not at all.

Used by the command line for what it makes outside of checkpoint folders.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from keepstep.checkpoint import layout
from keepstep.errors import UsageError


def check(path: Path) -> None:
    """Raise UsageError if ``path`` cannot be made new."""
    if os.path.lexists(path):
        raise _there(path)
    if not path.absolute().parent.is_dir():
        raise UsageError(
            f"the folder of {path} does not exist",
            done="nothing was written",
            advice="make it, or give another name",
        )


@contextlib.contextmanager
def made(path: Path) -> Iterator[Path]:
    """A name beside ``path``, whose contents get the name ``path`` when all is done.

    The file or folder is made by the caller. It is durable afterwards; after an exception nothing
    is left of it.

    Raises:
        UsageError: ``path`` is there already, or its folder is not.
        OSError: storage failed.
    """
    check(path)
    path = path.absolute()
    temporary = path.with_name(layout.temporary_name(path.name))
    try:
        yield temporary
        _sync(temporary)
        if os.path.lexists(path):
            raise _there(path)
        temporary.rename(path)
        layout.sync_folder(path.parent)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    for one in [path, *path.rglob("*")] if path.is_dir() else [path]:
        fd = os.open(one, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _there(path: Path) -> UsageError:
    return UsageError(
        f"{path} exists",
        done="nothing was written, and it was not changed",
        advice="give a name that is free",
    )
