"""What the reproductions in this folder share: start ranks, wait with a limit, leave nothing."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

MARK = "NVRX_DEFECT"
"""Variable by which processes are found whose parent is gone."""

# torch says on import that the package pynvml, which NVRx 0.4.1 asks for, is an old name.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")


def free_port() -> int:
    """A TCP port that nobody uses just now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


class Ranks:
    """``count`` processes of ``script``, with the environment that a launcher gives.

    Args:
        script: Started as ``python script *arguments``.
        count: Number of ranks.
    """

    def __init__(self, script: str, count: int, *arguments: str) -> None:
        self.mark = secrets.token_hex(8)
        shared = {
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore",
            MARK: self.mark,
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, script, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(count)
        ]

    def line(self, rank: int) -> str:
        """The next line that ``rank`` prints; empty when it has ended.

        Raises:
            RuntimeError: the rank ended with an error and printed nothing more.
        """
        process = self.processes[rank]
        assert process.stdout is not None
        text = process.stdout.readline()
        if not text and process.wait() != 0:
            assert process.stderr is not None
            raise RuntimeError(process.stderr.read())
        return text.rstrip("\n")

    def left(self) -> list[int]:
        """Process ids of all that is alive, also of what ranks have started."""
        return [pid for pid in _marked(self.mark) if _lives(pid)]

    def kill(self) -> None:
        """SIGKILL everything."""
        _kill(_marked(self.mark))
        for process in self.processes:
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        within(10.0, lambda: not self.left())


def _marked(mark: str) -> Iterator[int]:
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        return state not in "ZX"
    return False


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        # Python's resource tracker ends when the others have, and removes what they left.
        if "resource_tracker" not in command_of(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def command_of(pid: int) -> str:
    """How process ``pid`` was started."""
    with contextlib.suppress(OSError):
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
        return " ".join(raw.decode(errors="replace").split("\0"))[:100]
    return ""


def within(seconds: float, true: Callable[[], object]) -> bool:
    """Whether ``true()`` holds at some time in the next ``seconds``."""
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def one_rank() -> None:
    """Make this process a world of one, with gloo."""
    import torch.distributed

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(free_port())
    torch.distributed.init_process_group("gloo")


def wrapper(*, gpu_check: bool = False, **changes: Any) -> Any:
    """NVRx's Wrapper with limits short enough to watch; without what ``no_gpu_restart.py`` shows
    unless ``gpu_check``."""
    from nvidia_resiliency_ext import inprocess

    limits = {
        "monitor_thread_interval": 0.1,
        "monitor_process_interval": 0.1,
        "heartbeat_interval": 0.2,
        "progress_watchdog_interval": 0.2,
        "soft_timeout": 2.0,
        "hard_timeout": 3.0,
        "heartbeat_timeout": 2.0,
        "barrier_timeout": 4.0,
        "completion_timeout": 4.0,
        "last_call_wait": 0.1,
        "termination_grace_time": 0.5,
    }
    times = {name: datetime.timedelta(seconds=value) for name, value in limits.items()}
    made = inprocess.Wrapper(**(times | changes))
    if not gpu_check:
        made.restart_health_check = made.health_check
    return made


def verdict(seen: bool, what: str) -> NoReturn:
    """Say whether the defect was seen, and end this process and all below it at once.

    The exit code is 0 if it was seen and 1 if not.
    """
    version = importlib.metadata.version("nvidia-resiliency-ext")
    print(f"NVRx {version}: {'DEFECT' if seen else 'not seen'}: {what}", flush=True)
    _kill(_below(os.getpid()))
    # NVRx's own destructors may wait for what is dead.
    os._exit(0 if seen else 1)


def _below(pid: int) -> list[int]:
    """Process ids of the descendants of ``pid``."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in file.read_text(encoding="utf-8").split():
                found += [int(child), *_below(int(child))]
    return found
