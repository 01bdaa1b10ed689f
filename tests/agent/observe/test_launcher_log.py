"""The launcher's log: exit codes, last lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.agent.observe.launcher_log import SHOWN, LauncherLog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "launcher.log"


@pytest.fixture
def log(path: Path) -> Iterator[LauncherLog]:
    made = LauncherLog(path)
    yield made
    made.close()


def _add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_exit_codes_are_read_from_the_lines_of_torch_s_launcher(
    path: Path, log: LauncherLog
) -> None:
    log.poll()  # it is not there yet
    _add(path, "E0101 12:00:00.1 7 api.py:836] failed (exitcode: -9) local_rank: 1 (pid: 12")
    log.poll()
    assert log.codes == {}
    _add(path, "34) of binary: /usr/bin/python\nfailed (exitcode: 3) local_rank: 0 (pid: 7) of\n")
    log.poll()
    assert log.codes == {1234: -9, 7: 3}


def test_the_last_lines_are_kept_one_without_an_end_too(path: Path, log: LauncherLog) -> None:
    _add(path, "".join(f"line {number}\n" for number in range(100)) + "Killed")
    log.poll(whole=True)
    lines = log.last_lines
    assert lines[-2:] == ["line 99", "Killed"]
    assert lines[0] == f"line {100 - SHOWN}"
    assert not log.unhealthy


def test_a_node_that_the_launcher_calls_unhealthy_is_noticed(path: Path, log: LauncherLog) -> None:
    _add(path, "Agent .run() raised UnhealthyNodeException: A node is unhealthy\n")
    log.poll()
    assert log.unhealthy


def test_one_look_reads_a_bounded_part_and_the_end_all_of_it(path: Path, log: LauncherLog) -> None:
    _add(path, "x" * 99 + "\n")
    _add(path, ("y" * 99 + "\n") * 1000)
    _add(path, "failed (exitcode: 3) local_rank: 0 (pid: 7) of\n")
    log.poll()
    assert log.codes == {}
    log.poll(whole=True)
    assert log.codes == {7: 3}


def test_what_an_earlier_launch_wrote_is_passed_over(path: Path) -> None:
    _add(path, "failed (exitcode: 3) local_rank: 0 (pid: 7) of\n")
    log = LauncherLog(path)
    _add(path, "new\n")
    log.poll()
    assert (log.codes, log.last_lines) == ({}, ["new"])
    log.close()
