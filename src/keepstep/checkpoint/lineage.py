"""Terms and rounds of a run on shared storage, and which checkpoints they leave behind.

Whoever decides where a run resumes (the coordinator, or rank 0 where there is none) claims a term
by exclusive creation of ``terms/N`` and appends a line for every round that goes on: the step it
resumed from. A checkpoint counts only if no later round resumed below its step; otherwise it
belongs to an abandoned line of training.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from keepstep.checkpoint import catalog, layout
from keepstep.checkpoint.writer import owner
from keepstep.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointNotFound
from keepstep.wire.types import Version

Resume = tuple[int, int, int]
"""Term, round, and the step after which it went on."""


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a term's file: round ``round`` went on after step ``resume``."""

    run: str
    round: int
    resume: int


class Lineage:
    """The history of a run, and the term that this instance claimed.

    Args:
        run_dir: Run folder. run: Its id. root: Folder of the checkpoints.
        on_damaged: Told once of each published checkpoint that is passed over because its files
            are not what was committed: folder, step, error.
        elsewhere: What gives step and absolute path of another run's checkpoint to start from while
            this run has none, but for those found damaged (see ``resume.finder``).
    """

    def __init__(
        self,
        run_dir: Path,
        run: str,
        root: Path,
        on_damaged: Callable[[str, int, str], None] = lambda folder, step, error: None,
        elsewhere: Callable[[Collection[str]], tuple[int, str]] | None = None,
    ) -> None:
        self._run = run
        self._elsewhere = elsewhere
        self._root = root
        self._on_damaged = on_damaged
        self._told: set[str] = set()
        folder = run_dir / "terms"
        folder.mkdir(parents=True, exist_ok=True)
        self._resumes = read_resumes(folder)
        numbers = [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
        self.term, self._file = _claim(folder, max(numbers, default=0) + 1)

    def went_on(self, round: int, resume: int) -> None:
        """Round ``round`` of this term resumes from ``resume``."""
        self._resumes.append((self.term, round, resume))
        line = _Line(run=self._run, round=round, resume=resume)
        self._file.write(msgspec.json.encode(line) + b"\n")

    def abandoned(self, version: Version) -> bool:
        """Whether a later round resumed below the step of ``version``."""
        return is_abandoned(version, self._resumes)

    def pick(self, exclude: frozenset[str]) -> tuple[int, str]:
        """Step and folder of the newest checkpoint to resume from; (0, "") if none was ever made.

        A folder elsewhere is given by its absolute path.

        Args:
            exclude: Folders that were found damaged.

        Raises:
            CheckpointMismatch: the folder holds checkpoints of another run.
            CheckpointNotFound: there are checkpoints, and none can be used.
            CheckpointError: there is none elsewhere, where one must be.
        """
        infos = catalog.committed(self._root)
        others = sorted({info.version.run for info in infos} - {self._run})
        if others:
            raise CheckpointMismatch(
                f"{self._root} holds checkpoints of run {', '.join(others)}, not of {self._run}",
                done="nothing was loaded and nothing was changed",
                advice="set checkpoint.dir to a folder of this run's own",
            )
        published = catalog.published(self._root)
        hidden = set(published) - {info.folder for info in infos}
        for info in infos:
            if info.folder not in exclude and not self.abandoned(info.version):
                self._tell_damaged(hidden, info.step)
                return info.step, info.folder
        self._tell_damaged(hidden, 0)
        if set(published) - {info.folder for info in infos if self.abandoned(info.version)}:
            raise CheckpointNotFound(
                f"none of {len(published)} checkpoints in {self._root} can be used",
                done="nothing was deleted",
                advice="run keepstep checkpoint verify; to start again from step 0, move them away",
            )
        return (0, "") if self._elsewhere is None else self._elsewhere(exclude)

    def _tell_damaged(self, hidden: set[str], step: int) -> None:
        """Tell of folders newer than ``step`` that have a manifest and are not offered."""
        for folder in sorted(hidden - self._told, reverse=True):
            name, version = layout.parse_folder(folder), owner(self._root / folder)
            if name is None or name.step <= step or (version and self.abandoned(version)):
                continue
            try:
                catalog.load(self._root, folder)
            except (CheckpointCorrupt, OSError) as error:
                self._told.add(folder)
                self._on_damaged(folder, name.step, str(error))

    def close(self) -> None:
        """Close the term's file."""
        self._file.close()


def read_resumes(folder: Path, run: str | None = None) -> list[Resume]:
    """The rounds that went on, as written down in the folder of terms; empty if it is not there.

    Args:
        folder: The folder of terms.
        run: Only rounds of this run.
    """
    decoder = msgspec.json.Decoder(_Line)
    resumes: list[Resume] = []
    paths = list(folder.iterdir()) if folder.is_dir() else []
    for path in sorted(path for path in paths if path.name.isdigit()):
        for raw in layout.read(path).splitlines():
            try:
                line = decoder.decode(raw)
            except msgspec.DecodeError:
                continue  # cut off by a kill: the round did not go on
            if run is None or line.run == run:
                resumes.append((int(path.name), line.round, line.resume))
    return resumes


def is_abandoned(version: Version, resumes: Iterable[Resume]) -> bool:
    """Whether one of the rounds is later than that of ``version`` and resumed below its step."""
    return any(
        (term, number) > (version.term, version.round) and resume < version.step
        for term, number, resume in resumes
    )


def _claim(folder: Path, number: int) -> tuple[int, BinaryIO]:
    """Claim the first free term from ``number`` on."""
    while True:
        try:
            fd = os.open(folder / f"{number:08d}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            number += 1
            continue
        os.fsync(fd)
        return number, os.fdopen(fd, "wb", buffering=0)
