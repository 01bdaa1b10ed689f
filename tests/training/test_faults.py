"""Every kind of fault, on rank 0 and on another rank, at 2 and at 4 ranks.

After each the weights must equal those of the undisturbed run, and so must what the report says:
exactly the injected faults, with level, steps lost and who was kept. (A restart from step 0 would
give equal weights too.)
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.process.job import Job
from tests.training.train import EVERY, STEPS, Outcome, train, undisturbed_run

HANGS = ("--set", "heartbeat.min_limit_s=2")
TIME_OUT = ("--set", "restart.pg_timeout_s=2")
LEVEL = {"exception": "rerun", "desync": "rerun"}
CAUSE = {
    "exception": {"exception"},
    "desync": {"timeout", "unknown"},
    "kill": {"killed"},
    "exit": {"exit"},
    "oom": {"oom"},
    "hang": {"hang"},
    "spin": {"hang"},
    "stop": {"hang"},
}
GROUPS = {
    "soft": (("exception", "kill"), ()),
    "ends": (("exit", "oom"), ()),
    "hangs": (("hang", "spin", "stop"), HANGS),
    "desync": (("desync",), TIME_OUT),
}


@pytest.fixture
def undisturbed(world: int) -> Outcome:
    """The run without faults at the test's world size; made once."""
    return undisturbed_run(world)


def _check(kind: str, rank: int, step: int, fault: dict[str, object]) -> None:
    assert (fault["kind"], fault["rank"], fault["step"]) == (kind, rank, step)
    assert fault["cause"] in CAUSE[kind]
    assert fault["level"] == LEVEL.get(kind, "rank")
    # The newest checkpoint before the fault is taken: the steps after it are lost.
    assert fault["steps_lost"] == (step - 1) % EVERY + 1
    assert fault["survivors_kept"] is True
    assert isinstance(fault["detect_s"], float) and isinstance(fault["recover_s"], float)


@pytest.mark.parametrize(
    ("group", "world"),
    [
        *((group, 2) for group in GROUPS),
        ("soft", 4),
        ("ends", 4),
        pytest.param("hangs", 4, marks=pytest.mark.full),
        pytest.param("desync", 4, marks=pytest.mark.full),
    ],
)
@pytest.mark.needs("root", "cgroup_memory")
def test_weights_equal_the_undisturbed_runs_after_every_fault_on_every_rank(
    group: str, world: int, tmp_path: Path, undisturbed: Outcome
) -> None:
    kinds, flags = GROUPS[group]
    wanted = [(kind, rank) for kind in kinds for rank in (0, world - 1)]
    planned = [(kind, rank, 4 * place + 3) for place, (kind, rank) in enumerate(wanted)]
    faults = [f"{kind}@{step}:{rank}" for kind, rank, step in planned]
    found = train(tmp_path, world, faults, flags=flags)
    assert len(found.faults) == len(planned)
    for (kind, rank, step), fault in zip(planned, found.faults, strict=True):
        _check(kind, rank, step, fault)
    assert found.digest == undisturbed.digest


@pytest.mark.full
@pytest.mark.parametrize(("world", "rank"), [(w, r) for w in (2, 4) for r in range(w)])
@pytest.mark.parametrize("kind", CAUSE)
@pytest.mark.needs("root", "cgroup_memory")
def test_every_fault_alone_on_every_rank(
    kind: str, world: int, rank: int, tmp_path: Path, undisturbed: Outcome
) -> None:
    flags = TIME_OUT if kind == "desync" else HANGS
    found = train(tmp_path, world, [f"{kind}@13:{rank}"], flags=flags)
    [fault] = found.faults
    _check(kind, rank, 13, fault)
    assert found.digest == undisturbed.digest


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    first = train(tmp_path / "a", 2, seed=1, steps=6)
    second = train(tmp_path / "b", 2, seed=2, steps=6)
    assert first.digest != second.digest


@pytest.mark.parametrize("world", [2])
def test_two_faults_in_a_row_without_a_checkpoint_between_them(
    world: int, tmp_path: Path, undisturbed: Outcome
) -> None:
    faults = ["exception@12:0", "kill@13:1", "exception@14:0"]
    found = train(tmp_path, world, faults)
    assert found.seen("kind", "rank", "step", "level", "steps_lost") == [
        ("exception", 0, 12, "rerun", 2),
        ("kill", 1, 13, "rank", 3),
        ("exception", 0, 14, "rerun", 4),
    ]
    assert found.digest == undisturbed.digest


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("second", ["survivor", "successor"])
def test_a_second_rank_is_killed_while_the_first_one_is_replaced(
    second: str, world: int, tmp_path: Path, undisturbed: Outcome
) -> None:
    def strike(job: Job) -> None:
        job.until(lambda: job.data("restart.begin"), "the first fault is seen")
        if second == "survivor":
            victim = job.rank_pids()[2]
        else:
            victim = job.until(
                lambda: next(
                    (
                        int(str(event.data["pid"]))
                        for event in job.events("rank.start")
                        if event.data["incarnation"] == 1
                    ),
                    0,
                ),
                "the successor starts",
            )
        os.kill(victim, signal.SIGKILL)

    found = train(tmp_path, world, ["kill@12:1"], during=strike)
    assert found.digest == undisturbed.digest
    levels = {fault["level"] for fault in found.faults}
    assert levels == {"rank"} and 1 <= len(found.faults) <= 2
    assert found.faults[0]["kind"] == "kill" and found.faults[0]["rank"] == 1
    exits = [
        e.rank
        for e in found.events  # a rank that gloo held was ended by keepstep, not by this test
        if e.kind == "rank.exit" and e.data["code"] == -9 and not e.data.get("by_us")
    ]
    assert sorted(rank for rank in exits if rank is not None) == (
        [1, 2] if second == "survivor" else [1, 1]
    )


@pytest.mark.parametrize("world", [2])
def test_every_checkpoint_due_is_committed_and_the_newest_are_kept(
    world: int, undisturbed: Outcome
) -> None:
    assert undisturbed.committed == list(range(EVERY, STEPS + 1, EVERY))
    assert undisturbed.faults == []
