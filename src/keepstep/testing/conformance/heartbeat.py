"""What every ``ports.Heartbeat`` must do, seen from the side that watches. Runs in tests.

The engine's tests supply ``make``: a context manager that gives a heartbeat and its watcher. Time
passes only in ``Watched.silent_for``, so that a watcher may have a clock of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

from keepstep.ports import Heartbeat
from keepstep.testing.conformance import clauses as common
from keepstep.testing.conformance.clauses import Clause, Result

LIMIT_S = 30.0
"""How long what must not block may take."""
MANY = 20_000
"""Signs of life that nobody takes; more than any buffer holds."""
STEPS = 20
"""So many steps teach a watcher that learns."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the watcher knows: the step in progress (None: no step is), the innermost section."""

    step: int | None
    section: str


class Watched(Protocol):
    """A heartbeat and the watcher at its other end.

    The limits are those of the watcher: it has seen some steps already, and a section's limit is at
    least four times a step's.
    """

    heartbeat: Heartbeat
    step_limit_s: float
    section_limit_s: float

    def seen(self) -> Seen:
        """What the watcher knows now."""

    def silent_for(self, seconds: float, *, in_call: bool = False) -> bool:
        """Let ``seconds`` pass without a sign of life; whether the watcher calls that a hang.

        Called by the main thread, which meanwhile runs Python, or is in one call (``in_call``).
        """

    def train(self, step_s: float) -> bool:
        """Complete ``STEPS`` steps of ``step_s`` seconds as a job does; whether that is a hang."""

    def stop(self, *, gone: bool) -> None:
        """The watcher takes nothing any more: it stands still, or is gone with its end."""


Make = Callable[[], AbstractContextManager[Watched]]


def clauses() -> list[Clause[Make]]:
    """Every clause, in the order of reading."""
    return [
        Clause(name, text, _with(check))
        for name, text, check in (
            ("beat-marks-step", "the watcher knows the step in progress after beat", _marks),
            ("silence-is-a-hang", "a step without a sign of life is a hang, at its limit", _hang),
            ("sections-nest", "a section that ends gives back what was before it", _nest),
            ("failed-section-ends", "a section that raises ends too", _raises),
            ("section-before-steps", "a section outside of steps leaves no step behind", _early),
            ("section-limit", "a section is no hang within its own limit", _section),
            ("long-call", "a section may be a single call, within its own limit", _long_call),
            ("section-hang", "a section that goes on beyond its limit is a hang", _section_hang),
            ("limit-after-section", "after a section the step's limit holds again", _after),
            ("learned-limits", "where all steps take long, the limit grows with them", _learned),
            ("close-ends-watch", "after close no step's limit holds", _close),
            ("beat-after-close", "beat after close begins again", _again),
            ("frozen-watcher", "nothing blocks while the watcher stands still", _frozen),
            ("lost-watcher", "nothing blocks or raises when the watcher is gone", _lost),
        )
    ]


def verify(
    make: Make, differences: Mapping[str, str], *, only: Collection[str] | None = None
) -> list[Result]:
    """Check an engine's heartbeat.

    Args:
        make: A fresh heartbeat and watcher. differences, only: see ``clauses.run``.
    """
    return common.run(clauses(), lambda: make, differences, only=only)


def _with(check: Callable[[Watched], None]) -> Callable[[Make], None]:
    def checked(make: Make) -> None:
        with make() as watched:
            check(watched)

    return checked


def _expect(watched: Watched, step: int | None, section: str, when: str) -> None:
    seen = watched.seen()
    wanted = Seen(step, section)
    assert seen == wanted, f"{when} the watcher knows {seen}, not {wanted}"


def _marks(watched: Watched) -> None:
    for step in (7, 8, 100):
        watched.heartbeat.beat(step)
        _expect(watched, step, "", f"after beat({step})")


def _hang(watched: Watched) -> None:
    watched.heartbeat.beat(7)
    half = watched.step_limit_s / 2
    assert not watched.silent_for(half), f"{half:g} s, half the limit, were called a hang"
    watched.heartbeat.beat(8)
    assert not watched.silent_for(half), "the limit is counted from an older sign of life"
    assert watched.silent_for(2 * watched.step_limit_s), "a silence over the limit is no hang"


