"""NVRx waits for ever for a checkpoint worker that is dead.

    python dead_worker.py

What the kernel does when memory runs out is done here to NVRx's worker: it is killed. Nothing in
NVRx asks whether it lives: ``finalize`` waits, and so does the next save.
"""

from __future__ import annotations

import threading
import time

from ranks import one_rank, verdict

DEADLINE_S = 3.0


def main() -> None:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest

    one_rank()
    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(AsyncRequest(time.sleep, (3600,), [], {}))
    worker = queue.persistent_caller.process
    worker.kill()
    worker.join()
    waiting = threading.Thread(
        target=queue.maybe_finalize_async_calls,
        kwargs={"blocking": True, "no_dist": True},
        daemon=True,
    )
    waiting.start()
    waiting.join(DEADLINE_S)
    verdict(
        waiting.is_alive(),
        f"the worker was ended by signal {-worker.exitcode}, and {DEADLINE_S:g} s later the "
        "trainer still waits for it",
    )


if __name__ == "__main__":
    main()
