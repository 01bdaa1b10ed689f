"""SIGTERM and Ctrl-C to the agent: ranks get the notice, time, and an end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.process.job import LOOP, Job, finish_file, wait_until

# Tells that it runs, then waits for the signals named in its arguments.
_NOTICED = """
import os, signal, sys, time
noticed = []
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), lambda number, _: noticed.append(number))
print("ready", flush=True)
while not noticed:
    time.sleep(0.01)
print("noticed", signal.Signals(noticed[0]).name)
"""
_DEAF = """
import signal, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(1000)
"""
_PLAIN = 'import time\nprint("ready", flush=True)\ntime.sleep(1000)\n'


def _ready(job: Job) -> None:
    job.until(lambda: job.out.count("ready") == 2, "both ranks are ready")


@pytest.mark.parametrize(
    ("name", "method"), [("SIGTERM", "fork"), ("SIGINT", "fork"), ("SIGTERM", "spawn")]
)
def test_a_plain_script_gets_the_signal_and_may_end_by_itself(
    tmp_path: Path, name: str, method: str
) -> None:
    flags = ["--start-method", method]
    with Job(tmp_path, _NOTICED, flags=flags, arguments=[name]) as job:
        _ready(job)
        job.signal(signal.Signals[name])
        assert job.wait() == 75
    assert job.out.count(f"noticed {name}") == 2
    assert job.data("stop.notice") == [{"signal": name}]
    assert [data["code"] for data in job.data("rank.exit")] == [0, 0]
    assert f"after {name}" in job.ending
    assert "Traceback" not in job.err


def test_a_plain_script_that_does_not_handle_the_signal_ends_by_it(tmp_path: Path) -> None:
    with Job(tmp_path, _PLAIN) as job:
        _ready(job)
        job.signal(signal.SIGTERM)
        assert job.wait() == 75
    assert [data["code"] for data in job.data("rank.exit")] == [-15, -15]
    assert job.causes() == []


def test_who_ignores_the_signal_is_ended_after_the_grace(tmp_path: Path) -> None:
    with Job(tmp_path, _DEAF, flags=["--set", "run.grace_s=1"]) as job:
        _ready(job)
        job.signal(signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM
    assert [(data["code"], data["by_us"]) for data in job.data("rank.exit")] == [(-9, True)] * 2
    assert "SIGTERM: ended after 1 s" in job.ending


def test_a_second_signal_ends_the_job_at_once(tmp_path: Path) -> None:
    with Job(tmp_path, _DEAF, flags=["--set", "run.grace_s=500"]) as job:
        _ready(job)
        job.signal(signal.SIGINT)
        wait_until(lambda: "SIGINT: ranks have 500 s" in job.err, "the first signal is seen")
        job.signal(signal.SIGINT)
        assert job.wait() == 128 + signal.SIGINT
    assert [data["code"] for data in job.data("rank.exit")] == [-9, -9]
    assert "KeyboardInterrupt" not in job.err
    assert "Traceback" not in job.err


def test_a_restartable_script_that_cannot_save_is_ended_after_the_grace(tmp_path: Path) -> None:
    arguments = [str(finish_file(tmp_path))]
    with Job(tmp_path, LOOP, flags=["--set", "run.grace_s=1"], arguments=arguments) as job:
        job.running()
        job.signal(signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM
    assert job.causes() == []
    assert "Traceback" not in job.err


def test_a_signal_while_the_helpers_start_ends_the_job_cleanly(tmp_path: Path) -> None:
    with Job(tmp_path, _PLAIN, flags=["--set", "run.grace_s=1"]) as job:
        job.until(lambda: len(job.pids()) >= 4, "the helpers are started")
        job.until(lambda: job.events("node.begin"), "the agent watches")
        job.signal(signal.SIGTERM)
        assert job.wait() in (75, 128 + signal.SIGTERM)
    assert "Traceback" not in job.err


def test_ranks_that_flood_their_output_do_not_hold_up_the_agent(tmp_path: Path) -> None:
    script = """
    import os, time
    print("ready", flush=True)
    while True:
        os.write(1, b"x\\n" * 20000)
        time.sleep(0.001)
    """

    def flooded() -> bool:
        sizes = [log.stat().st_size for log in (job.run_dir / "logs").glob("rank-*.stdout.log")]
        return len(sizes) == 2 and min(sizes) > 16 << 20  # far more than is shown by then

    with Job(tmp_path, script, flags=["--set", "run.grace_s=1"]) as job:
        job.until(flooded, "both ranks have written 16 MiB")
        job.signal(signal.SIGTERM)
        assert job.wait(30.0) == 75
        logs = list((job.run_dir / "logs").glob("*.stdout.log"))
        for log in logs:
            log.unlink()  # they are large
    assert "bytes are left out here; all of it is in" in job.out
