"""Which checkpoint a restore takes, and what keeps saves of different processes apart.

Runs in rank 0, which decides for all ranks. ``FolderHistory`` knows a folder of checkpoints and
nothing else; ``RunHistory`` belongs to a run folder and writes the same ``terms/`` files as the
coordinator, so that a run can be continued with or without one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from keepstep.checkpoint import catalog, layout, resume
from keepstep.checkpoint.catalog import CheckpointInfo
from keepstep.checkpoint.lineage import Lineage
from keepstep.checkpoint.writer import owner
from keepstep.clock import SYSTEM, Clock
from keepstep.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotWritable,
)
from keepstep.wire.types import World

_TERMS = "terms"


class History(Protocol):
    """What was saved before, and by whom. Only rank 0 asks."""

    def claim(self) -> int:
        """A term that no earlier saves have, so that new ones can be told from all others.

        Raises:
            CheckpointNotWritable: it cannot be written down.
        """

    def choose(self, refused: Collection[str]) -> str:
        """Folder of the checkpoint to resume from; empty if there is none.

        Args:
            refused: Folders that were found damaged while loading.

        Raises:
            CheckpointError: there are checkpoints, but none that may be used.
        """

    def damaged(self, folder: str, why: str) -> None:
        """Loading has found ``folder`` damaged; an older one is tried."""

    def went_on(self, round: int, step: int) -> None:
        """Round ``round`` of the term claimed last (or next) goes on after ``step``.

        Raises:
            CheckpointNotWritable: it cannot be written down.
        """


def warn(folder: str, why: str) -> None:
    """Tell of a damaged checkpoint by a Python warning, at the line that called ``restore``."""
    warnings.warn(
        f"checkpoint {folder} cannot be used and an older one is tried: {why}",
        RuntimeWarning,
        stacklevel=5,
    )


class FolderHistory:
    """Implements ``History`` for a folder of checkpoints: the newest good one is taken.

    Args:
        root: Folder of the checkpoints; the terms claimed are in ``terms`` below it.
        run_id: Checkpoints of other runs are refused; None takes any.
        clock: Where time comes from.
        warn: Told once of each damaged checkpoint that is passed over: folder, reason.
        resume_from: What is taken while there is no checkpoint of its own; see ``resume.find``.
    """

    def __init__(
        self,
        root: Path,
        run_id: str | None,
        clock: Clock = SYSTEM,
        warn: Callable[[str, str], None] = warn,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        self._root = root
        self._run_id = run_id
        self._clock = clock
        self._warn = warn
        self._elsewhere = resume.finder(resume_from, self._passed_over)
        self._told: set[str] = set()

    def claim(self) -> int:
        """A number that no earlier process has used.

        Raises:
            CheckpointNotWritable: the folder cannot be written.
        """
        folder = self._root / _TERMS
        with _written(self._root):
            folder.mkdir(parents=True, exist_ok=True)
            used = [int(name) for name in os.listdir(folder) if name.isdecimal()]
            owners = [owner(self._root / name) for name in layout.list_folders(self._root)]
            used += [version.term for version in owners if version is not None]
            term = max(used, default=0) + 1
            text = msgspec.json.encode({"pid": os.getpid(), "created": self._clock.wall()})
            while True:
                try:
                    layout.publish(folder / str(term), text)
                except FileExistsError:
                    term += 1
                else:
                    return term

    def choose(self, refused: Collection[str]) -> str:
        """Folder of the newest checkpoint that was not refused; tells of damaged ones before it.

        It is an absolute path if it is one of ``resume_from``.

        Raises:
            CheckpointMismatch: all checkpoints are of other runs.
            CheckpointCorrupt: all checkpoints are damaged.
            CheckpointNotFound: there is none to start from in ``resume_from``.
        """
        found = catalog.committed(self._root)
        ours = [info for info in found if self._run_id in (None, info.version.run)]
        usable = [info for info in ours if info.folder not in refused]
        from_step = usable[0].step if usable else 0
        damaged = self._damaged({info.folder for info in found}, from_step)
        damaged |= self._exchanged([info for info in found if info.step >= from_step])
        for folder, why in damaged.items():
            self.damaged(folder, why)
        if usable:
            return usable[0].folder
        if found and not ours:
            raise CheckpointMismatch(
                f"the {len(found)} checkpoints are of run {found[0].version.run!r}, "
                f"this is run {self._run_id!r}",
                where=str(self._root),
                done="nothing was restored",
                advice="give the run its own folder, or use the id of the run that saved them",
            )
        own = [folder for folder in refused if not Path(folder).is_absolute()]
        if own or damaged:
            raise CheckpointCorrupt(
                f"all {len(own) + len(damaged)} checkpoints are damaged",
                where=str(self._root),
                done="nothing was restored and nothing was deleted",
                advice="see 'keepstep checkpoint verify'; to start anew give another folder",
            )
        return "" if self._elsewhere is None else self._elsewhere(refused)[1]

    def _exchanged(self, infos: Sequence[CheckpointInfo]) -> dict[str, str]:
        """Folders of this run with the manifest of another, which hides them from it."""
        result: dict[str, str] = {}
        for info in infos:
            mine = owner(self._root / info.folder)
            if mine is not None and mine.run == self._run_id != info.version.run:
                result[info.folder] = (
                    f"the folder is of run {mine.run!r}, its manifest of {info.version.run!r}"
                )
        return result

    def _passed_over(self, folder: str, step: int, why: str) -> None:
        self.damaged(folder, why)

    def _damaged(self, good: set[str], from_step: int) -> dict[str, str]:
        """Folders with a manifest, of ``from_step`` or newer, that the catalog does not offer."""
        result: dict[str, str] = {}
        for folder in catalog.published(self._root):
            name = layout.parse_folder(folder)
            if folder not in good and name is not None and name.step >= from_step:
                try:
                    catalog.load(self._root, folder)
                except (CheckpointError, OSError) as error:
                    result[folder] = str(error)
        return result

    def damaged(self, folder: str, why: str) -> None:
        """Tell of ``folder``, once."""
        if folder not in self._told:
            self._told.add(folder)
            self._warn(folder, why)

    def went_on(self, round: int, step: int) -> None:
        """A folder alone does not remember rollbacks: the newest step counts."""


class RunHistory:
    """Implements ``History`` for a run folder: checkpoints of abandoned lines are not taken.

    The term is claimed at the first call, in the form in which the coordinator claims it. Without
    rounds of a coordinator, the rounds are those of the ``Checkpointer`` that asks.

    Args:
        run_dir: Run folder. run: Its id. root: Folder of the checkpoints.
        on_damaged: Told once of each damaged checkpoint that is passed over: folder, step, error.
        resume_from: What is taken while there is no checkpoint of its own; empty: nothing.
    """

    def __init__(
        self,
        run_dir: Path,
        run: str,
        root: Path,
        on_damaged: Callable[[str, int, str], None] = lambda folder, step, error: None,
        resume_from: str = "",
    ) -> None:
        self._run_dir = run_dir
        self._run = run
        self._root = root
        self._on_damaged = on_damaged
        self._elsewhere = resume.finder(resume_from, self._tell)
        self._told: set[str] = set()
        self._lineage: Lineage | None = None
        self._given = False
        """Whether saves may have the term already."""

    def claim(self) -> int:
        """The term of this instance; another one each further time.

        Raises:
            CheckpointNotWritable: the run folder cannot be written.
        """
        if self._given:
            self.close()
        term = self._claimed().term
        self._given = True
        return term

    def choose(self, refused: Collection[str]) -> str:
        """Folder of the newest checkpoint of the line that the run is on; empty if none was made.

        Raises:
            CheckpointMismatch: there are checkpoints of another run.
            CheckpointNotFound: there are checkpoints, and none can be used.
            CheckpointNotWritable: the run folder cannot be written.
        """
        return self._claimed().pick(frozenset(refused))[1]

    def damaged(self, folder: str, why: str) -> None:
        """Tell of ``folder``, once."""
        name = layout.parse_folder(Path(folder).name)
        self._tell(folder, name.step if name else 0, why)

    def went_on(self, round: int, step: int) -> None:
        """From now on checkpoints of earlier rounds above ``step`` are abandoned.

        Raises:
            CheckpointNotWritable: the run folder cannot be written.
        """
        lineage = self._claimed()
        with _written(self._run_dir):
            lineage.went_on(round, step)

    def close(self) -> None:
        """Close the term's file; a later call claims another term."""
        lineage, self._lineage = self._lineage, None
        self._given = False
        if lineage is not None:
            lineage.close()

    def _claimed(self) -> Lineage:
        if self._lineage is None:
            with _written(self._run_dir):
                self._lineage = Lineage(
                    self._run_dir, self._run, self._root, self._tell, self._elsewhere
                )
        return self._lineage

    def _tell(self, folder: str, step: int, error: str) -> None:
        if folder not in self._told:
            self._told.add(folder)
            self._on_damaged(folder, step, error)


class RoundHistory:
    """Implements ``History`` in a round of a coordinator, which has chosen and written it down.

    Args:
        world: The round.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._why: dict[str, str] = {}

    def claim(self) -> int:
        """The coordinator's term."""
        return self._world.term

    def choose(self, refused: Collection[str]) -> str:
        """The checkpoint that the coordinator named.

        Raises:
            CheckpointCorrupt: it is damaged; the coordinator names another in the next round.
        """
        folder = self._world.folder
        if folder in refused:
            raise CheckpointCorrupt(
                f"checkpoint {folder} cannot be used: {self._why.get(folder, 'it is damaged')}",
                done="nothing was restored",
            )
        return folder

    def damaged(self, folder: str, why: str) -> None:
        """Remember why, for the error."""
        self._why[folder] = why

    def went_on(self, round: int, step: int) -> None:
        """The coordinator has written it down."""

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    """An OSError inside means that ``folder`` cannot be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointNotWritable(
            f"the checkpoint folder cannot be written: {error.strerror or error}",
            where=str(folder),
            done="nothing was saved",
            advice="check that it is a folder, its rights and its space",
        ) from error
