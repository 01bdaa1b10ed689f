"""The main job on NVRx's three mechanisms: every kind of fault, rank 0 included.

After each the weights must equal those of the undisturbed run. Named differences to the native
engine (docs/nvrx.md): after a hard fault every rank gets a new process, and NVRx's saves may commit
later, so that more steps are lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.goodput.report import build, to_json
from tests.training.train import EVERY, Outcome, train, undisturbed_run


def engine(world: int) -> tuple[str, ...]:
    """Flags; NVRx's writers start one interpreter a rank, which takes a small machine's time: a
    step beside that, on a machine with other work, was seen to take three seconds."""
    limits = (f"nvrx.soft_limit_s={max(4.0, 1.5 * world)}", "heartbeat.min_limit_s=2")
    return ("--engine", "nvrx", *(part for limit in limits for part in ("--set", limit)))


SOFT = ("exception", "desync", "hang")
"""What NVRx's in-process restart ends without a new process."""
CAUSE = {
    "exception": {"exception"},
    "desync": {"hang", "timeout", "unknown"},
    "hang": {"hang"},
    "kill": {"killed"},
    "exit": {"exit"},
    "oom": {"oom"},
    "spin": {"hang"},
    "stop": {"hang"},
}
GROUPS = {
    "soft": ("exception", "desync", "hang"),
    "ends": ("kill", "exit", "oom"),
    "frozen": ("spin", "stop"),
}


@pytest.fixture
def undisturbed(world: int) -> Outcome:
    """The native run without faults at the test's world size; made once."""
    return undisturbed_run(world)


def check(kind: str, rank: int, step: int, fault: dict[str, object]) -> None:
    """Whether the report's ``fault`` is the injected one, answered as NVRx can."""
    assert (fault["kind"], fault["rank"]) == (kind, rank)
    assert fault["cause"] in CAUSE[kind]
    assert fault["level"] == ("rerun" if kind in SOFT else "respawn")
    assert fault["survivors_kept"] is (kind in SOFT)
    lost = fault["steps_lost"]
    assert isinstance(lost, int) and lost % EVERY == ((step - 1) % EVERY + 1) % EVERY
    assert isinstance(fault["detect_s"], float) and isinstance(fault["recover_s"], float)


@pytest.mark.parametrize(
    ("group", "world"),
    [
        *((group, 2) for group in GROUPS),
        pytest.param("soft", 4, marks=pytest.mark.full),
        pytest.param("ends", 4, marks=pytest.mark.full),
        pytest.param("frozen", 4, marks=pytest.mark.full),
    ],
)
@pytest.mark.needs("nvrx", "root", "cgroup_memory")
def test_weights_equal_the_native_runs_after_every_fault(
    group: str, world: int, tmp_path: Path, undisturbed: Outcome
) -> None:
    wanted = [(kind, rank) for kind in GROUPS[group] for rank in (0, world - 1)]
    if world == 4:  # the others under --full
        wanted = [(kind, 3 * (place % 2)) for place, kind in enumerate(GROUPS[group])]
    planned = [(kind, rank, 4 * place + 3) for place, (kind, rank) in enumerate(wanted)]
    faults = [f"{kind}@{step}:{rank}" for kind, rank, step in planned]
    found = train(tmp_path, world, faults, flags=engine(world))
    assert len(found.faults) == len(planned), found.faults
    for (kind, rank, step), fault in zip(planned, found.faults, strict=True):
        check(kind, rank, step, fault)
    assert found.digest == undisturbed.digest


@pytest.mark.full
@pytest.mark.parametrize(("world", "rank"), [(w, r) for w in (2, 4) for r in range(w)])
@pytest.mark.parametrize("kind", CAUSE)
@pytest.mark.needs("nvrx", "root", "cgroup_memory")
def test_every_fault_alone_on_every_rank(
    kind: str, world: int, rank: int, tmp_path: Path, undisturbed: Outcome
) -> None:
    found = train(tmp_path, world, [f"{kind}@13:{rank}"], flags=engine(world))
    [fault] = found.faults
    check(kind, rank, 13, fault)
    assert found.digest == undisturbed.digest


PARTS = {
    "checkpoint": ("--set", "engine.checkpoint=nvrx"),
    "dcp": ("--set", "engine.checkpoint=nvrx", "--set", "nvrx.checkpoint=dcp"),
    "launcher": ("--set", "engine.launcher=nvrx", "--set", "heartbeat.min_limit_s=2"),
    "restart": ("--set", "engine.restart=nvrx", "--set", "nvrx.soft_limit_s=3"),
}
LEVELS = {
    "checkpoint": [("exception", "rerun"), ("kill", "rank")],
    "dcp": [("exception", "rerun"), ("kill", "rank")],
    "launcher": [("exception", "respawn"), ("kill", "respawn")],
    # keepstep's launcher is not told of what NVRx does inside the processes.
    "restart": [("exception", None), ("kill", "respawn")],
}


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.needs("nvrx")
def test_each_part_can_be_nvrxs_alone(
    part: str, world: int, tmp_path: Path, undisturbed: Outcome
) -> None:
    found = train(tmp_path, world, ["exception@8:0", "kill@14:0"], flags=PARTS[part])
    assert found.digest == undisturbed.digest
    assert [f[:2] for f in found.seen("kind", "level")] == LEVELS[part]


@pytest.mark.needs("nvrx")
@pytest.mark.parametrize("world", [2])
def test_the_report_of_an_nvrx_run_is_like_any_other(
    world: int, tmp_path: Path, undisturbed: Outcome
) -> None:
    found = train(tmp_path, world, ["exception@8:1"], flags=engine(world))
    native = to_json(build(next(_runs(tmp_path))))
    assert found.digest == undisturbed.digest
    assert native["engine"] == "nvrx"
    assert found.committed[-1] == 30
    heartbeats = native["heartbeats"]
    assert isinstance(heartbeats, list) and {one["rank"] for one in heartbeats} == {0, 1}


def _runs(folder: Path) -> Iterator[Path]:
    yield from (path.parent for path in folder.rglob("events"))
