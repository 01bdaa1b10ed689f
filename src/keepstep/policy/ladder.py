"""What is done about a failure: the recovery ladder and the restart budget. Pure; the coordinator
calls it.

A restart is free as long as the job gets on. What ends a job is a failure of the script that comes
again in a process with no past, restarts that bring nothing, and a checkpoint that cannot be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from keepstep.config import RestartSettings
from keepstep.errors import ExitCode
from keepstep.policy.attribution import Attribution, FailureKey, first_line

SCRIPT_KINDS = frozenset({"exception", "exit"})
"""Causes that the script itself can be behind. A kill or a hang never counts as its error."""

Level = Literal["rerun", "rank", "respawn", "stop"]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the run has ever come: newest step committed, and highest step begun by any rank."""

    committed: int
    highest: int

    def beyond(self, record: Record) -> bool:
        """Whether the run got further since ``record``."""
        return self.committed > record.committed or self.highest > record.highest


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier failure that was followed by a restart."""

    key: FailureKey
    committed: int
    highest: int

    @classmethod
    def of(cls, failure: Attribution, progress: Progress) -> Record:
        """What to remember of ``failure``; append it to the history after each restart."""
        return cls(key=failure.key, committed=progress.committed, highest=progress.highest)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do.

    ``rerun``: all ranks leave the round and call ``main`` again. ``rank``: the processes of the
    ranks in ``replace`` are replaced, the others rerun. ``respawn``: every process is replaced.
    ``stop``: the job ends with ``exit_code`` (0 with the other levels).
    """

    level: Level
    reason: str
    exit_code: int = 0
    replace: tuple[int, ...] = ()


def decide(
    history: Sequence[Record],
    failure: Attribution,
    progress: Progress,
    settings: RestartSettings,
    *,
    in_process: bool,
) -> Decision:
    """Choose the level of recovery.

    Args:
        history: Earlier failures of this run that were answered by a restart, oldest first.
        failure: What happened now.
        progress: How far the run has come.
        settings: The budget.
        in_process: Whether the script uses ``keepstep.run``, so that processes can be kept.
    """
    seen = failure.cause in SCRIPT_KINDS and any(r.key == failure.key for r in history)
    stop = (
        _unusable(failure)
        or (_script_failed(failure) if seen and failure.fresh else None)
        or _exhausted(history, failure, progress, settings)
    )
    if stop is not None:
        return stop
    if not in_process:
        why = "no rank meets the others through keepstep.run, so all processes are replaced"
        return Decision(level="respawn", reason=why)
    if failure.dead:
        why = f"{_named(failure.dead)} cannot go on in the same process"
        return Decision(level="rank", reason=why, replace=failure.dead)
    if seen:
        ranks = failure.same or (failure.guilty,)
        why = f"the same error came again: {_named(ranks)} gets a fresh process"
        return Decision(level="rank", reason=why, replace=ranks)
    return Decision(level="rerun", reason="all processes live and can start the round again")


def _unusable(failure: Attribution) -> Decision | None:
    if failure.fatal:
        code, why = failure.fatal, "a restart cannot help"
    elif failure.cause == "save":
        code, why = int(ExitCode.CHECKPOINT), "checkpoints cannot be saved"
    else:
        return None
    return Decision(level="stop", reason=f"{why}: {failure.line}", exit_code=code)


def _script_failed(failure: Attribution) -> Decision:
    what = first_line(failure.error)
    shown = f" [{what}]" if what and what not in failure.line else ""
    reason = f"the script fails in the same way in a fresh process: {failure.line}{shown}"
    return Decision(level="stop", reason=reason, exit_code=int(ExitCode.SCRIPT_FAILED))


def _exhausted(
    history: Sequence[Record],
    failure: Attribution,
    progress: Progress,
    settings: RestartSettings,
) -> Decision | None:
    in_vain = 0
    for record in reversed(history):
        if progress.beyond(record):
            break
        in_vain += record.key.kind != "checkpoint"
    # A damaged checkpoint is never tried twice, so these failures end by themselves, with an older
    # one that is good or with none.
    if failure.cause != "checkpoint" and in_vain + 1 > settings.max_without_progress:
        spent = f"{in_vain} restarts in a row brought no new step"
        limit = f"restart.max_without_progress is {settings.max_without_progress}"
    elif 0 <= settings.max_restarts < len(history) + 1:
        spent = f"{len(history)} restarts are spent"
        limit = f"restart.max_restarts is {settings.max_restarts}"
    else:
        return None
    reason = f"{spent} ({limit}); the last failure: {failure.line}"
    return Decision(level="stop", reason=reason, exit_code=int(ExitCode.RESTARTS_EXHAUSTED))


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
