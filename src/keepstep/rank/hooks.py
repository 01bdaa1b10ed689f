"""Steps of a script as torch's own optimizers see them.

A global optimizer hook counts updates of the first optimizer that steps. So a script that never
imports keepstep has steps, heartbeats and injected faults too. Runs in the rank.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from keepstep.rank.runtime import Runtime
from keepstep.shm import Phase


class StepHooks:
    """Feeds ``runtime`` from torch's optimizer steps."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._first: weakref.ref[torch.optim.Optimizer] | None = None
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Register the two global hooks."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Take them out again."""
        for handle in self._handles:
            handle.remove()

    def _is_first(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        return self._first() is optimizer

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        runtime = self._runtime
        counting = not runtime.driven and self._is_first(optimizer)
        if counting and runtime.board.phase is not Phase.STEP:
            runtime.begin_step(runtime.step + 1)
        runtime.fire_due_faults(runtime.step)

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        runtime = self._runtime
        if not runtime.driven and self._is_first(optimizer):
            step = runtime.step
            runtime.end_step(step, None)
            runtime.begin_step(step + 1)
