"""``keepstep.run``, ``restartable`` and ``heartbeat`` without processes: a fake engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import nn

import keepstep
from keepstep.api import run as module
from keepstep.config import Config
from keepstep.engines import Engine
from keepstep.errors import UsageError
from keepstep.rank.progress import NoProgress
from keepstep.rank.restart import RunStopped
from keepstep.rank.runtime import Runtime
from keepstep.wire.types import World
from tests.api.test_job import FakeSaver, world

T = TypeVar("T")


class _Engine:
    """Calls the attempt once for each of its rounds, as long as it raises."""

    def __init__(self, rounds: int = 1, exit_code: int = 0) -> None:
        self.rounds = rounds
        self.exit_code = exit_code
        self.progress = NoProgress()
        self.savers: list[FakeSaver] = []
        self.closed = 0
        self.saving: list[int] = []
        self._saving: Callable[[], int] = lambda: 0

    def restarter(self, saving: Callable[[], int]) -> _Engine:
        self._saving = saving
        return self

    def run(self, attempt: Callable[[World], T]) -> T | None:
        result: T | None = None
        for number in range(1, self.rounds + 1):
            try:
                result = attempt(world(round=number))
            except (ValueError, RunStopped):
                if number == self.rounds and self.rounds > 1:
                    raise
            self.saving.append(self._saving())
        return result

    def saver(self, world: World) -> FakeSaver:
        self.savers.append(FakeSaver())
        return self.savers[-1]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> _Engine:
    made = _Engine()
    monkeypatch.setattr(module, "choose", lambda config, runtime: cast(Engine, made))
    return made


def test_what_main_returns_is_returned_and_the_engine_is_closed(engine: _Engine) -> None:
    assert keepstep.run(lambda job: job.world.round) == 1
    assert engine.closed == 1


def test_the_engine_is_closed_when_main_raises_for_good(engine: _Engine) -> None:
    def main(job: keepstep.Job) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        keepstep.run(main)
    assert engine.closed == 1


def test_each_attempt_gets_a_job_of_its_own(engine: _Engine) -> None:
    engine.rounds = 2
    jobs = []

    def main(job: keepstep.Job) -> str:
        jobs.append(job)
        if job.world.round == 1:
            raise ValueError("once")
        return "done"

    assert keepstep.run(main) == "done"
    assert len({id(job) for job in jobs}) == 2
    assert len(engine.savers) == 2


def test_the_last_save_is_told_also_when_the_run_stops_on_notice(engine: _Engine) -> None:
    def main(job: keepstep.Job) -> None:
        for _ in job.steps(3):
            pass
        raise RunStopped

    keepstep.run(main, settings={"checkpoint.every_steps": 3})
    assert engine.saving == [3]


def test_saves_are_finished_when_main_has_returned_or_stopped_and_only_then(
    engine: _Engine,
) -> None:
    engine.rounds = 3

    def main(job: keepstep.Job) -> None:
        assert engine.savers[-1].finished == []
        if job.world.round == 1:
            raise ValueError("once")
        if job.world.round == 2:
            raise RunStopped

    keepstep.run(main, settings={"checkpoint.write_limit_s": 7.0})
    assert [saver.finished for saver in engine.savers] == [[], [7.0], [7.0]]


def test_an_attempt_that_saved_nothing_waits_for_no_save(engine: _Engine) -> None:
    keepstep.run(lambda job: sum(job.steps(3)))
    assert engine.saving == [0]


def test_the_exit_code_that_the_coordinator_named_ends_the_process(engine: _Engine) -> None:
    engine.exit_code = 75
    with pytest.raises(SystemExit) as ended:
        keepstep.run(lambda job: None)
    assert ended.value.code == 75
    assert engine.closed == 1


class _Runtime:
    """As much of a rank of ``keepstep run`` as is asked for here."""

    def __init__(self) -> None:
        self.config = Config()
        self.step = 0
        self.ended: list[int] = []

    def begin_step(self, step: int) -> None:
        self.step = step

    def end_step(self, step: int, loss: float | None) -> None:
        self.ended.append(step)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> _Runtime:
    made = _Runtime()
    monkeypatch.setattr(module, "current", lambda: cast(Runtime, made))
    return made


def test_settings_of_the_launcher_are_refused_in_a_rank(engine: _Engine, runtime: _Runtime) -> None:
    settings: dict[str, Any] = {"run.grace_s": 3.0, "checkpoint.every_steps": 5, "rank.spares": 0}
    with pytest.raises(UsageError, match=r"cannot set rank\.spares, run\.grace_s") as found:
        keepstep.run(lambda job: None, settings=settings)
    assert "checkpoint.every_steps" in found.value.advice
    assert "--set" in found.value.advice
    assert engine.closed == 0


def test_settings_of_the_rank_are_taken_over_those_of_the_launcher(
    engine: _Engine, runtime: _Runtime
) -> None:
    keepstep.run(lambda job: sum(job.steps(4)), settings={"checkpoint.every_steps": 2})
    assert engine.savers[0].saved == [2, 4]


def test_a_wrong_value_in_settings_is_named(engine: _Engine, runtime: _Runtime) -> None:
    with pytest.raises(UsageError, match=r"checkpoint\.every_steps"):
        keepstep.run(lambda job: None, settings={"checkpoint.every_steps": -1})


def test_without_launcher_every_setting_can_be_given_and_an_unknown_one_is_named(
    engine: _Engine,
) -> None:
    keepstep.run(lambda job: None, settings={"run.grace_s": 3.0})
    with pytest.raises(UsageError, match=r"every_step.*every_steps"):
        keepstep.run(lambda job: None, settings={"checkpoint.every_step": 3})


def test_heartbeat_without_launcher_does_nothing() -> None:
    keepstep.heartbeat()


def test_each_heartbeat_ends_a_step_and_begins_the_next(runtime: _Runtime) -> None:
    for _ in range(3):
        keepstep.heartbeat()
    assert runtime.ended == [1, 2]
    assert runtime.step == 3


def test_restartable_passes_arguments_results_and_its_name_on(engine: _Engine) -> None:
    @keepstep.restartable
    def train(first: int, *, second: int) -> int:
        """What it does."""
        return first + second

    assert train(1, second=2) == 3
    assert (train.__name__, train.__doc__) == ("train", "What it does.")
    assert engine.closed == 1


def test_in_a_plain_process_a_run_saves_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"checkpoint.every_steps": 2, "checkpoint.dir": str(tmp_path / "saved")}

    def attempt(job: keepstep.Job, steps: int) -> tuple[int, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.track(model=model, optimizer=optimizer)
        first = job.start_step
        for _ in job.steps(steps):
            optimizer.zero_grad()
            model(torch.randn(2, 3)).square().mean().backward()
            optimizer.step()
        return first, model.weight.detach().clone()

    assert keepstep.run(lambda job: attempt(job, 3), settings=settings)[0] == 1
    first, weight = keepstep.run(lambda job: attempt(job, 6), settings=settings)
    other = {**settings, "checkpoint.dir": str(tmp_path / "whole")}
    assert first == 4
    assert torch.equal(weight, keepstep.run(lambda job: attempt(job, 6), settings=other)[1])
