from __future__ import annotations

import os

import pytest

from tests.helpers import needs as module
from tests.helpers.needs import Strictness, missing, needs


@pytest.fixture
def _lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._PROBES, "unicorn", lambda: "there is no unicorn here")


def test_root_is_missing_exactly_for_other_users() -> None:
    assert (missing("root") == "") == (os.geteuid() == 0)


def test_an_unknown_need_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="root, strace, netns, cgroup_memory"):
        needs("rooot")


@pytest.mark.usefixtures("_lacking")
def test_a_missing_need_skips_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Strictness, "no_skip", False)
    with pytest.raises(pytest.skip.Exception, match="needs unicorn: there is no unicorn here"):
        needs("unicorn")


@pytest.mark.usefixtures("_lacking")
def test_a_missing_need_fails_where_no_skip_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Strictness, "no_skip", True)
    with pytest.raises(pytest.fail.Exception, match="KEEPSTEP_NO_SKIP=1 allows no skip"):
        needs("unicorn")
