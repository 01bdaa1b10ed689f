"""What a round resumes from: chosen, refused if ranks find it damaged, written down once loaded.

Part of the coordinator's rounds; storage is asked through ``Resumes``.
"""

from __future__ import annotations

from typing import Protocol


class Resumes(Protocol):
    """Where a round resumes from; see ``lineage.Lineage``."""

    term: int

    def pick(self, exclude: frozenset[str]) -> tuple[int, str]:
        """Step and folder to resume from."""

    def went_on(self, round: int, resume: int) -> None:
        """A round resumes from this step."""


class Resumption:
    """The checkpoint of the present round.

    Args:
        lineage: This coordinator's term, and where to resume from.

    Attributes:
        step: Its step. folder: Its name, or the absolute path of another run's; empty without one.
    """

    def __init__(self, lineage: Resumes) -> None:
        self._lineage = lineage
        self._unusable: set[str] = set()
        self._to_record = False
        self.step = 0
        self.folder = ""

    @property
    def term(self) -> int:
        """The coordinator's term."""
        return self._lineage.term

    @property
    def words(self) -> str:
        """Where the round goes on, for people."""
        if not self.folder:
            return "from the start"
        origin = f" from {self.folder}" if self.folder.startswith("/") else ""
        return f"resuming after step {self.step}{origin}"

    def choose(self) -> None:
        """Take the newest checkpoint that was not refused.

        Raises:
            CheckpointError: there are checkpoints, and none can be used.
            OSError: storage failed.
        """
        self.step, self.folder = self._lineage.pick(frozenset(self._unusable))
        self._to_record = True

    def refuse(self) -> bool:
        """A rank has found it damaged; False if another rank had found out first."""
        if self.folder in self._unusable:
            return False
        self._unusable.add(self.folder)
        return True

    def loaded(self, round: int) -> None:
        """Every rank of ``round`` has loaded it: only now newer checkpoints are abandoned.

        Before that it may turn out that this one is damaged as well, and a newer one that could not
        be read may do after all. Later calls do nothing.

        Raises:
            OSError: it cannot be written down.
        """
        if self._to_record:
            self._to_record = False
            self._lineage.went_on(round, self.step)
