"""Restart, heartbeats and checkpoints by hand.

ft_launcher --nproc-per-node=2 --max-restarts=10 --ft-rank-heartbeat-timeout=180 before.py
"""

import datetime
import os
import pathlib

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
from torch.distributed.fsdp import fully_shard

STEPS, EVERY = 40, 10
FOLDER = pathlib.Path("checkpoints")
client = RankMonitorClient()


def newest() -> int:
    """The last step that every rank has a file of; nothing says that the files are whole."""
    names = [path.stem.split("-") for path in FOLDER.glob("*.pt")]
    ranks: dict[int, int] = {}
    for step, _ in names:
        ranks[int(step)] = ranks.get(int(step), 0) + 1
    whole = [step for step, count in ranks.items() if count == int(os.environ["WORLD_SIZE"])]
    return max(whole, default=0)


@inprocess.Wrapper(
    store_kwargs={"port": int(os.environ.get("MASTER_PORT", 29500)) + 1},
    health_check=inprocess.health_check.CudaHealthCheck(),
    initialize=inprocess.initialize.RetryController(max_iterations=10, min_world_size=2),
    soft_timeout=datetime.timedelta(seconds=60),
    hard_timeout=datetime.timedelta(seconds=90),
)
def main(call: inprocess.CallWrapper = None):
    dist.init_process_group(timeout=datetime.timedelta(seconds=120))
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint = TorchAsyncCheckpoint()
    done = newest()
    if done:
        state = torch.load(FOLDER / f"{done}-{rank}.pt", weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(done + 1, STEPS + 1):
        call.ping()
        client.send_heartbeat()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            checkpoint.finalize_async_save(blocking=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with call.atomic():
                checkpoint.async_save(state, FOLDER / f"{step}-{rank}.pt")
    checkpoint.finalize_async_save(blocking=True, terminate=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    client.init_workload_monitoring()
    main()
    client.shutdown_workload_monitoring()
