"""After the death of a rank the Wrapper goes on with fewer.

    python world_shrinks.py

That is NVRx's design. A model sharded over all ranks has lost a shard then, the global batch is
smaller, and without spare ranks nothing brings the world back.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from ranks import Ranks, verdict, wrapper

WORLD = 2


def rank() -> None:
    from nvidia_resiliency_ext.inprocess import CallWrapper

    def train(call):
        print(call.iteration, os.environ["WORLD_SIZE"], flush=True)
        if call.iteration:
            return
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # the others train on until they are interrupted
            call.ping()
            time.sleep(0.05)

    train.__annotations__ = {"call": CallWrapper}  # a string would do no good: string_annotation.py
    wrapper()(train)(None)


def main() -> None:
    with Ranks(__file__, WORLD, "rank") as ranks:
        before, after = ranks.line(0), ranks.line(0)
    verdict(
        (before, after) == (f"0 {WORLD}", f"1 {WORLD - 1}"),
        f"iteration and world size were {before}, and after the death of rank 1 {after or 'none'}",
    )


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
