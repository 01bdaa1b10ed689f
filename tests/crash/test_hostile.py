"""A checkpoint made to do harm executes nothing, takes no memory, and gets a clear error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.crash import attacks, hostile
from tests.crash.attacks import Outcome
from tests.crash.forks import Forks

pytestmark = pytest.mark.process

_GOOD, _NEGATIVE, _CHECKPOINT = 0, 1, 65
_LOOKS = {
    "ls": {_GOOD, _CHECKPOINT},
    "inspect": {_GOOD, _CHECKPOINT},
    "verify": {_NEGATIVE, _CHECKPOINT},
}
"""Exit codes of what shows a checkpoint that cannot be restored: a list names it, and if only a
shard is bad its manifest can still be shown."""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks(attacks.PRELOAD) as found:
        yield found


def _attack(forks: Forks, tmp_path: Path, case: hostile.Case, how: str) -> Sequence[Outcome]:
    """What all readers say; nothing was executed, and none of them fell over."""
    root, canary = tmp_path / "root", tmp_path / "canary"
    case(root, canary)
    target = tmp_path / "target"
    target.mkdir()
    before = {path for path in tmp_path.rglob("*") if target not in path.parents}
    words = (str(root), str(target), str(tmp_path / "answers"))
    assert forks.wait(forks.start(f"{attacks.PRELOAD}:{how}", *words)) == 0
    (tmp_path / "answers").rename(target / "answers")
    assert not canary.exists()
    assert {path for path in tmp_path.rglob("*") if target not in path.parents} == before
    found = attacks.read(target / "answers")
    for one in found:
        assert one.code >= 0 and "Traceback" not in one.text, f"{one.reader}: {one.text}"
        assert len(one.text) < 20_000, f"{one.reader}: {one.text[:500]} ..."
    return found


@pytest.mark.parametrize("name", hostile.NATIVE | hostile.OTHERS)
def test_a_hostile_checkpoint_executes_nothing_and_is_refused_by_all_that_read_it(
    forks: Forks, tmp_path: Path, name: str
) -> None:
    for one in _attack(forks, tmp_path, (hostile.NATIVE | hostile.OTHERS)[name], "attack"):
        allowed = _LOOKS.get(one.reader, {_CHECKPOINT})
        assert one.code in allowed, f"{one.reader} ended with {one.code}: {one.text}"


@pytest.mark.parametrize("name", hostile.READABLE)
def test_a_file_that_says_something_else_of_itself_executes_nothing_and_is_told(
    forks: Forks, tmp_path: Path, name: str
) -> None:
    for one in _attack(forks, tmp_path, hostile.READABLE[name], "attack"):
        allowed = {_NEGATIVE} if one.reader == "verify" else {_GOOD, _CHECKPOINT}
        assert one.code in allowed, f"{one.reader} ended with {one.code}: {one.text}"


@pytest.mark.parametrize("name", hostile.UNCOMMITTED)
def test_what_looks_as_if_it_had_never_been_committed_is_not_waited_for(
    forks: Forks, tmp_path: Path, name: str
) -> None:
    restored, *others = _attack(forks, tmp_path, hostile.UNCOMMITTED[name], "attack")
    assert (restored.code, restored.text) == (_GOOD, "step 0")
    for one in others:
        allowed = _LOOKS.get(one.reader, {_CHECKPOINT})
        assert one.code in allowed, f"{one.reader} ended with {one.code}: {one.text}"


@pytest.mark.parametrize("name", hostile.HARMLESS)
def test_what_is_hostile_and_not_needed_executes_nothing(
    forks: Forks, tmp_path: Path, name: str
) -> None:
    for one in _attack(forks, tmp_path, hostile.HARMLESS[name], "attack"):
        assert one.code == _GOOD, f"{one.reader} ended with {one.code}: {one.text}"
        assert one.equal or one.reader != "restore", one.text


@pytest.mark.parametrize("name", hostile.DCP)
def test_a_hostile_folder_of_another_library_executes_nothing_and_is_refused(
    forks: Forks, tmp_path: Path, name: str
) -> None:
    for one in _attack(forks, tmp_path, hostile.DCP[name], "attack_by_dcp"):
        assert one.code == _CHECKPOINT, f"{one.reader} ended with {one.code}: {one.text}"


@pytest.mark.parametrize("name", hostile.DCP_READABLE)
def test_a_part_of_another_librarys_folder_that_would_act_is_left_out_and_told(
    forks: Forks, tmp_path: Path, name: str
) -> None:
    imported, _ = _attack(forks, tmp_path, hostile.DCP_READABLE[name], "attack_by_dcp")
    assert imported.code == _GOOD and "not used: x" in imported.text, imported.text
