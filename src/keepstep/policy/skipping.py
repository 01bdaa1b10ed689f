"""What is said of saves that storage holds up: whether one that is due is skipped, and what was
tried again. Pure.

Asked by the coordinator, and by the ranks where there is none.
"""

from __future__ import annotations


def skip_reason(unfinished: int, slots: int, step: int, age_s: float) -> str:
    """Why no save should begin now; empty if one may.

    Args:
        unfinished: Saves that are neither committed nor over. slots: staging copies of a rank.
        step: Of the oldest of them. age_s: how long ago that was begun.
    """
    if unfinished < slots:
        return ""
    saves = "1 save is" if unfinished == 1 else f"{unfinished} saves are"
    return f"{saves} still being written, the oldest (step {step}) for {age_s:.1f} s"


def skip_line(step: int, reason: str) -> str:
    """One line for people about a save that was not begun."""
    return (
        f"checkpoint of step {step} was skipped: {reason}; storage is slower than the schedule, "
        "save less often (checkpoint.every_steps)"
    )


def retry_line(step: int, rank: int, attempt: int, error: str) -> str:
    """One line for people about a shard that storage refused and that is tried again."""
    return (
        f"checkpoint of step {step}: storage refused the shard of rank {rank} (attempt {attempt}), "
        f"it is tried again: {error}"
    )
