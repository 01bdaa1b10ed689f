"""The environment is read and changed in one place."""

from __future__ import annotations

import os

import pytest

from keepstep.config import env


def test_a_snapshot_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_TEST", "a")
    taken = env.snapshot()
    assert taken["KEEPSTEP_TEST"] == "a"
    taken["KEEPSTEP_TEST"] = "b"
    assert os.environ["KEEPSTEP_TEST"] == "a"


def test_a_variable_that_is_not_set_reads_as_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEEPSTEP_TEST", raising=False)
    assert env.read("KEEPSTEP_TEST") == ""
    assert env.read("KEEPSTEP_TEST", "x") == "x"
    monkeypatch.setenv("KEEPSTEP_TEST", "a")
    assert env.read("KEEPSTEP_TEST", "x") == "a"


@pytest.mark.parametrize("change", [env.update, env.apply])
def test_changes_reach_the_process_and_leave_the_rest(
    change: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ)
    monkeypatch.setenv("KEEPSTEP_TEST", "a")
    monkeypatch.setenv("KEEPSTEP_OTHER", "c")
    assert callable(change)
    change({"KEEPSTEP_TEST": "b"})
    assert os.environ["KEEPSTEP_TEST"] == "b"
    assert os.environ["KEEPSTEP_OTHER"] == "c"


@pytest.mark.parametrize(("name", "value"), [("", "a"), ("A=B", "c"), ("KEEPSTEP_TEST", "a\0b")])
def test_what_no_environment_can_hold_is_refused_whole(name: str, value: str) -> None:
    before = env.snapshot()
    with pytest.raises(ValueError, match="cannot hold the variable"):
        env.apply({"KEEPSTEP_GOOD": "1", name: value})
    assert env.snapshot() == before
