"""NVRx writes the values that CPU tensors have later, not those of the call.

    python aliasing.py

``TorchAsyncCheckpoint.async_save`` hands the tensors to a worker process as they are: a CPU tensor
is moved to shared memory, and the worker reads it while training goes on.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

from ranks import one_rank, verdict, within


def main() -> None:
    import torch
    from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None  # NVRx calls it all the same
    one_rank()
    weights = torch.full((1000,), 1.0)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "weights.pt")
        checkpoint = TorchAsyncCheckpoint()
        with contextlib.suppress(AttributeError):  # 0.6 and newer set up a GPU otherwise
            checkpoint._async_calls_queue._get_async_caller().cpu_shm_mode = True
        checkpoint.async_save({"weights": weights}, path)  # 1.0 is to be saved
        within(20, weights.is_shared)  # NVRx has moved the live tensor
        weights.fill_(2.0)  # the next training step
        queue = checkpoint._async_calls_queue

        def done() -> bool:
            checkpoint.finalize_async_save(blocking=False, no_dist=True)
            return queue.get_num_unfinalized_calls() == 0

        if not within(60, done):
            verdict(False, "nothing was written")
        saved = torch.load(path)["weights"]
        queue.persistent_caller.process.kill()
    wrong = int((saved != 1.0).sum())
    verdict(wrong > 0, f"{wrong} of {saved.numel()} values in the file are not those of the call")


if __name__ == "__main__":
    main()
