"""The tables of the comparison, as Markdown, and their place in a page between two markers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Spread
from benchmarks.outcomes import Outcome

BEGIN = "<!-- tables: begin -->"
END = "<!-- tables: end -->"
COLUMNS = (
    "system",
    "recovered",
    "next step of all ranks, s",
    "found, s",
    "steps lost",
    "full world back",
    "other ranks' processes kept",
    "weights equal",
)


@dataclass(frozen=True)
class Cell:
    """All runs of one system with one fault. ``expected`` is the digest without a
    fault, None if no undisturbed run came to its end."""

    title: str
    world: int
    limit_s: float
    expected: str | None
    outcomes: Sequence[Outcome]

    def row(self) -> list[str]:
        """One row of a fault's table."""
        good = [one for one in self.outcomes if one.recovered_s is not None]
        count = f"{len(good)} of {len(self.outcomes)}"
        others = {self.why(one): None for one in self.outcomes if one.recovered_s is None}
        found = [one.found_s for one in self.outcomes if one.found_s is not None]
        return [
            self.title,
            "; ".join([count, *others]),
            spread([one.recovered_s for one in good if one.recovered_s is not None]),
            spread(found),
            numbers([one.steps_lost for one in good if one.steps_lost is not None]),
            self.world_back(good),
            said([bool(one.kept) for one in good]),
            self.equal(),
        ]

    def why(self, one: Outcome) -> str:
        """Why a run is not counted as recovered."""
        if not one.fired:
            return "did not come so far as the fault"
        if one.late:
            return f"not in {self.limit_s:g} s"
        return f"job lost after {one.waited_s:.0f} s"

    def world_back(self, good: Sequence[Outcome]) -> str:
        """Whether training went on with all ranks, and with how many if not."""
        text = said([one.world == self.world for one in good])
        smaller = [one.world for one in good if one.world is not None and one.world != self.world]
        return f"{text} (world {numbers(smaller)})" if smaller else text

    def equal(self) -> str:
        """Whether the weights at the end are those of the undisturbed run."""
        if self.expected is None:
            return "-"
        ended = [one.digest == self.expected for one in self.outcomes if one.digest]
        short = len([one for one in self.outcomes if one.recovered_s is not None]) - len(ended)
        texts = [said(ended)] if ended else []
        texts += [f"{short} did not end"] if short > 0 else []
        return ", ".join(texts) or "-"


def spread(values: Sequence[float]) -> str:
    """Median (lowest-highest), or the only value."""
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "-"
    return Spread.of(values).text()


def numbers(values: Sequence[int]) -> str:
    """One number, or from which to which."""
    low, high = min(values, default=0), max(values, default=0)
    return "-" if not values else str(low) if low == high else f"{low} to {high}"


def said(answers: Sequence[bool]) -> str:
    """yes, no, or in how many."""
    if not answers:
        return "-"
    if all(answers) or not any(answers):
        return "yes" if answers[0] else "no"
    return f"{sum(answers)} of {len(answers)}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(
    about: Mapping[str, object],
    command: str,
    settings: Sequence[Sequence[str]],
    faults: Mapping[str, Sequence[Cell]],
) -> str:
    """Everything that is generated: the machine, what was set, and a table for each fault."""
    machine = "; ".join(f"{name} {value}" for name, value in about.items())
    parts = [f"{machine}.", f"```\n{command}\n```"]
    parts.append(table(("system", "what was set", "undisturbed step, s"), settings))
    for title, cells in faults.items():
        parts.append(f"### {title}\n\n" + table(COLUMNS, [cell.row() for cell in cells]))
    return "\n\n".join(parts)


def replaced(page: str, generated: str) -> str:
    """The page with other tables; the text around them stays.

    Raises:
        ValueError: the page does not have each marker once, in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must have {BEGIN} and {END} once each, in this order")
    return f"{before}{BEGIN}\n\n{generated}\n\n{END}{after}"


def rewrite(path: Path, make: Callable[[str], str]) -> None:
    """Replace a text file by what ``make`` turns it into, whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_text(make(path.read_text(encoding="utf-8")), encoding="utf-8")
    new.replace(path)
