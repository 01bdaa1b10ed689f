"""0.4.1: a section that the launcher was not told of switches hang detection off.

    python unknown_section.py

The rank monitor looks up the time-out of each open section. For a name that it does not know that
look-up raises, and the task that looks for hangs is over: nobody watches the rank any more.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import time

from ranks import Ranks, verdict

LIMIT_S = 1.0
DEADLINE_S = 4.0


def rank() -> None:
    from nvidia_resiliency_ext.fault_tolerance import config, rank_monitor_client
    from nvidia_resiliency_ext.fault_tolerance import rank_monitor_server as server

    path = os.path.join(sys.argv[3], "monitor.socket")
    limits = config.FaultToleranceConfig(
        workload_check_interval=0.2,
        initial_rank_heartbeat_timeout=LIMIT_S,
        rank_heartbeat_timeout=LIMIT_S,
    )
    os.environ["FT_RANK_MONITOR_IPC_SOCKET"] = path
    monitor = server.RankMonitorServer.run_in_subprocess(
        limits, path, mp_ctx=multiprocessing.get_context("fork")
    )
    client = rank_monitor_client.RankMonitorClient()
    client.init_workload_monitoring()
    client.send_heartbeat()
    if sys.argv[2] == "unknown":
        with contextlib.suppress(rank_monitor_client.RankMonitorClientError):
            client.start_section("eval")
    print("hangs", flush=True)
    time.sleep(DEADLINE_S)
    monitor.kill()


def outcome(section: str) -> str:
    """What became of a rank that hangs."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Ranks(__file__, 1, "rank", section, folder) as ranks,
    ):
        ranks.line(0)
        code = ranks.processes[0].wait()
    return f"was ended by signal {-code}" if code < 0 else "was not ended"


def main() -> None:
    without, with_one = outcome("none"), outcome("unknown")
    verdict(
        without != with_one == "was not ended",
        f"silent for {DEADLINE_S:g} s with a limit of {LIMIT_S:g} s, a rank {without}; with a "
        f"section that the monitor does not know, it {with_one}",
    )


if __name__ == "__main__":
    rank() if sys.argv[1:2] == ["rank"] else main()
