"""Imports that an interruption meets, in this process and on its main thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.engines.nvrx import imports
from keepstep.engines.nvrx.imports import cut_import, wait_for_imports


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Imports a package ``meets`` of the given source; ``meets.hook`` is to be set before."""

    def load(source: str) -> None:
        (tmp_path / "meets").mkdir()
        (tmp_path / "meets" / "__init__.py").write_text(source)
        (tmp_path / "meets" / "part.py").touch()
        __import__("meets")

    monkeypatch.syspath_prepend(str(tmp_path))
    yield load
    for name in ("meets", "meets.part", "meets_hook"):
        sys.modules.pop(name, None)


def _hook(act: Callable[[], object]) -> None:
    """What the package calls in the middle of its import."""
    sys.modules["meets_hook"] = SimpleNamespace(act=act)  # type: ignore[assignment]


SOURCE = "import meets.part, meets_hook\nmeets_hook.act()\npart = meets.part\n"


class _Interruption(BaseException):
    """As NVRx's is none that a script catches."""


def test_an_exception_in_the_middle_of_an_import_is_known_by_its_traceback(
    package: Callable[[str], None],
) -> None:
    def interrupt() -> None:
        raise _Interruption

    _hook(interrupt)
    with pytest.raises(_Interruption) as caught:
        package(SOURCE)
    assert cut_import(caught.value)
    # This is what it is about: the package cannot be imported any more.
    _hook(lambda: None)
    with pytest.raises(AttributeError, match="partially initialized"):
        __import__("meets")


def test_an_exception_elsewhere_cuts_no_import(package: Callable[[str], None]) -> None:
    _hook(lambda: None)
    package(SOURCE)

    def fails() -> None:
        raise _Interruption

    with pytest.raises(_Interruption) as caught:
        fails()
    assert not cut_import(caught.value)


def test_an_import_of_the_main_thread_is_waited_for(
    package: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    waits = threading.Event()
    seen: list[Any] = []

    def sleep(seconds: float) -> None:
        waits.set()
        goes_on.wait(seconds)

    monkeypatch.setattr(imports, "SYSTEM", SimpleNamespace(mono=lambda: 0.0, sleep=sleep))
    outermost = test_an_import_of_the_main_thread_is_waited_for.__code__
    thread = threading.Thread(target=lambda: seen.append(wait_for_imports(outermost, 1.0)))

    def act() -> None:
        thread.start()
        assert waits.wait(20.0)  # it has seen the import
        assert seen == []

    _hook(act)
    package(SOURCE)
    thread.join(20.0)
    assert seen == [True]


def test_an_import_that_does_not_end_is_waited_for_so_long(
    package: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(imports, "SYSTEM", SimpleNamespace(mono=lambda: now[0], sleep=sleep))
    outermost = test_an_import_that_does_not_end_is_waited_for_so_long.__code__
    seen: list[bool] = []

    def act() -> None:
        thread = threading.Thread(target=lambda: seen.append(wait_for_imports(outermost, 1.0)))
        thread.start()
        thread.join(20.0)

    _hook(act)
    package(SOURCE)
    assert seen == [False]
    assert now[0] == pytest.approx(1.0, abs=0.01)
