"""NVRx's abort frees no rank that is blocked in a gloo collective.

    python gloo_abort.py

``AbortTorchDistributed`` asks each process group for its CUDA backend. A gloo group has none; the
error stays in a future that nobody reads, and the group is destroyed without being aborted. A rank
whose partner is gone stays blocked until the process group's own time-out.
"""

from __future__ import annotations

import datetime
import sys
import threading
import time

from ranks import Ranks, verdict

TIMEOUT_S = 6.0


def rank() -> None:
    import torch
    import torch.distributed as dist
    from nvidia_resiliency_ext.inprocess.abort import AbortTorchDistributed

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    dist.all_reduce(torch.zeros(1))
    if dist.get_rank() == 1:  # it hangs: it does not come to the next collective
        print("hangs", flush=True)
        time.sleep(3600)
    freed = threading.Event()

    def blocked() -> None:
        try:
            dist.all_reduce(torch.zeros(1))
        except Exception as error:
            print(f"freed by {type(error).__name__}", file=sys.stderr)
        freed.set()

    threading.Thread(target=blocked, daemon=True).start()
    time.sleep(0.5)
    began = time.monotonic()
    threading.Thread(target=AbortTorchDistributed(), args=(None,), daemon=True).start()
    freed.wait(3 * TIMEOUT_S)
    print(f"{time.monotonic() - began:.1f}", flush=True)


def main() -> None:
    with Ranks(__file__, 2, "rank") as ranks:
        blocked_s = float(ranks.line(0))
    verdict(
        blocked_s > TIMEOUT_S / 2,
        f"after the abort the rank was blocked for {blocked_s:.1f} s more; the process group's "
        f"time-out is {TIMEOUT_S:g} s",
    )


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
