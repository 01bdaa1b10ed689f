"""What people see: plain where nobody watches a terminal, one live line where somebody does."""

from __future__ import annotations

import io
import math

from keepstep.agent.console import Console


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ranks_keep_their_streams_and_keepstep_speaks_on_stderr() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err)
    console.show(1, "[rank 0] one")
    console.show(2, "[rank 0] two")
    console.say("three")
    console.close()
    assert out.getvalue() == "[rank 0] one\n"
    assert err.getvalue() == "[rank 0] two\nkeepstep: three\n"


def test_progress_is_a_plain_line_now_and_then_without_a_terminal() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err)
    for tick in range(250):
        console.progress(tick, 0.25, 1.5 if tick else math.nan, 1000.0 + tick / 10)
    lines = err.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == (
        "keepstep: step 1 | loss 1.5000 | 0.250 s/step | no checkpoint yet | restarts 0"
    )
    assert "\r" not in err.getvalue()
    assert "\x1b" not in err.getvalue()
    assert out.getvalue() == ""


def test_progress_names_the_committed_step_and_restarts_and_leaves_out_a_loss_not_given() -> None:
    err = io.StringIO()
    console = Console(io.StringIO(), err)
    console.committed, console.restarts = 40, 2
    console.progress(47, 0.1, math.nan, 100.0)
    assert err.getvalue() == ("keepstep: step 47 | 0.100 s/step | checkpoint 40 | restarts 2\n")


def test_nothing_is_shown_before_the_first_step() -> None:
    err = io.StringIO()
    Console(io.StringIO(), err).progress(0, 0.0, math.nan, 100.0)
    assert err.getvalue() == ""


def test_on_a_terminal_other_lines_take_the_place_of_the_progress_line() -> None:
    err = _Terminal()
    console = Console(io.StringIO(), err)
    console.progress(1, 0.1, math.nan, 100.0)
    console.say("rank 1 failed")
    console.progress(2, 0.1, math.nan, 101.0)
    console.close()
    clear = "\r\x1b[K"
    line = "{} | 0.100 s/step | no checkpoint yet | restarts 0"
    assert err.getvalue() == (
        f"{clear}{line.format('step 1')}{clear}keepstep: rank 1 failed\n"
        f"{clear}{line.format('step 2')}{clear}"
    )
