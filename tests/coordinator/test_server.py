"""The coordinator's own process, over a real socket."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

import keepstep
from keepstep import events
from keepstep.checkpoint import catalog
from keepstep.config import CheckpointSettings, Config
from keepstep.config.load import encode
from keepstep.coordinator.server import EventFile
from keepstep.wire.channel import Channel, pair
from keepstep.wire.messages import (
    FROM_COORDINATOR,
    AgentHello,
    Failed,
    Finish,
    Go,
    JobEnd,
    Join,
    Message,
    Notice,
    RankDown,
    RankEvent,
    RankUp,
    Replace,
    Returned,
    SaveBegun,
    SaveResult,
    ShardDone,
    StoreCall,
    StoreForward,
    StoreReply,
    ToRank,
)
from keepstep.wire.types import Version
from tests.checkpoint.shards import save, write

M = TypeVar("M")
RUN = "demo"
WORLD = 2
LIMIT_S = 30


class Agent:
    """A coordinator's process, and the agent's end of its socket."""

    def __init__(self, run_dir: Path, **checkpoint: Any) -> None:
        self.root = run_dir / "checkpoints"
        self.root.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        settings = CheckpointSettings(dir=str(self.root), **checkpoint)
        config = dataclasses.replace(Config(), checkpoint=settings)
        ours, theirs = pair()
        ours.settimeout(LIMIT_S)
        command = [sys.executable, "-m", "keepstep.coordinator", "--fd", str(theirs.fileno())]
        command += ["--run", RUN, "--run-dir", str(run_dir), "--world", str(WORLD)]
        command += ["--config", encode(config).decode()]
        source = str(Path(keepstep.__file__).parents[1])
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": source},
            stderr=subprocess.PIPE,
        )
        theirs.close()
        self.channel: Channel[Any] = Channel(ours, FROM_COORDINATOR, blocking=True)
        ours.settimeout(LIMIT_S)
        self.got: list[Any] = []
        self.send(AgentHello(node=0, local_world=WORLD))

    def send(self, message: Message) -> None:
        self.channel.send(message)

    def until(self, wanted: Callable[[Any], bool]) -> Any:
        """Receive until ``wanted`` says yes; the message."""
        while True:
            message = self.channel.receive()
            self.got.append(message)
            if wanted(message):
                return message

    def body(self, kind: type[M], rank: int) -> M:
        """The next message of ``kind`` for ``rank``, also from among those received already."""

        def fits(message: Any) -> bool:
            return (
                isinstance(message, ToRank)
                and message.rank == rank
                and isinstance(message.body, kind)
            )

        found = next((message for message in self.got if fits(message)), None)
        if found is None:
            found = self.until(fits)
        self.got.remove(found)
        body: M = found.body
        return body

    def form(self, inc: int = 0) -> list[Go]:
        """All ranks come up and join; their Go."""
        for rank in range(WORLD):
            self.send(RankUp(rank=rank, inc=inc, pid=100 + rank))
            self.send(RankEvent(rank=rank, body=Join(inc=inc, after_round=0)))
        return [self.body(Go, rank) for rank in range(WORLD)]

    def end(self) -> tuple[int, str]:
        """Close the socket; the process's exit code and what it wrote."""
        self.channel.close()
        _, text = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, text.decode()

    def events(self) -> list[events.Event]:
        return events.read(self.run_dir)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path)
    yield made
    made.channel.close()
    made.process.communicate(timeout=LIMIT_S)


class FullDisk:
    """Stands for a path whose file takes nothing at first, then a few bytes at a time."""

    def __init__(self) -> None:
        self.parent = self
        self.data = b""
        self.refusals = 2

    def mkdir(self, **_: bool) -> None:
        return

    @contextlib.contextmanager
    def open(self, *_: Any, **__: Any) -> Iterator[FullDisk]:
        yield self

    def write(self, data: bytearray) -> int:
        if self.refusals:
            self.refusals -= 1
            raise OSError(28, "No space left on device")
        self.data += data[:3]
        return len(data[:3])


