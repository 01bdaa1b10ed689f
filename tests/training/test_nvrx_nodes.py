"""The main job on two nodes under NVRx's launcher: two ``keepstep run`` with one run folder.

NVRx numbers the nodes as they come, so either may have rank 0; what is asserted holds for both.
"""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from keepstep.agent.environment import free_port
from keepstep.goodput.report import build, to_json
from tests.process.job import Job
from tests.training.train import EVERY, LIMIT_S, SCRIPT, train

STEPS = 20
_HERE = "127.0.0.1"


def _two_free_ports() -> int:
    """A free port after which another one is free: the store outside the ranks takes that."""
    while True:
        port = free_port(_HERE)
        with socket.socket() as sock:
            try:
                sock.bind((_HERE, port + 1))
            except OSError:
                continue
            return port


@contextmanager
def nodes(folder: Path, *, steps: int, faults: Sequence[str] = ()) -> Iterator[list[Job]]:
    """Two nodes with a rank each, and whatever the block does to them."""
    port = _two_free_ports()
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Job(
                    folder / f"node-{node}",
                    flags=[
                        *("--engine", "nvrx", "--nnodes", "2", "--node-rank", str(node)),
                        *("--rdzv-endpoint", f"{_HERE}:{port}", "--rdzv-id", "two"),
                        *("--set", "nvrx.soft_limit_s=15", "--set", "heartbeat.min_limit_s=2"),
                        *("--set", "checkpoint.when_busy=wait"),
                        *(part for fault in faults for part in ("--fault", fault)),
                    ],
                    arguments=[
                        *(str(SCRIPT), "--steps", str(steps), "--every-steps", str(EVERY)),
                        *("--eval-every", "10"),
                    ],
                    nproc=1,
                    # As torchrun: only several ranks on a node get one thread each, and the number
                    # of threads changes the last bits of sums.
                    environ={"OMP_NUM_THREADS": "1"},
                    preload=True,
                    run_dir=folder / "run",
                )
            )
            for node in (0, 1)
        ]


def ends(jobs: list[Job]) -> list[int]:
    """The exit codes; nothing is left once both have ended."""
    for job in jobs:
        job.process.wait(LIMIT_S)
    return [job.wait() for job in jobs]


@pytest.mark.needs("nvrx")
def test_an_exception_and_a_kill_on_either_node_cost_no_weights(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "native", 2, steps=STEPS)
    with nodes(tmp_path, steps=STEPS, faults=["exception@8:1", "kill@13:0"]) as jobs:
        assert ends(jobs) == [0, 0]
        digests = re.findall(r"weights digest: ([0-9a-f]{64})", jobs[0].out + jobs[1].out)
        assert digests == [undisturbed.digest]
        readies = jobs[0].events("round.ready")
        assert {one.node for one in readies} == {0}  # one node says what happened, of all ranks
        assert [sorted(one.data["pids"]) for one in readies] == [["0", "1"]] * 3  # type: ignore[call-overload]
        report = to_json(build(jobs[0].run_dir))
        told = jobs[1].err
    faults = report["faults"]
    assert isinstance(faults, list)
    seen = [(f["kind"], f["rank"], f["cause"], f["level"], f["survivors_kept"]) for f in faults]
    assert seen == [
        ("exception", 1, "exception", "rerun", True),
        ("kill", 0, "killed", "respawn", False),
    ]
    assert "rank 0 (node" in told and "was killed by signal 9 at step 13" in told


@pytest.mark.needs("nvrx")
def test_sigterm_on_one_node_stops_both_after_one_committed_step(tmp_path: Path) -> None:
    with nodes(tmp_path, steps=100_000) as jobs:
        jobs[1].until(lambda: jobs[1].events("checkpoint.commit"), "a step is committed")
        jobs[1].signal(signal.SIGTERM)
        assert ends(jobs) == [75, 75]
        steps = jobs[0].steps(1)
        assert set(steps) == {0, 1} and len(set(steps.values())) == 1
        last = steps[0]
        commits = [one.step for one in jobs[0].events("checkpoint.commit")]
        assert commits[-1] == last
        for job in jobs:
            assert (
                job.ending
                == f"keepstep: stopped on SIGTERM; step {last} is committed (exit code 75)"
            )
        assert {one.node for one in jobs[0].events("stop.notice")} == {0, 1}
        assert jobs[0].causes() == []
