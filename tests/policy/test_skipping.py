from __future__ import annotations

from keepstep.policy.skipping import retry_line, skip_line, skip_reason


def test_a_save_is_begun_while_fewer_are_unfinished_than_there_are_slots() -> None:
    assert skip_reason(0, 1, 0, 0.0) == ""
    assert skip_reason(1, 2, 10, 3.0) == ""
    assert skip_reason(1, 1, 10, 3.21) == (
        "1 save is still being written, the oldest (step 10) for 3.2 s"
    )
    assert "3 saves are still being written" in skip_reason(3, 2, 10, 3.0)


def test_lines_name_the_step_and_say_what_to_do() -> None:
    line = skip_line(15, "2 saves are still being written")
    assert "step 15" in line and "2 saves are" in line and "checkpoint.every_steps" in line
    again = retry_line(15, 3, 2, "disk full")
    assert all(part in again for part in ("step 15", "rank 3", "attempt 2", "disk full"))
