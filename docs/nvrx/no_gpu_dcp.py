"""Without a GPU a save with FileSystemWriterAsync never returns.

    python no_gpu_dcp.py

0.4.1 and 0.5 call ``torch.cuda.synchronize()`` in the worker, 0.6 and newer divide by the number of
GPUs there. Either way the worker dies, and the trainer waits for it in ``schedule_async_request``.
"""

from __future__ import annotations

import tempfile
import threading

from ranks import one_rank, verdict, within

DEADLINE_S = 3.0


def main() -> None:
    import torch
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
    from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import (
        FileSystemWriterAsync,
    )
    from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
        save_state_dict_async_plan,
    )

    if torch.cuda.is_available():
        verdict(False, "this machine has a GPU")
    one_rank()
    queue = AsyncCallsQueue(persistent=True)
    with tempfile.TemporaryDirectory() as folder:
        writer = FileSystemWriterAsync(folder)
        save_state_dict_async_plan({"weights": torch.ones(10)}, writer)
        function, stage, arguments = writer.get_save_function_and_args()
        request = AsyncRequest(function, arguments, [], {}, stage)
        save = threading.Thread(target=queue.schedule_async_request, args=(request,), daemon=True)
        save.start()
        within(30, lambda: queue.persistent_caller and queue.persistent_caller.process)
        worker = queue.persistent_caller.process
        worker.join(60)
        save.join(DEADLINE_S)
    verdict(
        save.is_alive() and not worker.is_alive(),
        f"the worker exited with status {worker.exitcode}, and {DEADLINE_S:g} s later "
        "schedule_async_request has not returned",
    )


if __name__ == "__main__":
    main()
