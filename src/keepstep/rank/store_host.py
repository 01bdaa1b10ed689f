"""Hosts torch's store outside the ranks, so that rank 0 may die.

Run by ``keepstep run`` as ``python -m keepstep.rank.store_host --fd N --parent PID``, where N is a
listening TCP socket. The store lives as long as the parent does.
"""

from __future__ import annotations

import argparse
import signal
import socket

import torch.distributed as dist

from keepstep import linux


def main() -> None:
    """Entry point; never returns by itself."""
    parser = argparse.ArgumentParser(prog="keepstep.rank.store_host")
    parser.add_argument("--fd", type=int, required=True, help="listening TCP socket")
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    linux.die_with_parent(options.parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the run, which needs the store
    sock = socket.socket(fileno=options.fd)
    port = sock.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach()
    )
    while store is not None:
        signal.pause()


if __name__ == "__main__":
    main()
