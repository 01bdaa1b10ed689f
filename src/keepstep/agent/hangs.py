"""Who makes no progress: the agent's watch over the boards of its ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from keepstep import events, policy
from keepstep.agent.processes import state_letter, traced
from keepstep.config import Config
from keepstep.shm import Board, Phase
from keepstep.wire.messages import Evidence, Stalled
from keepstep.wire.types import STACK_SIGNAL, stack_file

_STACK_WAIT_S = 0.3
_UNWATCHED = (Phase.PARKED, Phase.WAIT)


Bounds = Callable[[Phase], tuple[float, float]]
"""Seconds by phase: nobody is over its limit earlier, and no limit is learned above."""


class Watched(Protocol):
    """What is read of a rank's process."""

    ticket: int
    """A number that no other process has."""
    rank: int
    inc: int
    pid: int
    board: Board
    adopted: bool
    """Whether the script uses ``keepstep.run``."""
    resumed_at: int
    """The step that its round went on from."""


P = TypeVar("P", bound=Watched)


def bounds_of(config: Config) -> Bounds:
    """The bounds that the settings give."""
    beats = config.heartbeat
    high = {
        Phase.SECTION: beats.section_limit_s,
        Phase.SAVE: config.checkpoint.write_limit_s,
    }
    return lambda phase: (beats.min_limit_s, high.get(phase, beats.start_limit_s))


@dataclass(slots=True)
class _Seen:
    """What the last look at one process showed."""

    phase: Phase = Phase.PARKED
    label: str = ""
    progress: float = 0.0
    steps: int = 0
    suspect_for: float = 0.0  # the progress mark for which a suspicion was raised
    asked: float = 0.0


class HangWatch(Generic[P]):
    """Learns how long phases take and finds ranks that exceed it.

    Args:
        bounds: of the limits. run_dir: where ranks write their stacks.
        interval_s: How often ``look`` is called.
    """

    def __init__(self, bounds: Bounds, run_dir: Path, interval_s: float) -> None:
        self._bounds = bounds
        self._run_dir = run_dir
        self._learned = policy.LearnedLimits()
        self._watch = policy.Watch(interval_s)
        self._seen: dict[int, _Seen] = {}
        self._reported: dict[int, float] = {}

    def forget(self, process: P) -> None:
        """The process is gone."""
        self._seen.pop(process.ticket, None)
        self._reported.pop(process.ticket, None)

    def look(
        self, ranks: Sequence[P], now: float
    ) -> tuple[Stalled | None, list[tuple[P, events.RankSuspect]]]:
        """Look at all ranks of the node.

        Returns:
            Evidence about all of them if somebody is over its limit, and those newly suspect.
        """
        self._watch.tick(now)
        suspects: list[tuple[P, events.RankSuspect]] = []
        over = False
        for process in ranks:
            seen = self._seen.setdefault(process.ticket, _Seen())
            self._learn(process, seen)
            if seen.phase in _UNWATCHED or not process.board.last_beat:
                continue  # a program without Python never beats: its silence means nothing
            if seen.phase == Phase.SCRIPT and not process.adopted:
                continue  # a script that has no steps: nothing says how long it may take
            idle = self._watch.idle(seen.progress, now)
            limits = self._limits(seen, process)
            if idle > limits.suspect_s and seen.suspect_for != seen.progress:
                seen.suspect_for, seen.asked = seen.progress, now
                self._ask_stack(process)
                suspects.append(
                    (
                        process,
                        events.RankSuspect(
                            idle_s=round(idle, 3),
                            limit_s=round(limits.kill_s, 3),
                            phase=_name(seen),
                        ),
                    )
                )
            if idle > limits.kill_s and now - seen.asked >= _STACK_WAIT_S:
                over = over or self._reported.get(process.ticket) != seen.progress
        if not over or any(traced(process.pid) for process in ranks):
            return None, suspects
        for process in ranks:
            self._reported[process.ticket] = self._seen[process.ticket].progress
        return Stalled(ranks=[self._evidence(p, now) for p in ranks]), suspects

    def _learn(self, process: P, seen: _Seen) -> None:
        board = process.board
        phase, label, progress, steps = board.phase, board.label, board.last_progress, board.steps
        if steps != seen.steps:
            self._learned.add("step", board.step_s, first=board.done == process.resumed_at + 1)
        changed = (phase, label) != (seen.phase, seen.label)
        if changed and seen.progress and seen.phase not in (*_UNWATCHED, Phase.STEP):
            self._learned.add(
                seen.phase.name.lower(), max(0.0, progress - seen.progress), label=seen.label
            )
        seen.phase, seen.label, seen.progress, seen.steps = phase, label, progress, steps

    def _limits(self, seen: _Seen, process: P) -> policy.Limits:
        floor, bound = self._bounds(seen.phase)
        first = seen.phase == Phase.STEP and process.board.done == process.resumed_at
        return self._learned.of(
            seen.phase.name.lower(),
            floor_s=floor,
            bound_s=bound,
            label=seen.label,
            first=first,
        )

    def _evidence(self, process: P, now: float) -> Evidence:
        seen, board = self._seen[process.ticket], process.board
        waiting = seen.phase in _UNWATCHED
        limits = self._limits(seen, process)
        return Evidence(
            rank=process.rank,
            inc=process.inc,
            idle_s=0.0 if waiting else self._watch.idle(seen.progress, now),
            limit_s=limits.kill_s,
            beat_age_s=now - board.last_beat if board.last_beat else -1.0,
            state=state_letter(process.pid),
            phase=_name(seen),
            step=board.step,
            seq=board.seq,
            seqs=board.sequence_numbers,
            stack=self._stack(process),
        )

    def _ask_stack(self, process: P) -> None:
        if stack_file(self._run_dir, process.rank, process.inc).exists():
            # The handler is in place: the signal is harmless.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, STACK_SIGNAL)

    def _stack(self, process: P) -> str:
        try:
            file = stack_file(self._run_dir, process.rank, process.inc)
            text = file.read_text(errors="replace")
        except OSError:
            return ""
        return text[-8000:]


def _name(seen: _Seen) -> str:
    name = seen.phase.name.lower()
    return f"{name}:{seen.label}" if seen.label else name
