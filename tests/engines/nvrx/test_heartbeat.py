"""Heartbeats by NVRx: what its monitor is told, and that the training thread never waits for it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep import shm
from keepstep.config import Config, HeartbeatSettings
from keepstep.engines.nvrx import heartbeat, library
from keepstep.engines.nvrx.heartbeat import LearnedLimit, NvrxHeartbeat
from keepstep.errors import EngineUnavailable
from keepstep.policy.nvrx_limits import nvrx_limits
from keepstep.ports import Heartbeat
from keepstep.rank.runtime import Runtime
from keepstep.shm import Board, Phase
from tests.rank.starts import start

DEADLINE_S = 20.0


class Client:
    """``RankMonitorClient`` as far as it is used; notes its calls, and may be frozen."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.states: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        self.free = threading.Event()
        self.free.set()
        self.error: Exception | None = None

    def _note(self, what: str) -> None:
        with self.changed:
            self.calls.append(what)
            self.changed.notify_all()
        self.free.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error

    def init_workload_monitoring(self) -> None:
        self._note("init")

    def shutdown_workload_monitoring(self) -> None:
        self._note("shutdown")

    def send_heartbeat(self) -> None:
        self._note("beat")

    def start_section(self, section: str) -> None:
        self._note(f"open {section}")

    def end_section(self, section: str) -> None:
        self._note(f"close {section}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.states.append(state)
        self._note("teach")

    def wait_for(self, what: str, count: int = 1) -> None:
        """Until ``what`` was called ``count`` times."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.calls.count(what) >= count, DEADLINE_S)


class Call:
    """``CallWrapper`` as far as it is used."""

    def __init__(self) -> None:
        self.pings = 0

    def ping(self) -> None:
        self.pings += 1


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client()
    monkeypatch.setattr(library, "rank_monitor_client", lambda: lambda: made)
    monkeypatch.setenv(heartbeat.SOCKET_VARIABLE, "somewhere")
    return made


@contextlib.contextmanager
def rank(tmp_path: Path, call: Call | None = None, limit_s: float = 1.0) -> Iterator[Any]:
    beats = HeartbeatSettings(min_limit_s=limit_s, interval_s=limit_s / 10)
    config = dataclasses.replace(Config(), heartbeat=beats)
    fd = shm.create()
    board = Board(fd)
    os.close(fd)
    runtime = Runtime(start(tmp_path), config, None, board)  # type: ignore[arg-type]
    made = NvrxHeartbeat(runtime, nvrx_limits(config), lambda: call)
    try:
        yield made, board
    finally:
        made.end()
        board.close()


def test_steps_are_heartbeats_and_sections_are_one_section_of_nvrx(
    tmp_path: Path, client: Client
) -> None:
    call = Call()
    with rank(tmp_path, call) as (beats, board):
        assert isinstance(beats, Heartbeat)
        beats.beat(7)
        client.wait_for("beat")
        assert (board.phase, board.step) == (Phase.STEP, 7) and call.pings >= 1
        with beats.section("eval"), beats.section("inner"):
            assert board.label == "inner"
            client.wait_for("open section")
        client.wait_for("close section")
        assert client.calls.count("open section") == client.calls.count("close section") == 1
        assert board.phase is Phase.STEP
    assert client.calls[0] == "init" and client.calls[-1] == "shutdown"


def test_a_section_keeps_beating_without_the_script_and_a_step_does_not(
    tmp_path: Path, client: Client
) -> None:
    call = Call()
    with rank(tmp_path, call) as (beats, _):
        beats.beat(1)
        client.wait_for("beat")
        with beats.section("eval"):
            client.wait_for("beat", 4)
            assert call.pings >= 3
        client.wait_for("close section")
        count = client.calls.count("beat")
        # The thread has nothing to send now: it is asleep until the script does something.
        beats.beat(2)
        client.wait_for("beat", count + 1)


def test_a_section_beyond_its_limit_falls_silent(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rank(tmp_path) as (beats, _):
        monkeypatch.setattr(beats, "_limits", dataclasses.replace(beats._limits, ft_section=0.0))
        beats._enter()
        client.wait_for("open section")
        beats._wish("beat")
        client.wait_for("beat")
        assert client.calls.count("beat") == 1
        beats._leave()


def test_a_frozen_monitor_holds_up_nobody(tmp_path: Path, client: Client) -> None:
    with rank(tmp_path) as (beats, board):
        client.wait_for("init")
        client.free.clear()
        beats.beat(1)
        client.wait_for("beat")
        for step in range(2, 200):  # returns although nobody answers
            beats.beat(step)
        with beats.section("eval"):
            pass
        assert board.step == 199
        client.free.set()
        client.wait_for("beat", 2)
        assert "open section" not in client.calls, "a section that is over is not told"
        assert client.calls.count("beat") < 20, "waiting heartbeats are one"


def test_a_monitor_that_is_gone_is_told_once_and_training_goes_on(
    tmp_path: Path, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    with rank(tmp_path) as (beats, board):
        client.wait_for("init")
        client.error = ConnectionResetError("gone")
        beats.beat(1)
        client.wait_for("beat")
        beats.beat(2)
        assert board.step == 2
    assert capsys.readouterr().err.count("NVRx's rank monitor is lost") == 1


def test_nvrx_is_imported_by_the_thread_that_imports_the_rest_of_it(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    importing: list[threading.Thread] = []

    def load() -> Any:
        importing.append(threading.current_thread())
        return lambda: client

    monkeypatch.setattr(library, "rank_monitor_client", load)
    with rank(tmp_path):
        client.wait_for("init")
    assert importing == [threading.current_thread()]


def test_an_nvrx_without_the_client_is_told_and_training_goes_on(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def load() -> Any:
        raise EngineUnavailable("it does not fit")

    monkeypatch.setattr(library, "rank_monitor_client", load)
    with rank(tmp_path) as (beats, board):
        beats.beat(1)
        assert board.step == 1
    assert client.calls == []
    assert capsys.readouterr().err.count("NVRx's rank monitor is lost") == 1


def test_without_nvrxs_launcher_only_the_wrapper_is_pinged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(heartbeat.SOCKET_VARIABLE, raising=False)
    call = Call()
    with rank(tmp_path, call) as (beats, _):
        beats.beat(1)
        with beats.section("eval"):
            pass
        beats.close()
    assert call.pings >= 2


def test_what_the_board_shows_is_progress_too(tmp_path: Path, client: Client) -> None:
    with rank(tmp_path) as (beats, _):
        client.wait_for("init")
        beats._runtime.begin_step(1)  # as keepstep.heartbeat() and the optimizer's hook do
        client.wait_for("beat")
        beats._runtime.begin_step(2)
        client.wait_for("beat", 2)


@pytest.mark.parametrize("phase", [Phase.SCRIPT, Phase.WAIT, Phase.LOAD])
def test_outside_steps_heartbeats_go_on(phase: Phase, tmp_path: Path, client: Client) -> None:
    call = Call()
    with rank(tmp_path, call) as (beats, _):
        beats._runtime.enter(phase)
        client.wait_for("beat", 4)
        assert call.pings >= 3


def test_outside_steps_they_end_with_the_limit_of_the_start(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rank(tmp_path) as (beats, _):
        client.wait_for("init")
        monkeypatch.setattr(beats, "_limits", dataclasses.replace(beats._limits, ft_initial=0.0))
        beats._runtime.enter(Phase.SCRIPT)
        client.wait_for("beat")
        beats._enter()  # a whole turn of the thread later ...
        client.wait_for("open section")
        assert client.calls.count("beat") <= 2  # ... nothing more than that was sent
        beats._leave()


def test_a_section_that_a_restart_cut_off_is_closed(tmp_path: Path, client: Client) -> None:
    with rank(tmp_path) as (beats, _):
        beats._enter()
        client.wait_for("open section")
        beats.new_attempt()
        client.wait_for("close section")
        with beats.section("eval"):
            client.wait_for("open section", 2)


def test_a_learned_limit_has_a_floor_a_ceiling_and_enough_evidence() -> None:
    learned = LearnedLimit(5.0, floor_s=10.0, ceiling_s=100.0)
    assert learned.limit_s == 100.0
    for _ in range(10):
        learned.add(0.1)
    assert learned.limit_s == 10.0
    learned.add(4.0)
    assert learned.limit_s == 20.0
    learned.add(50.0)
    assert learned.limit_s == 100.0


def test_a_learned_limit_goes_with_the_checkpoint() -> None:
    learned = LearnedLimit(5.0, floor_s=10.0, ceiling_s=100.0)
    for _ in range(10):
        learned.add(4.0)
    again = LearnedLimit(5.0, floor_s=10.0, ceiling_s=100.0)
    again.add(5.0)
    again.load_state_dict(learned.state_dict())
    assert (again.limit_s, again.count) == (25.0, 10)


def test_nvrx_is_told_the_learned_limit_through_its_own_state(
    tmp_path: Path, client: Client
) -> None:
    with rank(tmp_path) as (beats, _):
        for _ in range(10):
            beats.learned.add(3.0)
        beats.beat(1)
        client.wait_for("teach")
        told = client.states[0]["current_timeouts"]["heartbeat"]
        assert told["subsequent"] == beats.learned.limit_s
        assert told["were_calculated"] is True
        beats.beat(2)
        client.wait_for("beat", 2)
        assert len(client.states) == 1, "an unchanged limit is told once"
