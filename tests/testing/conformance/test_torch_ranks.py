"""The shard-writer suite can fail: writers that do one thing wrong, in a world of one."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from keepstep.checkpoint import layout
from keepstep.errors import CheckpointCorrupt, CheckpointError, SaveFailed
from keepstep.ports import PendingWrite, ShardWriter
from keepstep.rank.checkpointer import Place, native_writer
from keepstep.testing.conformance import torch_ranks, torch_states
from keepstep.testing.conformance.torch_ranks import CHECKS, Here
from keepstep.wire.types import Version

pytestmark = pytest.mark.process  # each writer has a process of its own


class Right:
    """The native writer, as something to derive from."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.inner = native_writer(place)

    def begin(self, state: Mapping[str, object], version: Version, folder: Path) -> PendingWrite:
        return self.inner.begin(state, version, folder)

    def load(self, state: Mapping[str, object], folder: Path) -> int:
        return self.inner.load(state, folder)

    def close(self, *, abort: bool = False) -> None:
        self.inner.close(abort=abort)


class Later:
    """A save that begins only when somebody waits for it."""

    def __init__(self, begin: Callable[[], PendingWrite]) -> None:
        self._begin = begin

    def staged(self) -> bool:
        return True

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        self._begin().wait(timeout_s)


class Aliases(Right):
    """Hands on the live tensors."""

    def begin(self, state: Mapping[str, object], version: Version, folder: Path) -> PendingWrite:
        return Later(lambda: self.inner.begin(state, version, folder))


class Nothing(Later):
    def __init__(self) -> None:
        pass

    def wait(self, timeout_s: float) -> None:
        pass


class SavesNothing(Right):
    def begin(self, state: Mapping[str, object], version: Version, folder: Path) -> PendingWrite:
        return Nothing()


class Overwrites(Right):
    """Drops a save when the next is begun."""

    last: PendingWrite | None = None

    def begin(self, state: Mapping[str, object], version: Version, folder: Path) -> PendingWrite:
        if version.step == 2:
            return Nothing()
        return self.inner.begin(state, version, folder)


class LoadsNothing(Right):
    def load(self, state: Mapping[str, object], folder: Path) -> int:
        return 1


class LoadsAnything(Right):
    """Changes the state before it looks whether it may."""

    def load(self, state: Mapping[str, object], folder: Path) -> int:
        torch_states.spoil(state)
        return self.inner.load(state, folder)


class TakesAnything(Right):
    def begin(self, state: Mapping[str, object], version: Version, folder: Path) -> PendingWrite:
        with contextlib.suppress(CheckpointError):
            return self.inner.begin(state, version, folder)
        return Nothing()


class Nameless(Right):
    """Says that something failed, and no more."""

    def begin(self, state: Mapping[str, object], version: Version, folder: Path) -> PendingWrite:
        begun = self.inner.begin(state, version, folder)

        class Silent(Later):
            def wait(self, timeout_s: float) -> None:
                try:
                    begun.wait(timeout_s)
                except SaveFailed:
                    raise SaveFailed("it failed") from None

        return Silent(lambda: begun)


class Commits(Right):
    """Publishes whatever there is."""

    def begin(self, state: Mapping[str, object], version: Version, folder: Path) -> PendingWrite:
        begun = self.inner.begin(state, version, folder)

        class Claims(Later):
            def wait(self, timeout_s: float) -> None:
                with contextlib.suppress(SaveFailed):
                    begun.wait(timeout_s)

        return Claims(lambda: begun)


class LeavesProcess(Right):
    left: subprocess.Popen[bytes] | None = None

    def begin(self, state: Mapping[str, object], version: Version, folder: Path) -> PendingWrite:
        if LeavesProcess.left is None:
            LeavesProcess.left = subprocess.Popen(["sleep", "60"])
        return self.inner.begin(state, version, folder)


class DropsAtClose(Right):
    def close(self, *, abort: bool = False) -> None:
        self.inner.close(abort=True)


class BlindToDamage(Right):
    def load(self, state: Mapping[str, object], folder: Path) -> int:
        with contextlib.suppress(CheckpointCorrupt):
            return self.inner.load(state, folder)
        return 1


class Alone(Here):
    """A rank that has no others."""

    def every(self, value: bool) -> bool:
        return value


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch_ranks, "GONE_S", 0.2)
    yield
    if LeavesProcess.left is not None:
        LeavesProcess.left.kill()
        LeavesProcess.left.wait()
        LeavesProcess.left = None


def _check(clause: str, make: Callable[[Place], ShardWriter], folder: Path) -> None:
    here = Alone(0, 1, folder, make)
    try:
        CHECKS[clause](here)
    finally:
        here.end()


@pytest.mark.parametrize(
    ("clause", "make", "told"),
    [
        ("values-at-the-call", Aliases, "values are others"),
        ("values-at-the-call", LoadsNothing, "values are others"),
        ("commit-verifies", SavesNothing, "step 7 is not committed"),
        ("saves-in-a-row", Overwrites, "step 2 is not committed"),
        ("saves-in-a-row", Aliases, "values are others"),
        ("refused-state", TakesAnything, "a sparse tensor was accepted"),
        ("dead-writer", Nameless, "names none of the killed processes"),
        ("dead-writer", Commits, "is told to be done whose processes"),
        ("dead-writer", SavesNothing, "not committed"),
        ("abort-ends-processes", LeavesProcess, "1 of 2 processes live"),
        ("close-waits", DropsAtClose, "step 1 is not committed"),
        ("close-waits", LeavesProcess, "1 of 2 processes live"),
        ("damage-is-found", BlindToDamage, "it was loaded; expected was CheckpointCorrupt"),
        ("damage-is-found", LoadsAnything, "values are others"),
        ("other-model", LoadsAnything, "values are others"),
    ],
)
@pytest.mark.usefixtures("limits")
def test_a_wrong_writer_breaks_the_clause(
    clause: str, make: Callable[[Place], ShardWriter], told: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=told):
        _check(clause, make, tmp_path)


@pytest.mark.parametrize("clause", ["values-at-the-call", "dead-writer", "close-waits"])
def test_a_right_writer_keeps_the_clause(clause: str, tmp_path: Path) -> None:
    _check(clause, Right, tmp_path)
    assert layout.list_folders(tmp_path)


def test_the_look_at_a_state_sees_every_change_of_it() -> None:
    state = torch_states.plain(1.0, 10, 2)
    before = torch_states.bits(state)
    assert torch_states.differing(before, torch_states.bits(torch_states.plain(1.0, 10, 2))) == []
    torch_states.spoil(state)
    after = torch_states.bits(state)
    assert torch_states.differing(before, after) == ["/data/value", "/t0", "/t1"]
    del state["t1"]
    assert torch_states.differing(after, torch_states.bits(state)) == ["/t1"]
