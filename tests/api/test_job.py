"""``Job``: counting, saving when due, restoring once, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.api.job import Job
from keepstep.config import CheckpointSettings
from keepstep.engines import WhenBusy
from keepstep.errors import UsageError
from keepstep.rank.restart import RunStopped
from keepstep.rank.save import Save
from keepstep.wire.types import World


def world(round: int = 1) -> World:
    """One rank alone."""
    return World(
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        node=0,
        round=round,
        resume=0,
        folder="",
        term=1,
    )


class _Pending:
    def staged(self) -> bool:
        return True

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        return


class FakeSaver:
    """Remembers what was saved; there is a checkpoint of step ``resume``."""

    def __init__(self, resume: int = 0) -> None:
        self.resume = resume
        self.saved: list[int] = []
        self.names: list[list[str]] = []
        self.loads = 0
        self.polls: list[list[int]] = []
        self.finished: list[float] = []
        self.prepared: list[list[int]] = []
        self.expected: list[int] = []
        self.behind: set[int] = set()
        self.mutated = 0

    def prepare(self, state: dict[str, object]) -> None:
        """Implements ``engines.Saver``."""
        self.prepared.append(list(self.saved))

    def expect(self, step: int) -> None:
        """Implements ``engines.Saver``."""
        self.expected.append(step)

    def mutates(self) -> None:
        """Implements ``engines.Saver``."""
        self.mutated += 1

    def save(self, state: dict[str, object], step: int, when_busy: WhenBusy = "wait") -> Save:
        """Implements ``engines.Saver``; skips the steps in ``behind`` where it may."""
        if when_busy == "skip" and step in self.behind:
            return Save(step, None, "storage is behind")
        self.saved.append(step)
        self.names.append(list(state))
        return Save(step, _Pending())

    def load(self, state: dict[str, object], *, strict: bool = True) -> int:
        """Implements ``engines.Saver``."""
        self.loads += 1
        self.names.append(list(state))
        return self.resume

    def poll(self) -> None:
        """Implements ``engines.Saver``; remembers what was saved by then."""
        self.polls.append(list(self.saved))

    def finish(self, timeout_s: float) -> None:
        """Implements ``engines.Saver``."""
        self.finished.append(timeout_s)


class _Progress:
    """Remembers what it was told; asks for a stop after ``stop_after``."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.told: list[tuple[str, object]] = []
        self.losses: dict[int, float | None] = {}
        self._stop_after = stop_after

    def begin_step(self, step: int | None) -> None:
        self.told.append(("begin", step))

    def end_step(self, step: int, loss: float | None) -> None:
        self.told.append(("end", step))
        self.losses[step] = loss

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.told.append(("enter", name))
        yield
        self.told.append(("leave", name))

    def stop_due(self, step: int, round: int) -> bool:
        return self._stop_after is not None and step >= self._stop_after


def _job(
    saver: FakeSaver | None = None,
    progress: _Progress | None = None,
    every: int = 0,
    at_end: bool = True,
    when_busy: WhenBusy = "skip",
) -> Job:
    settings = CheckpointSettings(every_steps=every, at_end=at_end, when_busy=when_busy)
    return Job(world(), settings, saver or FakeSaver(), progress or _Progress(), dict)


@given(
    resume=st.integers(0, 12),
    total=st.integers(0, 15),
    every=st.integers(0, 6),
    at_end=st.booleans(),
)
def test_steps_counts_what_is_left_and_saves_when_due_and_at_the_end(
    resume: int, total: int, every: int, at_end: bool
) -> None:
    saver = FakeSaver(resume)
    assert list(_job(saver, every=every, at_end=at_end).steps(total)) == [
        *range(resume + 1, total + 1)
    ]
    due = [step for step in range(resume + 1, total + 1) if every and step % every == 0]
    if every and at_end and total > resume and total not in due:
        due.append(total)
    assert saver.saved == due
    assert saver.loads == 1


def test_each_step_begins_and_ends_and_after_the_last_nothing_is_in_progress() -> None:
    progress = _Progress()
    list(_job(progress=progress).steps(2))
    assert progress.told == [
        ("begin", 1),
        ("end", 1),
        ("begin", 2),
        ("end", 2),
        ("begin", None),
    ]


def test_after_each_completed_step_the_saver_is_polled_before_the_next_save() -> None:
    saver = FakeSaver()
    list(_job(saver, every=2).steps(4))
    assert saver.polls == [[], [], [2], [2]]
    assert saver.finished == []


def test_a_loss_belongs_to_its_step_alone() -> None:
    progress = _Progress()
    job = _job(progress=progress)
    for step in job.steps(3):
        if step != 2:
            job.log(loss=step / 2)
    assert progress.losses == {1: 0.5, 2: None, 3: 1.5}


def test_a_loop_that_is_left_early_does_not_count_the_step_it_was_in() -> None:
    saver = FakeSaver()
    job = _job(saver, every=1)
    for step in job.steps(5):
        if step == 3:
            break
    assert saver.saved == [1, 2]


def test_an_own_loop_starts_after_the_checkpoint_and_counts_each_step() -> None:
    saver, progress = FakeSaver(resume=4), _Progress()
    job = _job(saver, progress, every=3)
    step = job.start_step
    assert step == 5
    while step <= 7:
        job.completed(step)
        step += 1
    assert saver.saved == [6]
    assert [what for what in progress.told if what[0] == "end"] == [("end", n) for n in (5, 6, 7)]


