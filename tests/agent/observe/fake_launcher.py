"""A launcher like NVRx's, without torch: starts N ranks, and all of them again when one fails.

``python -m tests.agent.observe.fake_launcher N RESTARTS WORKER ARGUMENTS...``
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

_STOP_S = 3.0


def _start(rank: int, count: int, cycle: int, command: list[str]) -> subprocess.Popen[bytes]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    names["TORCHELASTIC_RESTART_COUNT"] = cycle
    environ = {**os.environ, **{name: str(value) for name, value in names.items()}}
    return subprocess.Popen(command, env=environ, start_new_session=True)


def _stop(ranks: list[subprocess.Popen[bytes]], number: int) -> None:
    """SIGTERM, then SIGKILL."""
    for rank in ranks:
        rank.send_signal(number)
    for rank in ranks:
        try:
            rank.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


class _Stopped(Exception):
    """A signal came."""


def _raise(number: int, _: object) -> None:
    raise _Stopped(number)


def main() -> int:
    """Entry point."""
    count, restarts = int(sys.argv[1]), int(sys.argv[2])
    command = [sys.executable, "-m", *sys.argv[3:]]
    pause = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _raise)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for cycle in range(restarts + 1):
            ranks = [_start(rank, count, cycle, command) for rank in range(count)]
            while True:
                codes = [rank.poll() for rank in ranks]
                if any(codes):
                    break
                if None not in codes:
                    return 0
                pause.wait(0.1)
            for local, (rank, code) in enumerate(zip(ranks, codes, strict=True)):
                if code:
                    print(f"failed (exitcode: {code}) local_rank: {local} (pid: {rank.pid}) of x")
            sys.stdout.flush()
            _stop(ranks, signal.SIGTERM)
    except _Stopped as stopped:
        _stop(ranks, stopped.args[0])
        return 1 if any(rank.returncode for rank in ranks) else 0
    print("FakeLauncherError: no restart is left", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())