def version(step: int, round: int = 1, term: int = 1) -> Version:
    return Version(run=RUN, term=term, round=round, step=step, world=WORLD)


def write_and_tell(agent: Agent, which: Version, ranks: tuple[int, ...] = (0, 1)) -> str:
    folder = ""
    for rank in ranks:
        agent.send(SaveBegun(rank=rank, version=which))
        receipt, folder = write(agent.root, which, rank)
        done = ShardDone(rank=rank, version=which, folder=folder, bytes=receipt.size)
        agent.send(done)
    return folder


def test_a_shard_of_each_rank_makes_a_committed_checkpoint_and_every_rank_hears_of_it(
    agent: Agent,
) -> None:
    agent.form()
    folder = write_and_tell(agent, version(5))
    assert agent.until(lambda m: isinstance(m, Notice) and m.kind == "commit").text == folder
    for rank in range(WORLD):
        assert agent.body(SaveResult, rank) == SaveResult(step=5, error="")
    newest = catalog.newest(agent.root)
    assert newest is not None and newest.version == version(5)
    assert agent.end() == (0, "")
    (commit,) = [e for e in agent.events() if e.kind == "checkpoint.commit"]
    assert (commit.step, commit.data["folder"], commit.src) == (5, folder, "coordinator")


def test_the_next_round_resumes_from_what_was_committed(agent: Agent) -> None:
    assert agent.form() == [Go(term=1, round=1, resume=0, folder="")] * WORLD
    folder = write_and_tell(agent, version(5))
    agent.until(lambda m: isinstance(m, Notice) and m.kind == "commit")
    agent.send(RankDown(rank=1, inc=0, code=-9, oom=False, by_us=False, step=7, t=1.0))
    replace = agent.until(lambda m: isinstance(m, Replace))
    assert (replace.rank, replace.inc, replace.round) == (1, 0, 2)
    agent.send(RankEvent(rank=0, body=Join(inc=0, after_round=1)))
    agent.send(RankUp(rank=1, inc=1, pid=200))
    agent.send(RankEvent(rank=1, body=Join(inc=1, after_round=0)))
    assert agent.body(Go, 0) == Go(term=1, round=2, resume=5, folder=folder)
    assert agent.body(Go, 1) == Go(term=1, round=2, resume=5, folder=folder)


def test_a_shard_that_could_not_be_written_fails_the_save_for_every_rank(agent: Agent) -> None:
    agent.form()
    write_and_tell(agent, version(5), ranks=(0,))
    agent.send(SaveBegun(rank=1, version=version(5)))
    agent.send(ShardDone(rank=1, version=version(5), folder="", bytes=0, error="disk is full"))
    notice = agent.until(lambda m: isinstance(m, Notice) and m.kind == "fail")
    assert notice.text == "checkpoint of step 5 was not committed: disk is full"
    for rank in range(WORLD):
        assert agent.body(SaveResult, rank) == SaveResult(step=5, error="disk is full")
    assert catalog.newest(agent.root) is None


def test_a_shard_that_is_not_there_is_never_committed(agent: Agent) -> None:
    agent.form()
    folder = write_and_tell(agent, version(5), ranks=(0,))
    agent.send(ShardDone(rank=1, version=version(5), folder=folder, bytes=100))
    assert "1 of 2 shards are missing" in agent.body(SaveResult, 1).error
    assert catalog.newest(agent.root) is None


def test_saves_that_keep_failing_end_the_job(tmp_path: Path) -> None:
    agent = Agent(tmp_path, max_failures=1)
    agent.form()
    for step in (1, 2):
        agent.send(SaveBegun(rank=0, version=version(step)))
        agent.send(
            ShardDone(rank=0, version=version(step), folder="", bytes=0, error="disk is full")
        )
    end = agent.until(lambda m: isinstance(m, JobEnd))
    assert (end.exit_code, end.graceful) == (65, False)
    assert "2 saves in a row failed, the last with: disk is full" in end.reason
    assert agent.end() == (0, "")


