"""Reading flags one by one so that every problem is reported, not only the first. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keepstep.cli.flags import Given
from keepstep.errors import UsageError

NOTHING_STARTED = "Nothing was started"


@dataclass(slots=True)
class Reader:
    """Reads flags one by one and keeps every problem, so that all are reported together."""

    given: Mapping[str, Given]
    problems: list[UsageError] = field(default_factory=list)

    def value(self, name: str, default: str = "") -> str:
        return self.given[name].value if name in self.given else default

    def problem(self, name: str, what: str, advice: str = "") -> None:
        """``what`` completes a sentence that begins with the flag and its value."""
        found = self.given[name]
        self.problems.append(
            UsageError(f"{found.source} {found.value} {what}", done=NOTHING_STARTED, advice=advice)
        )

    def number(self, name: str, least: int, most: int, default: int) -> int:
        """A whole number within bounds; ``default`` if not given, or wrong (and noted)."""
        if name not in self.given:
            return default
        number = whole(self.given[name].value)
        if number is None:
            self.problem(name, "is not a whole number")
        elif not least <= number <= most:
            self.problem(name, f"is out of range: {least} to {most}")
        else:
            return number
        return default

    def only(self, name: str, accepted: Sequence[str], why: str, advice: str = "") -> None:
        """The flag is accepted with certain values only."""
        if name in self.given and self.given[name].value not in accepted:
            self.problem(name, why, advice)


def raise_all(problems: Sequence[UsageError]) -> None:
    """Raise the one problem there is, or one error that names all; nothing if there is none."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        said = [
            f"{one.what} ({one.advice[0].lower() + one.advice[1:]})" if one.advice else one.what
            for one in problems
        ]
        raise UsageError(
            f"{len(problems)} problems on the command line: {'; '.join(said)}",
            done=NOTHING_STARTED,
        )


def whole(text: str) -> int | None:
    """The whole number that ``text`` is; ``None`` if it is none, or has too many digits."""
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text, re.ASCII) else None
