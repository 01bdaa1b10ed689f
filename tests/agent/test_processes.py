"""One rank's process as its agent sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from keepstep.agent import processes
from keepstep.wire.channel import Channel, pair
from keepstep.wire.messages import FROM_ZYGOTE, TO_ZYGOTE, Go, Spawn
from tests.agent.boards import rank_process
from tests.process.job import wait_until

_PID_OF_NOBODY = 2**22 + 1


def _go(resume: int) -> Go:
    return Go(term=1, round=2, resume=resume, folder="step-00000007" if resume else "")


def test_a_parked_process_gets_socket_board_and_log_files_of_its_own(tmp_path: Path) -> None:
    ours, theirs = pair()
    agent: Channel[FROM_ZYGOTE] = Channel(ours, FROM_ZYGOTE, blocking=False)
    zygote: Channel[TO_ZYGOTE] = Channel(theirs, TO_ZYGOTE, blocking=True)
    before = set(os.listdir("/proc/self/fd"))
    process = processes.make(7, tmp_path, agent)  # type: ignore[arg-type,unused-ignore]
    with contextlib.closing(agent), contextlib.closing(zygote), contextlib.ExitStack() as stack:
        assert zygote.receive() == Spawn(ticket=7)
        control, board, out, err = (zygote.take_fd() for _ in range(4))
        for fd in (control, board, out, err):
            stack.callback(os.close, fd)
        os.write(out, b"to stdout")
        os.write(err, b"to stderr")
        assert process.logs[1].read_text() == "to stdout"
        assert process.logs[2].read_text() == "to stderr"
        # The agent itself keeps its end of the socket, and the board's map keeps a descriptor.
        assert len(set(os.listdir("/proc/self/fd")) - before) == 4 + 2
        assert (process.ticket, process.state, process.rank) == (7, "forking", -1)
        process.channel.close()
        process.board.close()


def test_logs_are_named_after_the_rank_that_the_process_becomes(tmp_path: Path) -> None:
    with rank_process(3) as process:
        process.inc = 12
        for stream, name in ((1, "out"), (2, "err")):
            process.logs[stream] = tmp_path / name
            process.logs[stream].write_text(name)
        processes.name_logs(process, tmp_path)
        assert process.logs[1].read_text() == "out"
        assert {path.name for path in tmp_path.iterdir()} == {
            "rank-00003-012.stdout.log",
            "rank-00003-012.stderr.log",
        }


def test_only_empty_logs_of_a_parked_process_are_dropped(tmp_path: Path) -> None:
    with rank_process() as process:
        process.logs = {1: tmp_path / "parked-1.stdout.log", 2: tmp_path / "parked-1.stderr.log"}
        process.logs[1].write_text("")
        process.logs[2].write_text("why it died")
        processes.drop_parked_logs(process)
        assert [path.name for path in tmp_path.iterdir()] == ["parked-1.stderr.log"]
        process.logs = {1: tmp_path / "rank-00000-000.stdout.log"}
        process.logs[1].write_text("")
        processes.drop_parked_logs(process)
        assert process.logs[1].exists()


def test_the_first_step_of_each_round_is_told_once() -> None:
    with rank_process() as process:
        process.adopted = True
        board = process.board
        process.note(_go(0))
        board.enter_round(1, 0)
        assert process.first_step_done() == 0
        board.end_step(1, 0.1, 0.0)
        assert process.first_step_done() == 1
        board.end_step(2, 0.1, 0.0)
        assert process.first_step_done() == 0
        process.note(_go(7))
        board.enter_round(2, 7)
        assert process.first_step_done() == 0
        board.end_step(8, 0.1, 0.0)
        assert process.first_step_done() == 8
        assert process.first_step_done() == 0


def test_a_script_without_rounds_tells_its_first_step_too() -> None:
    with rank_process() as process:
        assert process.first_step_done() == 0
        process.board.end_step(1, 0.1, 0.0)
        assert process.first_step_done() == 1
        process.board.end_step(2, 0.1, 0.0)
        assert process.first_step_done() == 0


def test_the_state_of_a_process_is_the_kernels_letter() -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: processes.state_letter(child.pid) == "T", "it is stopped")
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda: processes.state_letter(child.pid) == "Z", "it is a zombie")
    assert processes.state_letter(child.pid) == "X"
    assert processes.state_letter(os.getpid()) == "R"


@pytest.mark.needs("strace")
def test_a_process_under_a_debugger_is_seen_as_traced() -> None:
    with subprocess.Popen(["strace", "-o", "/dev/null", "sleep", "1000"]) as tracer:
        children = Path(f"/proc/{tracer.pid}/task/{tracer.pid}/children")
        wait_until(
            lambda: any(processes.traced(int(pid)) for pid in children.read_text().split()),
            "the traced process is seen",
        )
        for pid in children.read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def test_nobody_is_not_traced() -> None:
    assert not processes.traced(os.getpid())
    assert not processes.traced(_PID_OF_NOBODY)
