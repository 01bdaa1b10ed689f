"""The tables of the benchmark of checkpoints, for the terminal and for its page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import page
from benchmarks.checkpoint_figures import (
    Figures,
    Ratio,
    copies,
    figures,
    jobs,
    mean,
    median,
    noise,
    ratios,
)
from benchmarks.checkpoint_names import BY_NAME
from benchmarks.harness import Spread

COLUMNS = (
    "system",
    "lost per save, s",
    "share",
    "call, s",
    "first call, s",
    "done in training, s",
    "durable, s",
    "load, s",
    "files, MB",
    "memory, MB",
    "values right",
)
RATIOS = ("keepstep's figure over another", "ratio", "wanted", "met", "of")
RAW = ("machine", "seconds", "samples")
Rows = list[list[str]]


def title(scenario: Mapping[str, Any]) -> str:
    """Of a scenario."""
    ranks, threads = scenario["ranks"], scenario["threads"]
    who = "1 rank" if ranks == 1 else f"{ranks} ranks"
    computes = "1 thread" if threads == 1 else f"{threads} threads"
    what = "a core is spare" if scenario["cpus"] == "spare" else "all cores compute"
    return f"{what[0].upper()}{what[1:]}: {who}, each computes with {computes}"


def rows(scenario: Mapping[str, Any], every: int) -> Rows:
    """A row for each system that ran; ``every``: steps between saves, for the share of time."""
    made = []
    for name, runs in scenario["runs"].items():
        found = figures(runs)
        if found.call_s:
            made.append([BY_NAME[name].title, *_row(found, every)])
    return made


def _row(found: Figures, every: int) -> list[str]:
    lost, step = mean(found.lost_s) or 0.0, median(found.step_s) or 0.0
    return [
        _mean(found.lost_s),
        f"{lost / (lost + every * step):.1%}",
        _median(found.call_s),
        _median(found.first_call_s),
        _median(found.done_in_training_s),
        _median(found.durable_s),
        _median(found.load_s),
        _median(found.file_bytes, 1e-6, 0),
        _median(found.memory_bytes, 1e-6, 0),
        "yes" if found.right else f"**no: {max(found.wrong)} tensors wrong**",
    ]


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{mean(values) or 0.0:.2f} ({min(values):.2f} to {max(values):.2f})"


def _median(values: Sequence[float], factor: float = 1.0, digits: int = 2) -> str:
    scaled = [value * factor for value in values]
    if len(set(scaled)) < 2:
        return f"{scaled[0]:.{digits}f}" if scaled else "-"
    return Spread.of(scaled).text(digits)


def failures(scenario: Mapping[str, Any]) -> list[str]:
    """What did not run, and why."""
    return [
        f"{BY_NAME[name].title}, {len(found.errors)} of {len(runs)}: {found.errors[0]}"
        for name, runs in scenario["runs"].items()
        if (found := figures(runs)).errors
    ]


def raw(scenario: Mapping[str, Any], window: int) -> Rows:
    """What the machine does by itself."""
    named = {
        "memory copy of the state, 1 thread a rank": copies(scenario, "one"),
        "memory copy, as many threads as training has": copies(scenario, "training"),
        "one step": [run["ranks"][0]["step_s"] for run in jobs(scenario)],
        f'"lost" by {window} steps without a save': noise(scenario, window),
    }
    pairs = scenario["pairs"]
    if pairs and not pairs["error"]:
        first = pairs["ranks"][0]
        size = f"{first['raw_bytes'] / 1e6:.0f} MB"
        named |= {
            f"direct write of {size}": first["pairs"]["write_s"],
            "keepstep's save, durable": first["pairs"]["durable_s"],
            f"direct read of {size}": first["pairs"]["read_s"],
            "keepstep's load": first["pairs"]["load_s"],
        }
    return [[name, _median(of, 1.0, 3), str(len(of))] for name, of in named.items()]


def ratio_row(ratio: Ratio) -> list[str]:
    met = {True: "yes", False: "**no**", None: "-"}[ratio.met]
    value = "-" if ratio.value is None else f"{ratio.value:.2f}"
    return [ratio.name, value, f"at most {ratio.target:.2f}", met, ratio.about]


def samples(scenario: Mapping[str, Any]) -> str:
    """How much was measured, in a sentence."""
    found = [figures(runs) for runs in scenario["runs"].values()]
    saves = sorted({len(one.lost_s) for one in found if one.lost_s})
    loads = sorted({len(one.load_s) for one in found if one.load_s})
    each = page.numbers(saves), page.numbers(loads)
    first = next(iter(jobs(scenario)), None)
    state = sum(rank["state_bytes"] for rank in first["ranks"]) / 1e6 if first else 0.0
    tensors = first["ranks"][0]["tensors"] if first else 0
    return (
        f"The state is {state:.0f} MB in {tensors} tensors a rank. Samples of each system: "
        f"{each[0]} saves, {each[1]} loads."
    )


def markdown(document: Mapping[str, Any]) -> str:
    """Everything that is generated for the page."""
    settings = document["settings"]
    machine = "; ".join(f"{name} {value}" for name, value in document["machine"].items())
    parts = [f"{machine}.", f"```\n{document['command']}\n```"]
    for scenario in document["scenarios"]:
        parts.append(f"### {title(scenario)}")
        parts.append(samples(scenario))
        parts.append(page.table(RATIOS, [ratio_row(one) for one in ratios(scenario)]))
        parts.append(page.table(COLUMNS, rows(scenario, settings["every"])))
        parts.append(page.table(RAW, raw(scenario, settings["window"])))
        pairs = scenario["pairs"]
        if pairs and not pairs["error"]:
            parts.append(f"Direct write and read: {pairs['ranks'][0]['raw_tool']}.")
        failed = failures(scenario)
        if failed:
            parts.append("Did not run:\n\n" + "\n".join(f"- {text}" for text in failed))
    if document["options"]:
        parts.append("### Other options of `dcp.async_save` on CPU")
        parts.append(page.table(("option", "what came of it"), option_rows(document["options"])))
    return "\n\n".join(parts)


def option_rows(options: Mapping[str, Mapping[str, Any]]) -> Rows:
    """What came of each option that was only tried."""
    made = []
    for name, run in options.items():
        wrong = sum(rank["wrong_tensors"] for rank in run["ranks"])
        works = "works" if not wrong else f"{wrong} tensors wrong"
        made.append([name, run["error"] or works])
    return made