def _nest(watched: Watched) -> None:
    heartbeat = watched.heartbeat
    heartbeat.beat(7)
    with heartbeat.section("eval"):
        _expect(watched, 7, "eval", "in a section")
        with heartbeat.section("generate"):
            _expect(watched, 7, "generate", "in a section inside a section")
        _expect(watched, 7, "eval", "after the inner section")
    _expect(watched, 7, "", "after the outer section")
    with heartbeat.section("eval"):
        _expect(watched, 7, "eval", "in a section that comes again")


def _raises(watched: Watched) -> None:
    watched.heartbeat.beat(7)
    with suppress(LookupError), watched.heartbeat.section("eval"):
        raise LookupError("the script's own")
    _expect(watched, 7, "", "after a section that raised")


def _early(watched: Watched) -> None:
    watched.heartbeat.close()
    with watched.heartbeat.section("load"):
        assert watched.seen().section == "load", "a section outside of steps is not seen"
    _expect(watched, None, "", "after a section outside of steps")


def _section(watched: Watched) -> None:
    watched.heartbeat.beat(7)
    long = watched.section_limit_s / 2
    with watched.heartbeat.section("eval"):
        assert not watched.silent_for(long), (
            f"{long:g} s in a section whose limit is {watched.section_limit_s:g} s were called a "
            f"hang (a step's limit is {watched.step_limit_s:g} s)"
        )
    half = watched.step_limit_s / 2
    assert not watched.silent_for(half), "the end of a section is no sign of life"


def _long_call(watched: Watched) -> None:
    watched.heartbeat.beat(7)
    long = watched.section_limit_s / 2
    with watched.heartbeat.section("eval"):
        assert not watched.silent_for(long, in_call=True), (
            f"a call of {long:g} s in a section whose limit is {watched.section_limit_s:g} s was "
            f"called a hang (a step's limit is {watched.step_limit_s:g} s)"
        )


def _section_hang(watched: Watched) -> None:
    watched.heartbeat.beat(7)
    with watched.heartbeat.section("eval"):
        assert watched.silent_for(1.5 * watched.section_limit_s), (
            f"a section may go on beyond its limit of {watched.section_limit_s:g} s"
        )


def _after(watched: Watched) -> None:
    watched.heartbeat.beat(7)
    with watched.heartbeat.section("eval"):
        pass
    assert watched.silent_for(2 * watched.step_limit_s), (
        "a silence over the step's limit is no hang after a section"
    )


def _learned(watched: Watched) -> None:
    limit, usual = watched.step_limit_s, 0.75 * watched.step_limit_s
    assert not watched.train(usual), f"steps of {usual:g} s are hangs, and the limit is {limit:g} s"
    watched.heartbeat.beat(1000)
    assert not watched.silent_for(2 * limit), (
        f"{2 * limit:g} s were called a hang after {STEPS} steps of {usual:g} s"
    )


def _close(watched: Watched) -> None:
    watched.heartbeat.beat(7)
    watched.heartbeat.close()
    _expect(watched, None, "", "after close")
    long = 3 * watched.step_limit_s
    assert not watched.silent_for(long), f"{long:g} s after close were called a hang"
    watched.heartbeat.close()  # a second time does nothing


def _again(watched: Watched) -> None:
    watched.heartbeat.beat(7)
    watched.heartbeat.close()
    watched.silent_for(watched.step_limit_s)
    watched.heartbeat.beat(8)
    _expect(watched, 8, "", "after beat(8), which came after close,")
    half = watched.step_limit_s / 2
    assert not watched.silent_for(half), "the time before beat counts as silence"
    assert watched.silent_for(2 * watched.step_limit_s), (
        "a silence over the limit is no hang in steps that began after close"
    )


def _frozen(watched: Watched) -> None:
    watched.stop(gone=False)
    _use(watched.heartbeat)


def _lost(watched: Watched) -> None:
    watched.stop(gone=True)
    _use(watched.heartbeat)


def _use(heartbeat: Heartbeat) -> None:
    """Use everything, often; fail if that raises or does not return."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for step in range(1, MANY + 1):
                heartbeat.beat(step)
                if step % 4 == 0:
                    with heartbeat.section("eval"):
                        pass
            heartbeat.close()
        except BaseException as error:  # noqa: BLE001 - told by the other thread
            failed.append(error)

    thread = threading.Thread(target=work, name="heartbeat-user", daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), f"the rank is still blocked after {LIMIT_S:g} s"
    assert not failed, f"it raised {failed[0]!r}"
