"""NVRx's checkpoint processes outlive a trainer that was killed.

    python orphans.py

The trainer saves once and is then killed with SIGKILL, as for lack of memory. Its worker waits for
the next request for ever, and so does the manager process that brings results back.
"""

from __future__ import annotations

import signal
import sys
import time

from ranks import Ranks, command_of, one_rank, verdict, within

DEADLINE_S = 3.0


def trainer() -> None:
    from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest

    one_rank()
    queue = AsyncCallsQueue(persistent=True)
    if hasattr(queue, "cpu_shm_mode"):  # 0.6 and newer set up a GPU otherwise
        queue.cpu_shm_mode = True
    queue.schedule_async_request(AsyncRequest(time.sleep, (0,), [], {}))
    within(60, lambda: queue.maybe_finalize_async_calls(blocking=False, no_dist=True))
    filesystem_async._get_write_results_queue()  # what each FileSystemWriterAsync begins with
    print("saved", flush=True)
    time.sleep(3600)


def main() -> None:
    with Ranks(__file__, 1, "trainer") as ranks:
        if ranks.line(0) != "saved":
            verdict(False, "the trainer did not save")
        ranks.processes[0].send_signal(signal.SIGKILL)
        ranks.processes[0].wait()
        gone = within(DEADLINE_S, lambda: not ranks.left())
        left = [f"{pid} ({command_of(pid)})" for pid in ranks.left()]
    for line in left:
        print("still there:", line)
    verdict(
        not gone,
        f"{DEADLINE_S:g} s after the trainer was killed {len(left)} of its processes are there",
    )


if __name__ == "__main__":
    trainer() if sys.argv[1:] == ["trainer"] else main()
