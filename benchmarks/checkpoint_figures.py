"""What the benchmark of checkpoints says: from what ranks measured to figures and ratios. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.checkpoint_names import BY_NAME

OURS = "keepstep"
Cpus = Literal["saturated", "spare"]


@dataclass(frozen=True)
class Figures:
    """All samples of one system in one scenario; seconds and bytes.

    Attributes:
        call_s: How long the call blocked, of the slowest rank.
        lost_s: All that training lost by a save.
        done_in_training_s: From the call to the end of the step in which it was found done.
        durable_s: From the call to durable, while training waits.
        load_s: Loading, nothing cached.
        step_s: The usual step of each job.
        first_call_s: How long the first call blocked.
        memory_bytes: Most memory in the first saves above the most in steps before them.
        file_bytes: Of one checkpoint.
        wrong: Tensors of all ranks that were not saved as they were at the call, one count a job.
        errors: Of jobs that failed.
    """

    call_s: list[float] = field(default_factory=list)
    lost_s: list[float] = field(default_factory=list)
    done_in_training_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    first_call_s: list[float] = field(default_factory=list)
    memory_bytes: list[float] = field(default_factory=list)
    file_bytes: list[float] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether it ran, and all its checkpoints had the values at the call."""
        return bool(self.wrong) and not any(self.wrong)


def figures(runs: Sequence[Mapping[str, Any]]) -> Figures:
    """Of all jobs of one system."""
    made = Figures()
    for run in runs:
        if run["error"]:
            made.errors.append(run["error"])
            continue
        ranks, first = run["ranks"], run["ranks"][0]
        made.call_s.extend(map(max, zip(*(rank["call_s"] for rank in ranks), strict=True)))
        for name in ("lost_s", "done_in_training_s", "durable_s"):
            getattr(made, name).extend(first[name])
        for name in ("load_s", "step_s", "file_bytes"):
            getattr(made, name).append(first[name])
        made.first_call_s.append(max(rank["first_call_s"] for rank in ranks))
        made.wrong.append(sum(rank["wrong_tensors"] for rank in ranks))
        if run["memory_bytes"] is not None:
            made.memory_bytes.append(run["memory_bytes"])
    return made


def jobs(scenario: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All jobs of a scenario that did not fail."""
    return [run for runs in scenario["runs"].values() for run in runs if not run["error"]]


def copies(scenario: Mapping[str, Any], threads: str) -> list[float]:
    """Seconds to copy the state in memory, of the slowest rank; ``threads`` names how many."""
    return [
        max(samples)
        for run in jobs(scenario)
        for samples in zip(*(rank["copy_s"][threads] for rank in run["ranks"]), strict=True)
    ]


def noise(scenario: Mapping[str, Any], window: int) -> list[float]:
    """What ``window`` steps seem to lose where nothing is saved: the error of ``lost_s``."""
    found = []
    for run in jobs(scenario):
        first = run["ranks"][0]
        for row in first["quiet_s"]:
            if len(row) >= window:
                found.append(sum(row[:window]) - window * first["step_s"])
    return found


@dataclass(frozen=True)
class Ratio:
    """A figure of keepstep's over another; ``target`` is the most that is wanted of it.

    ``value`` is None where there is nothing to divide by; ``about`` has both figures.
    """

    name: str
    value: float | None
    target: float
    about: str

    @property
    def met(self) -> bool | None:
        return None if self.value is None else self.value <= self.target


def ratios(scenario: Mapping[str, Any]) -> list[Ratio]:
    """Those that decide whether keepstep does what it promises."""
    found = {name: figures(runs) for name, runs in scenario["runs"].items()}
    ours = found.get(OURS, Figures())
    peers = {
        name: one for name, one in found.items() if not BY_NAME[name].is_keepstep and one.right
    }
    dcp = {name: one for name, one in peers.items() if BY_NAME[name].is_dcp}
    spare = scenario["cpus"] == "spare"
    made = [
        _ratio(
            "time lost / blocking memory copy",
            mean(ours.lost_s),
            median(copies(scenario, "training")),
            0.4 if spare else 2.0,
        ),
        _best("time lost / best peer's", mean(ours.lost_s), peers, "lost_s", 0.2),
        _paired(scenario, "durable / raw direct write", "durable_s", "write_s", 1.15),
        _best("durable / best DCP's", median(ours.durable_s), dcp, "durable_s", 0.5),
        _paired(scenario, "load / raw direct read", "load_s", "read_s", 1.25),
        _best("load / best peer's", median(ours.load_s), peers, "load_s", 0.5),
    ]
    return made


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _ratio(name: str, ours: float | None, other: float | None, target: float) -> Ratio:
    value = ours / other if ours is not None and other is not None and other > 0 else None
    about = " / ".join("-" if one is None else f"{one:.3f} s" for one in (ours, other))
    return Ratio(name, value, target, about)


def _best(
    name: str, ours: float | None, peers: Mapping[str, Figures], of: str, target: float
) -> Ratio:
    typical = mean if of == "lost_s" else median
    known = {peer: typical(getattr(one, of)) for peer, one in peers.items()}
    values = {peer: value for peer, value in known.items() if value is not None}
    if not values:
        return _ratio(name, ours, None, target)
    best = min(values, key=lambda peer: values[peer])
    made = _ratio(name, ours, values[best], target)
    return Ratio(name, made.value, target, f"{made.about} ({BY_NAME[best].title})")


def _paired(scenario: Mapping[str, Any], name: str, ours: str, other: str, target: float) -> Ratio:
    run = scenario["pairs"]
    if run is None or run["error"]:
        return Ratio(name, None, target, run["error"] if run else "not measured")
    pairs = run["ranks"][0]["pairs"]
    each = [a / b for a, b in zip(pairs[ours], pairs[other], strict=True) if b > 0]
    about = f"median of {len(each)} pairs; {median(pairs[ours]) or 0:.3f} s"
    about += f" / {median(pairs[other]) or 0:.3f} s"
    about += f"; pairs {min(each):.2f}-{max(each):.2f}" if each else ""
    return Ratio(name, median(each), target, about)
