"""A process that has imported once and forks: a fresh process in milliseconds.

A crash test needs hundreds of processes that are killed. ``Forks`` starts a helper that imports
what they need, stays single-threaded, and forks a child for every call of ``start``.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Self

_LIMIT_S = 60.0
_LARGEST = 1 << 16
_START = (
    "import os, sys; sys.path = sys.argv[1].split(os.pathsep);"
    "from tests.crash import forks; forks.main()"
)


class Forks:
    """Starts functions in fresh processes.

    Args:
        preload: Modules that are imported before the first fork; a function ``preload`` in them is
            called.
    """

    def __init__(self, *preload: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_LIMIT_S)
        self._lock = threading.Lock()
        words = [sys.executable, "-c", _START, os.pathsep.join(sys.path)]
        with theirs:
            self._process = subprocess.Popen(
                [*words, str(theirs.fileno()), *preload],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )

    def start(self, target: str, *arguments: str, fds: Sequence[int] = ()) -> int:
        """Call ``target`` (``module:function``) in a fork; returns its process id.

        The function gets ``arguments`` and then the numbers of the descriptors; what it returns is
        the exit status.
        """
        return self._ask({"target": target, "arguments": arguments}, fds)

    def wait(self, pid: int) -> int:
        """The exit status of a fork that is ending; minus the signal that ended it."""
        # Not in the helper: others may want to start something meanwhile.
        handle = os.pidfd_open(pid)
        try:
            ended, _, _ = select.select([handle], [], [], _LIMIT_S)
        finally:
            os.close(handle)
        assert ended, f"process {pid} does not end"
        return self._ask({"wait": pid})

    def _ask(self, request: object, fds: Sequence[int] = ()) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], list(fds))
            answer = self._socket.recv(_LARGEST)
        assert answer, "the helper process is gone"
        return int(json.loads(answer))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait(_LIMIT_S)


def main() -> None:
    """Serve until the socket closes: the helper process."""
    channel = socket.socket(fileno=int(sys.argv[2]))
    for name in sys.argv[3:]:
        module = importlib.import_module(name)
        getattr(module, "preload", int)()
    while True:
        data, fds, _, _ = socket.recv_fds(channel, _LARGEST, 8)
        if not data:
            return
        request = json.loads(data)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if not answer:
                channel.close()
                os._exit(_child(request["target"], request["arguments"], fds))
        for fd in fds:
            os.close(fd)
        channel.send(json.dumps(answer).encode())


def _child(target: str, arguments: list[str], fds: list[int]) -> int:
    try:
        module, _, name = target.partition(":")
        return int(getattr(importlib.import_module(module), name)(*arguments, *fds) or 0)
    except BaseException:  # noqa: BLE001 - the child must never return into the helper's loop
        traceback.print_exc()
        return 99
    finally:
        sys.stderr.flush()
