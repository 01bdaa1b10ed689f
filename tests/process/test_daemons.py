"""Daemons that ranks start by a double fork belong to their rank, whatever others do."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.process.job import Job, lives

SCRIPT = """
import os, sys, time
import keepstep

def daemon(path):
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    with open(path, "w") as file:
        file.write(f"{os.getpid()}\\n")
    while True:
        time.sleep(1)

folder = sys.argv[1]
daemon(f"{folder}/daemon-{os.environ['RANK']}-{os.getpid()}")

@keepstep.restartable
def main():
    while not os.path.exists(f"{folder}/end"):
        keepstep.heartbeat()
        time.sleep(0.01)
main()
"""


def _daemons(folder: Path, rank: int) -> list[int]:
    """The daemons of ``rank``'s processes, oldest first."""
    files = sorted(folder.glob(f"daemon-{rank}-*"), key=lambda path: path.stat().st_mtime_ns)
    return [int(text) for path in files if (text := path.read_text()).endswith("\n")]


def test_a_forked_daemon_lives_as_long_as_its_rank_and_no_longer(tmp_path: Path) -> None:
    with Job(tmp_path, SCRIPT, arguments=[str(tmp_path)]) as job:
        job.until(lambda: _daemons(tmp_path, 0) and _daemons(tmp_path, 1), "both have a daemon")
        first, other = _daemons(tmp_path, 0)[0], _daemons(tmp_path, 1)[0]
        job.until(lambda: job.data("round.ready"), "the first round")
        pids = job.until(lambda: job.rank_pids(), "both ranks' processes are known")
        os.kill(pids[0], signal.SIGKILL)
        job.until(lambda: not lives(first), "the dead rank's daemon is ended")
        job.until(lambda: len(_daemons(tmp_path, 0)) == 2, "the successor has a daemon")
        job.until(lambda: len(job.data("restart.end")) == 1, "all train again")
        assert lives(other) and lives(_daemons(tmp_path, 0)[1])
        (tmp_path / "end").touch()
        assert job.wait() == 0, job.ending
