"""``Job``: what a training function gets to count steps, save and restore.

Steps count from 1: step k is the k-th update of the model, and checkpoint k holds the state after
it. Runs in the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from keepstep.config import CheckpointSettings
from keepstep.engines import Saver, WhenBusy
from keepstep.errors import UsageError
from keepstep.ports import PendingWrite
from keepstep.rank.progress import Progress
from keepstep.rank.restart import RunStopped
from keepstep.wire.types import World


class Job:
    """One attempt of the training function in one round.

    Args:
        world: This rank's place. settings: when to save. saver, progress: supplied by the engine.
        random_state: makes the object that captures random generators; restored last.
    """

    def __init__(
        self,
        world: World,
        settings: CheckpointSettings,
        saver: Saver,
        progress: Progress,
        random_state: Callable[[], object],
    ) -> None:
        self._world = world
        self._settings = settings
        self._saver = saver
        self._progress = progress
        self._random = random_state()
        self._tracked: dict[str, object] = {}
        self._restored: int | None = None
        self._done = 0
        self._saved = 0
        self._loss: float | None = None
        self._pending: PendingWrite | None = None
        self._prepared = False

    @property
    def world(self) -> World:
        """This rank's place: ``rank``, ``size``, ``local_rank``, ``node``, ``round``."""
        return self._world

    def track(self, **objects: object) -> None:
        """Name what belongs to the training state.

        Modules, optimizers, whatever has ``state_dict`` and ``load_state_dict`` (scheduler, scaler,
        data position), and tensors. Random generators are always included.

        Raises:
            UsageError: a name is taken, or the state was restored already.
        """
        if self._restored is not None:
            raise UsageError("job.track comes after the state was restored", advice="track first")
        for name, value in objects.items():
            if name in self._tracked or name == "random":
                raise UsageError(f"job.track: the name {name!r} is taken")
            self._tracked[name] = value

    def restore(self, *, strict: bool = True) -> int:
        """Load the state that the round resumes from, in place; later calls change nothing.

        Args:
            strict: Whether objects, and tensors of modules, that are only tracked or only stored
                are an error; else they keep what they have, or are not read, and a warning names
                them.

        Returns:
            The last completed step (0 at the start of a run).

        Raises:
            CheckpointCorrupt, CheckpointMismatch: it cannot be used.
        """
        if self._restored is None:
            self._restored = self._saver.load(self._state(), strict=strict)
            self._done = self._saved = self._restored
        return self._restored

    def _state(self) -> dict[str, object]:
        return {**self._tracked, "random": self._random}

    @property
    def start_step(self) -> int:
        """The first step to do, for own loops; restores first."""
        return self.restore() + 1

    def steps(self, total: int) -> Iterator[int]:
        """Yield each step that is still to do, up to and including ``total``.

        Restores before the first; after each turn the step is counted and saved when due. A save
        that is due while storage is behind may be skipped, that of the last step waits.
        """
        step = self.start_step
        at_end = bool(self._settings.every_steps) and self._settings.at_end
        while step <= total:
            self._begin(step, must=at_end and step == total)
            yield step
            self._complete(step, must=at_end and step == total)
            step += 1
        if at_end and self._saved < self._done:
            self.save()
        self._progress.begin_step(None)

    def _due(self, step: int) -> bool:
        every = self._settings.every_steps
        return bool(every) and step % every == 0

    def _begin(self, step: int, *, must: bool = False) -> None:
        self._loss = None
        if self._due(step) and not must and self._settings.when_busy == "skip":
            self._saver.expect(step)
        self._progress.begin_step(step)

    def completed(self, step: int) -> None:
        """For own loops: count ``step``, save when due, and start the next one.

        Raises:
            UsageError: steps do not follow one another.
        """
        self._complete(step)
        self._begin(step + 1)

    def _complete(self, step: int, *, must: bool = False) -> None:
        self.restore()
        if step != self._done + 1:
            raise UsageError(
                f"step {step} was completed after step {self._done}",
                advice="start an own loop at job.start_step and count each step once",
            )
        self._done = step
        self._progress.end_step(step, self._loss)
        self._saver.poll()
        if self._progress.stop_due(step, self._world.round):
            if self._saved < step:
                self.save()
            raise RunStopped
        if self._due(step):
            self._save("wait" if must else self._settings.when_busy)
        elif self._settings.every_steps and not self._prepared:
            self._saver.prepare(self._state())
        self._prepared = True

    def save(self) -> PendingWrite:
        """Save the state after the last completed step, whatever the schedule says.

        Waits for storage where it is behind.
        """
        self.restore()
        return self._save("wait")

    def _save(self, when_busy: WhenBusy) -> PendingWrite:
        save = self._saver.save(self._state(), self._done, when_busy)
        if not save.skipped:
            self._pending, self._saved = save, self._done
        return save

    def mutates(self) -> None:
        """Return once the tracked state may be changed by other means than an optimizer's step.

        A save may still be copying it while the next step computes; optimizers' steps wait by
        themselves.
        """
        self._saver.mutates()

    @property
    def saving(self) -> int:
        """Step of the last save asked for in this attempt (0: none)."""
        return self._saved if self._pending is not None else 0

    def section(self, name: str) -> AbstractContextManager[None]:
        """A named span (eval, export) with its own learned limit and goodput category."""
        return self._progress.section(name)

    def log(self, *, loss: float) -> None:
        """The loss of the step in progress, for the progress line and the events."""
        self._loss = float(loss)
