"""Holds another engine's launcher: nothing that it started outlives it, or ``keepstep run``.

Run by ``keepstep run`` as ``python -m keepstep.agent.observe.guard --fd N -- COMMAND...``, where N
is a socket: each byte that comes is the number of a signal for the launcher, its end is that of
``keepstep run``, and the launcher's exit code goes back when nothing of it is left. Without this
process, the launcher's monitors would go on when ``keepstep run`` is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from keepstep import linux

NO_PROGRAM = 127
"""Exit code of a launcher that cannot be started."""
_LIMIT_S = 20.0


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="keepstep.agent.observe.guard")
    parser.add_argument("--fd", type=int, required=True, help="socket to keepstep run")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    linux.become_subreaper()
    with socket.socket(fileno=options.fd) as sock:
        family: set[int] = set()
        code = _launcher(options.command, sock, family)
        family |= linux.children()
        linux.end_children(keep=(), limit_s=_LIMIT_S)
        _remove_sockets(family)
        with contextlib.suppress(OSError):
            sock.send(str(code).encode())


def _launcher(command: list[str], sock: socket.socket, family: set[int]) -> int:
    """Run the launcher to its end, or to that of ``keepstep run``; returns its exit code.

    Args:
        family: Gets the launcher's process, and its children's where it has to be killed.
    """
    me = os.getpid()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # This process has one thread: it is safe to run code after the fork.
            preexec_fn=lambda: linux.die_with_parent(me),
        )
    except OSError as error:
        sys.stderr.write(f"keepstep: {command[0]} cannot be started: {error}\n")
        return NO_PROGRAM
    family.add(process.pid)
    ended = os.pidfd_open(process.pid)
    with selectors.DefaultSelector() as selector:
        selector.register(ended, selectors.EVENT_READ)
        selector.register(sock, selectors.EVENT_READ)
        while process.poll() is None:
            ready = {key.fileobj for key, _ in selector.select()}
            if sock in ready and not _pass_on(sock, process):
                table = linux.parents()
                family |= {pid for pid, (parent, _) in table.items() if parent == process.pid}
                linux.kill_tree(process.pid)
                selector.unregister(sock)
    os.close(ended)
    return process.returncode


def _remove_sockets(family: set[int]) -> None:
    """Remove the sockets of NVRx's launcher and monitors that could not do it themselves."""
    for pid in family:
        for path in Path(tempfile.gettempdir()).glob(f"_ft_launcher{pid}[._]*"):
            if path.is_socket():
                path.unlink(missing_ok=True)


def _pass_on(sock: socket.socket, process: subprocess.Popen[bytes]) -> bool:
    """Send the launcher the signals that came; False when ``keepstep run`` is gone."""
    try:
        numbers = sock.recv(64)
    except ConnectionError:
        return False
    for number in numbers:
        process.send_signal(number)
    return bool(numbers)


if __name__ == "__main__":
    main()