@pytest.mark.parametrize("wrong", [0, 4, 6, 7])
def test_a_step_out_of_order_is_refused_and_not_counted(wrong: int) -> None:
    saver, progress = FakeSaver(resume=4), _Progress()
    job = _job(saver, progress, every=1)
    with pytest.raises(UsageError, match=f"step {wrong} was completed after step 4"):
        job.completed(wrong)
    assert saver.saved == [] and progress.told == []
    job.completed(5)
    assert saver.saved == [5]


def test_a_step_counted_twice_in_one_loop_is_refused() -> None:
    job = _job()
    with pytest.raises(UsageError, match="step 1 was completed after step 1"):
        for step in job.steps(3):
            job.completed(step)


def test_a_name_is_tracked_once_and_random_is_taken() -> None:
    job = _job()
    job.track(model=1)
    with pytest.raises(UsageError, match="'model' is taken"):
        job.track(optimizer=2, model=3)
    with pytest.raises(UsageError, match="'random' is taken"):
        job.track(random=1)


def test_tracking_comes_before_restoring() -> None:
    job = _job()
    assert job.restore() == 0
    with pytest.raises(UsageError, match="after the state was restored"):
        job.track(model=1)


def test_random_generators_are_restored_last() -> None:
    saver = FakeSaver()
    job = _job(saver)
    job.track(zebra=1, data=2)
    job.restore()
    assert saver.names == [["zebra", "data", "random"]]


def test_the_state_is_restored_once_however_often_it_is_asked_for() -> None:
    saver = FakeSaver(resume=3)
    job = _job(saver)
    assert job.restore() == 3
    assert job.start_step == 4
    list(job.steps(5))
    assert job.restore() == 3
    assert saver.loads == 1


def test_a_save_at_will_holds_the_last_completed_step() -> None:
    saver = FakeSaver(resume=2)
    job = _job(saver)
    assert job.saving == 0
    for step in job.steps(4):
        if step == 4:
            assert job.save().done()
    assert saver.saved == [3]
    assert job.saving == 3


@pytest.mark.parametrize(("every", "saved"), [(0, [3]), (2, [2, 3]), (3, [3])])
def test_a_stop_saves_the_agreed_step_once_and_unwinds(every: int, saved: list[int]) -> None:
    saver = FakeSaver()
    job = _job(saver, _Progress(stop_after=3), every=every)
    done = []
    with pytest.raises(RunStopped):
        for step in job.steps(10):
            done.append(step)
    assert done == [1, 2, 3]
    assert saver.saved == saved
    assert job.saving == 3


def test_a_stop_in_an_own_loop_unwinds_too() -> None:
    saver = FakeSaver()
    job = _job(saver, _Progress(stop_after=1))
    with pytest.raises(RunStopped):
        job.completed(1)
    assert saver.saved == [1]


def test_sections_nest_and_end_also_when_they_raise() -> None:
    progress = _Progress()
    job = _job(progress=progress)
    with job.section("eval"), job.section("export"):
        pass
    assert progress.told == [
        ("enter", "eval"),
        ("enter", "export"),
        ("leave", "export"),
        ("leave", "eval"),
    ]


def test_the_place_of_the_rank_is_told() -> None:
    assert (_job().world.rank, _job().world.size) == (0, 1)


# --- saves that may be skipped --------------------------------------------------------------------


def test_a_due_save_is_announced_when_its_step_begins_and_may_be_skipped() -> None:
    saver = FakeSaver()
    saver.behind = {4}
    job = _job(saver, every=2)
    for step in job.steps(7):
        assert saver.expected == [due for due in (2, 4, 6) if due <= step]
    assert saver.saved == [2, 6, 7]
    assert job.saving == 7


def test_the_last_save_of_a_run_waits_instead() -> None:
    saver = FakeSaver()
    saver.behind = {2, 4}
    for _ in _job(saver, every=2).steps(4):
        pass
    assert (saver.expected, saver.saved) == ([2], [4])


def test_without_a_save_at_the_end_the_last_due_one_is_like_any_other() -> None:
    saver = FakeSaver()
    saver.behind = {4}
    job = _job(saver, every=2, at_end=False)
    for _ in job.steps(4):
        pass
    assert (saver.expected, saver.saved, job.saving) == ([2, 4], [2], 2)


def test_the_setting_wait_asks_nobody_and_skips_nothing() -> None:
    saver = FakeSaver()
    saver.behind = {2, 4}
    for _ in _job(saver, every=2, when_busy="wait").steps(5):
        pass
    assert (saver.expected, saver.saved) == ([], [2, 4, 5])


def test_a_save_at_will_waits_and_a_stop_saves_what_was_to_be_skipped() -> None:
    saver = FakeSaver()
    saver.behind = {2}
    progress = _Progress(stop_after=2)
    job = _job(saver, progress, every=2)
    with pytest.raises(RunStopped):
        for _ in job.steps(9):
            pass
    assert saver.saved == [2]
    job.save()
    assert saver.saved == [2, 2]


def test_memory_is_made_once_after_the_first_step_if_saves_are_scheduled() -> None:
    saver = FakeSaver()
    for _ in _job(saver, every=3).steps(7):
        pass
    assert saver.prepared == [[]], "before the first save"
    own = FakeSaver()
    job = _job(own)
    for _ in job.steps(4):
        pass
    assert own.prepared == []
    first = FakeSaver()
    for _ in _job(first, every=1).steps(3):
        pass
    assert first.prepared == [], "the first save makes it"


def test_mutates_waits_for_the_copy_in_progress() -> None:
    saver = FakeSaver()
    _job(saver).mutates()
    assert saver.mutated == 1
