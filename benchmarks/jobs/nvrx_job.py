"""The training as NVRx's documentation shows it for its launcher and in-process restart together.

After NVRx's own example of both: a store of the application one port above the launcher's, the
Wrapper's two above, the model made anew in the wrapped function, a heartbeat after each step. All
that the Wrapper takes has its default, the health check is the example's.
"""

# The Wrapper compares annotations as objects, so they must not be postponed here.
import argparse
import datetime
import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.jobs.training import Attempt, parse_arguments, train

# Without type annotations that a checker could follow.
inprocess: Any = importlib.import_module("nvidia_resiliency_ext.inprocess")
fault_tolerance: Any = importlib.import_module("nvidia_resiliency_ext.fault_tolerance")


def wrapped(
    args: argparse.Namespace,
    client: Any,
    store: Any,
    call_wrapper: Any = None,
) -> None:
    """What is called again after a fault."""
    if client.is_initialized:
        client.shutdown_workload_monitoring()
    client.init_workload_monitoring()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(str(call_wrapper.iteration), store),  # type: ignore[attr-defined]
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=args.group_timeout_s),
    )
    name = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{call_wrapper.iteration}"
    train(args, Attempt(name, call_wrapper.atomic, client.send_heartbeat))


# By this annotation the Wrapper knows which argument it fills in.
wrapped.__annotations__["call_wrapper"] = inprocess.CallWrapper


def main() -> None:
    logging.basicConfig(format="%(asctime)s | %(levelname)s | %(name)s | %(message)s", level="INFO")
    args, port = parse_arguments(), int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        port + 1,
        int(os.environ["WORLD_SIZE"]),
        is_master=int(os.environ["RANK"]) == 0,
        multi_tenant=True,
        wait_for_workers=True,
        use_libuv=True,
    )
    client = fault_tolerance.RankMonitorClient()
    restartable = inprocess.Wrapper(
        store_kwargs={"port": port + 2},
        health_check=inprocess.health_check.CudaHealthCheck(),
    )(wrapped)
    try:
        restartable(args, client, store)
    finally:
        if client.is_initialized:
            client.shutdown_workload_monitoring()


if __name__ == "__main__":
    main()
