"""The heartbeat suite can fail: for each clause there is a heartbeat that breaks it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from keepstep.ports import Heartbeat
from keepstep.testing.conformance import heartbeat as suite
from keepstep.testing.conformance.heartbeat import Seen, Watched, verify


class Plain:
    """A heartbeat and its watcher in one object that does everything right."""

    step_limit_s = 2.0
    section_limit_s = 20.0

    def __init__(self) -> None:
        self.heartbeat: Heartbeat = self
        self.step: int | None = None
        self.sections: list[str] = []
        self.idle_s = 0.0
        self.watching = True
        self.learned_s = self.step_limit_s

    def beat(self, step: int) -> None:
        self.step = step
        self.idle_s = 0.0

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.sections.append(name)
        self.idle_s = 0.0
        try:
            yield
        finally:
            self.sections.pop()
            self.idle_s = 0.0

    def close(self) -> None:
        self.step = None

    def seen(self) -> Seen:
        return Seen(self.step, self.sections[-1] if self.sections else "")

    def silent_for(self, seconds: float, *, in_call: bool = False) -> bool:
        self.idle_s += seconds
        if self.sections:
            return self.idle_s > self.section_limit_s
        return self.step is not None and self.idle_s > self.learned_s

    def train(self, step_s: float) -> bool:
        self.learned_s = max(self.step_limit_s, 4 * step_s)
        return step_s > self.step_limit_s

    def stop(self, *, gone: bool) -> None:
        self.watching = False


class ForgetsStep(Plain):
    def beat(self, step: int) -> None:
        self.step = self.step or step
        self.idle_s = 0.0


class NeverHung(Plain):
    def silent_for(self, seconds: float, *, in_call: bool = False) -> bool:
        return bool(self.sections) and super().silent_for(seconds, in_call=in_call)


class Flat(Plain):
    """Has one section at a time."""

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.sections = [name]
        self.idle_s = 0.0
        try:
            yield
        finally:
            self.sections = []
            self.idle_s = 0.0


class NoFinally(Plain):
    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.sections.append(name)
        self.idle_s = 0.0
        yield
        self.sections.pop()
        self.idle_s = 0.0


class SectionIsStep(Plain):
    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        with super().section(name):
            yield
        self.step = self.step or 0


class OneLimit(Plain):
    def silent_for(self, seconds: float, *, in_call: bool = False) -> bool:
        self.idle_s += seconds
        return self.step is not None and self.idle_s > self.step_limit_s


class EndlessSection(Plain):
    section_limit_s = 20.0

    def silent_for(self, seconds: float, *, in_call: bool = False) -> bool:
        return not self.sections and super().silent_for(seconds, in_call=in_call)


class CallIsStep(Plain):
    """Holds a call of the main thread to the step's limit, wherever it is."""

    def silent_for(self, seconds: float, *, in_call: bool = False) -> bool:
        long = in_call and seconds > self.step_limit_s
        return super().silent_for(seconds, in_call=in_call) or long


class NeverLearns(Plain):
    def train(self, step_s: float) -> bool:
        return step_s > self.step_limit_s


class SectionEndsWatch(Plain):
    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        with super().section(name):
            yield
        self.idle_s = -1000.0


class NoClose(Plain):
    def close(self) -> None:
        pass


class ClosedForGood(Plain):
    closed = False

    def beat(self, step: int) -> None:
        if not self.closed:
            super().beat(step)

    def close(self) -> None:
        super().close()
        self.closed = True


class Waits(Plain):
    """Waits for the watcher, in a way that the test can end."""

    def __init__(self, ended: threading.Event) -> None:
        super().__init__()
        self.ended = ended

    def beat(self, step: int) -> None:
        super().beat(step)
        if not self.watching:
            self.ended.wait()


class Raises(Plain):
    def stop(self, *, gone: bool) -> None:
        self.lost = gone

    lost = False

    def beat(self, step: int) -> None:
        super().beat(step)
        if self.lost:
            raise BrokenPipeError("the watcher is gone")


def _broken(make: Callable[[], Watched]) -> set[str]:
    results = verify(lambda: contextlib.nullcontext(make()), {})
    return {one.name for one in results if not one.held}


def test_a_right_heartbeat_keeps_every_clause() -> None:
    assert _broken(Plain) == set()


@pytest.mark.parametrize(
    ("make", "clause"),
    [
        (ForgetsStep, "beat-marks-step"),
        (NeverHung, "silence-is-a-hang"),
        (Flat, "sections-nest"),
        (NoFinally, "failed-section-ends"),
        (SectionIsStep, "section-before-steps"),
        (OneLimit, "section-limit"),
        (CallIsStep, "long-call"),
        (EndlessSection, "section-hang"),
        (SectionEndsWatch, "limit-after-section"),
        (NeverLearns, "learned-limits"),
        (NoClose, "close-ends-watch"),
        (ClosedForGood, "beat-after-close"),
        (Raises, "lost-watcher"),
    ],
)
def test_a_wrong_heartbeat_breaks_its_clause(make: Callable[[], Watched], clause: str) -> None:
    assert clause in _broken(make)


def test_a_heartbeat_that_waits_for_its_watcher_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "LIMIT_S", 0.05)
    stop = threading.Event()
    try:
        assert _broken(lambda: Waits(stop)) == {"frozen-watcher", "lost-watcher"}
    finally:
        stop.set()


def test_every_clause_is_tested_here() -> None:
    assert len(suite.clauses()) == 14