def test_ranks_that_return_after_the_last_commit_end_the_job(agent: Agent) -> None:
    agent.form()
    write_and_tell(agent, version(30))
    for rank in range(WORLD):
        body = Returned(inc=0, round=1, step=30, saving=30)
        agent.send(RankEvent(rank=rank, body=body))
    for rank in range(WORLD):
        assert agent.body(Finish, rank) == Finish(exit_code=0)
    assert agent.until(lambda m: isinstance(m, JobEnd)).exit_code == 0
    newest = catalog.newest(agent.root)
    assert newest is not None and newest.step == 30


def test_the_store_of_a_round_is_empty_and_an_old_round_s_calls_are_refused(agent: Agent) -> None:
    agent.form()

    def call(number: int, op: str, round: int, rank: int = 0, **more: Any) -> None:
        body = StoreCall(id=number, inc=0, round=round, op=op, keys=["a"], **more)
        agent.send(StoreForward(rank=rank, call=body))

    call(1, "get", 1, rank=1, timeout_s=60.0)
    call(2, "set", 1, values=[b"x"])
    assert agent.body(StoreReply, 1) == StoreReply(id=1, values=[b"x"])
    assert agent.body(StoreReply, 0) == StoreReply(id=2)
    failed = Failed(
        inc=0, round=1, failure="exception", error="E", location="t.py:1", step=3, t=1.0
    )
    agent.send(RankEvent(rank=0, body=failed))
    for rank in range(WORLD):
        agent.send(RankEvent(rank=rank, body=Join(inc=0, after_round=1)))
    assert [agent.body(Go, rank).round for rank in range(WORLD)] == [2, 2]
    call(3, "check", 2)
    assert agent.body(StoreReply, 0).number == 0
    call(4, "check", 1)
    assert "round 1 is over" in agent.body(StoreReply, 0).error
    call(5, "wait", 2, timeout_s=0.0)
    assert "wait timeout" in agent.body(StoreReply, 0).error


def test_checkpoints_of_another_run_end_the_job_with_its_code(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", Version(run="other", term=1, round=1, step=5, world=WORLD))
    agent = Agent(tmp_path)
    for rank in range(WORLD):
        agent.send(RankUp(rank=rank, inc=0, pid=100 + rank))
        agent.send(RankEvent(rank=rank, body=Join(inc=0, after_round=0)))
    end = agent.until(lambda m: isinstance(m, JobEnd))
    assert end.exit_code == 65
    assert "checkpoints of run other" in end.reason
    assert agent.end() == (0, "")


@pytest.mark.parametrize("forming", [True, False])
def test_the_process_ends_when_its_agent_is_gone(tmp_path: Path, forming: bool) -> None:
    agent = Agent(tmp_path)
    if not forming:
        agent.form()
    assert agent.end() == (0, "")


def test_an_agent_that_goes_without_reading_its_mail_leaves_a_checkpoint_all_the_same(
    tmp_path: Path,
) -> None:
    agent = Agent(tmp_path)
    agent.form()
    write_and_tell(agent, version(5))
    agent.channel.sock.shutdown(socket.SHUT_WR)
    assert agent.end() == (0, "")
    newest = catalog.newest(agent.root)
    assert newest is not None and newest.step == 5


def test_what_it_did_is_in_its_own_event_file(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.form()
    agent.end()
    found = agent.events()
    assert [event.kind for event in found] == [
        "round.begin",
        "rank.joined",
        "rank.joined",
        "round.ready",
    ]
    assert {(event.src, event.run, event.world, event.round) for event in found} == {
        ("coordinator", RUN, WORLD, 1)
    }
    (path,) = (tmp_path / "events").iterdir()
    assert path.name.startswith("coordinator-0-")
    assert path.name.endswith(f"-{agent.process.pid}.jsonl")


def test_events_that_a_full_disk_refuses_are_written_once_there_is_room() -> None:
    disk = FullDisk()
    file = EventFile(cast(Path, disk))
    for line in (b"one\n", b"two\n", b"three\n"):
        file.put(line)
    file.close()
    assert disk.data == b"one\ntwo\nthree\n"
