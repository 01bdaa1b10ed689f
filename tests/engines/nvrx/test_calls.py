"""NVRx's worker process: how it is bound to its rank and started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from keepstep.engines.nvrx import library
from keepstep.engines.nvrx.calls import ArmedRank, Calls
from keepstep.errors import SaveFailed
from tests.process.job import lives, wait_until

pytestmark = [pytest.mark.process, pytest.mark.needs("nvrx")]


@pytest.fixture(autouse=True, scope="module")
def _pythons_own_tracker() -> None:
    resource_tracker.ensure_running()


def touch(path: str) -> None:
    """The work of a call."""
    Path(path).touch()


def fail(path: str) -> None:
    """A call that goes wrong."""
    raise ValueError(path)


def request(work: Callable[[str], None], path: Path) -> Any:
    return library.checkpointing().AsyncRequest(work, (str(path),), [], {})


def poll_to_the_end(calls: Calls) -> None:
    wait_until(calls.poll, "the call is done")


def test_a_rank_is_a_plain_number_for_whoever_has_it() -> None:
    rank = ArmedRank(3)
    assert rank == 3
    assert rank.__reduce__()[1] == (3, os.getpid())
    unpickle, arguments = rank.__reduce__()
    assert unpickle(*arguments) == 3  # in the rank itself nothing is armed


def test_a_call_is_done_by_a_worker_that_does_not_know_the_script(tmp_path: Path) -> None:
    calls = Calls(library.checkpointing(), 0)
    main = vars(sys.modules["__main__"])
    before = {name: main.get(name) for name in ("__file__", "__spec__")}
    try:
        assert calls.poll()
        with calls.sending() as queue:
            queue.schedule_async_request(request(touch, tmp_path / "one"))
        assert {name: main.get(name) for name in ("__file__", "__spec__")} == before
        poll_to_the_end(calls)
        assert (tmp_path / "one").exists()
        pid = calls.pid
        assert pid is not None and lives(pid)
    finally:
        calls.close()
    assert calls.pid is None and not lives(pid)
    calls.close()  # later calls do nothing


def test_a_worker_that_ends_with_an_error_is_named_with_its_status(tmp_path: Path) -> None:
    calls = Calls(library.checkpointing(), 5)
    try:
        with calls.sending() as queue:
            queue.schedule_async_request(request(fail, tmp_path))
        pid = calls.pid
        with pytest.raises(SaveFailed, match=rf"process {pid} exited with status 1 .*rank 5"):
            poll_to_the_end(calls)
        with calls.sending() as queue:
            queue.schedule_async_request(request(touch, tmp_path / "two"))
        poll_to_the_end(calls)
        assert calls.pid != pid
    finally:
        calls.close()


def test_nothing_is_started_after_the_kill(tmp_path: Path) -> None:
    calls = Calls(library.checkpointing(), 0)
    calls.kill()
    with pytest.raises(SaveFailed, match="is being closed"), calls.sending() as queue:
        queue.schedule_async_request(request(touch, tmp_path / "three"))
    assert calls.pid is None
