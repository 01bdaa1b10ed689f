"""``run`` and ``restartable``: put a training function under keepstep. Runs in the rank."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from keepstep.api.job import Job
from keepstep.config import Config
from keepstep.engines import Engine, choose
from keepstep.errors import UsageError
from keepstep.rank.restart import RunStopped
from keepstep.rank.runtime import Runtime, current

T = TypeVar("T")
_RANK_SIDE = ("checkpoint.every_steps", "checkpoint.at_end")


def random_state() -> object:
    """What captures the random generators of this process."""
    from keepstep.checkpoint.torch_rng import RngState

    return RngState()


def run(main: Callable[[Job], T], *, settings: Mapping[str, object] | None = None) -> T:
    """Initialise the process group, call ``main(job)``, and call it again after each restart.

    Under ``keepstep run`` it returns when every rank's ``main`` has returned and the last save is
    durable. Without the launcher (plain ``python``, ``torchrun``) ``main`` is called once.

    Args:
        main: The training function. Whatever must be fresh after a restart is made inside it.
        settings: ``checkpoint.every_steps`` and ``checkpoint.at_end``, overriding file,
            environment and ``--set``; other settings concern the launcher and are given to it.

    Raises:
        UsageError: a setting that cannot be given here, or the process group exists already.
    """
    runtime = current()
    config = _configured(runtime, settings or {})
    engine = choose(config, runtime)
    saving = 0

    def attempt(world: Any) -> T:
        nonlocal saving
        saver = engine.saver(world)
        job = Job(world, config.checkpoint, saver, engine.progress, random_state)
        try:
            try:
                result = main(job)
            except RunStopped:
                saver.finish(config.checkpoint.write_limit_s)
                raise
            saver.finish(config.checkpoint.write_limit_s)
            return result
        finally:
            # Only the number is kept, also when the run stops on notice: the job holds the model,
            # which is to be freed before it is built again.
            saving = job.saving

    restarter = engine.restarter(lambda: saving)
    try:
        result = restarter.run(attempt)
    finally:
        engine.close()
    if engine.exit_code:
        sys.exit(engine.exit_code)
    return result


def restartable(function: Callable[..., T]) -> Callable[..., T]:
    """Decorator: a call of ``function`` survives faults of any rank by being called again.

    Like ``run`` without a Job: process groups are renewed, what to restore is the function's own
    business (``Checkpointer``). Without the launcher the function is simply called.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> T:
        runtime = current()
        engine = choose(_configured(runtime, {}), runtime)
        try:
            return engine.restarter(lambda: 0).run(lambda _: function(*args, **kwargs))
        finally:
            engine.close()

    return wrapper


def heartbeat() -> None:
    """Show progress from a loop that uses nothing else of keepstep; free without the launcher."""
    runtime = current()
    if runtime is None:
        return
    runtime.driven = True  # the loop counts: optimizer steps no longer do
    if runtime.step:
        runtime.end_step(runtime.step, None)
    runtime.begin_step(runtime.step + 1)


def _configured(runtime: Runtime | None, settings: Mapping[str, object]) -> Config:
    from keepstep.config import env, load

    wrong = sorted(set(settings) - set(_RANK_SIDE))
    if wrong and runtime is not None:
        raise UsageError(
            f"keepstep.run(settings=...) cannot set {', '.join(wrong)}",
            advice=f"only {', '.join(_RANK_SIDE)} can be given here; use --set or --config",
        )
    if runtime is None:
        return load.load(file=None, environ=env.snapshot(), sets=(), arguments=settings)
    return load.override(runtime.config, settings)


__all__ = ["Engine", "heartbeat", "restartable", "run"]
