"""Entry point of the coordinator's process."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from keepstep.config.load import decode
from keepstep.coordinator.server import Coordinator, ignore_terminal_signals


def main() -> None:
    """Serve the agent whose socket is given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--lease", type=int, default=0)
    options = parser.parse_args()
    ignore_terminal_signals()
    Coordinator(
        socket.socket(fileno=options.fd),
        run=options.run,
        run_dir=options.run_dir,
        world=options.world,
        config=decode(options.config.encode()),
        lease=options.lease,
    ).serve()


if __name__ == "__main__":
    main()
