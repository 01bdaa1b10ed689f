"""When rank 0 dies, the other ranks wait for ever.

    python rank_0_store.py

By default rank 0 hosts the store that the Wrapper's ranks meet in. With rank 0 the store is gone:
monitor threads and monitor processes of the others end with a network error, and the main threads
wait for a monitor that is not there any more.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from ranks import Ranks, verdict, wrapper

DEADLINE_S = 8.0
"""Twice the longest of the Wrapper's limits, its barrier of 4 s."""


def rank() -> None:
    import torch
    import torch.distributed as dist

    def train() -> None:
        dist.init_process_group("gloo", init_method="env://")
        for step in range(1000):
            if step == 3 and os.environ["RANK"] == "0":
                print("dies", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.zeros(1))
            time.sleep(0.05)

    port = int(os.environ["MASTER_PORT"])
    os.environ["MASTER_PORT"] = str(port + 1)  # torch's store; the Wrapper's is another one
    store = {"host_name": "127.0.0.1", "port": port, "world_size": 2}
    wrapper(store_kwargs=store)(train)()


def main() -> None:
    with Ranks(__file__, 2, "rank") as ranks:
        ranks.line(0)
        ranks.processes[0].wait()
        began = time.monotonic()
        survivor = ranks.processes[1]
        while survivor.poll() is None and time.monotonic() - began < DEADLINE_S:
            time.sleep(0.1)
        waiting = survivor.poll() is None
    verdict(
        waiting,
        f"{DEADLINE_S:g} s after the death of rank 0 the other rank has neither ended nor gone on",
    )


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
