"""A process that holds the lease of a folder: run as ``python -m tests.storage.leases ROOT RUN``.

It says ``held`` on its standard output, or the error and its exit code; then it lives until its
standard input ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

from keepstep.checkpoint.lease_keeper import LeaseKeeper
from keepstep.errors import KeepstepError


def main() -> int:
    root, run = Path(sys.argv[1]), sys.argv[2]
    keeper = LeaseKeeper(
        root, run, relieves=False, say=print, expiry_s=1.0, beat_s=0.1, poll_s=0.05
    )
    try:
        keeper.claim()
    except KeepstepError as error:
        print(f"refused: {error}", flush=True)
        return int(error.exit_code)
    print("held", flush=True)
    sys.stdin.read()
    print(f"lost: {keeper.lost()}", flush=True)
    keeper.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
