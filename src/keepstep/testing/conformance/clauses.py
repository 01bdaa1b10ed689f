"""Named clauses, documented differences, and the verdict over both. Runs in tests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Clause(Generic[S]):
    """One thing that an engine must do.

    ``text`` is that as a sentence; ``check`` gets the subject and raises if it is not so, an
    ``AssertionError`` with a sentence where the clause itself finds out.
    """

    name: str
    text: str
    check: Callable[[S], None]


@dataclass(frozen=True, slots=True)
class Result:
    """How an engine did at one clause.

    ``held`` says whether it keeps the clause, ``detail`` why not; ``difference`` is the documented
    reason for which it need not, empty if it must.
    """

    name: str
    text: str
    held: bool
    detail: str = ""
    difference: str = ""

    @property
    def ok(self) -> bool:
        """Whether that is as it should be."""
        return self.held != bool(self.difference)

    def __str__(self) -> str:
        if self.held and self.difference:
            return (
                f"{self.name}: holds, but is documented as a difference ({self.difference}): the "
                "document is out of date"
            )
        if self.held:
            return f"{self.name}: holds"
        if self.difference:
            return f"{self.name}: does not hold, as documented: {self.difference}"
        return f"{self.name}: broken: {self.text}. {self.detail}"


def run(
    clauses: Sequence[Clause[S]],
    subject: Callable[[], S],
    differences: Mapping[str, str],
    *,
    only: Collection[str] | None = None,
) -> list[Result]:
    """Check every clause.

    Args:
        clauses: What to check, in this order.
        subject: Gives what a clause's check gets; called once a clause.
        differences: Why the engine does not keep a clause, by the clause's name.
        only: Names of the clauses to check; None: all of them.

    Raises:
        ValueError: ``differences`` or ``only`` name a clause that there is not.
    """
    known = [clause.name for clause in clauses]
    wanted = known if only is None else only
    unknown = sorted({*differences, *wanted} - set(known))
    if unknown:
        raise ValueError(f"no such clause: {', '.join(unknown)}; known: {', '.join(known)}")
    return [
        _check(clause, subject, differences.get(clause.name, ""))
        for clause in clauses
        if clause.name in wanted
    ]


def _check(clause: Clause[S], subject: Callable[[], S], difference: str) -> Result:
    checked = subject()
    try:
        clause.check(checked)
    except AssertionError as error:
        return Result(clause.name, clause.text, False, str(error), difference)
    except Exception as error:  # noqa: BLE001 - an engine may raise anything where it must not
        detail = f"{type(error).__name__}: {error}"
        return Result(clause.name, clause.text, False, detail, difference)
    return Result(clause.name, clause.text, True, "", difference)


def require(results: Iterable[Result]) -> None:
    """Raise an AssertionError that lists every result that is not as it should be."""
    wrong = [str(result) for result in results if not result.ok]
    if wrong:
        raise AssertionError("\n".join(wrong))
