"""Ranks that save with a ``Checkpointer`` of their own, for crash tests; they run in forks."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import keepstep
from keepstep.errors import SaveFailed
from tests.crash.forks import Forks

PRELOAD = "tests.crash.training"
OLD, NEW = 5, 10
LIMIT_S = 30.0
_LARGEST = 1 << 16


class Training:
    """A model and an optimizer whose every value follows from the step."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.fill(0)
        self._learn()
        self.optimizer.step()
        self.step = 0

    def _learn(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)

    def tensors(self) -> list[torch.Tensor]:
        """Everything that training changes."""
        moments = [
            value
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ]
        return [*self.model.state_dict().values(), *moments]

    def fill(self, step: int) -> None:
        """Become the state after ``step``."""
        self.step = step
        with torch.no_grad():
            for number, tensor in enumerate(self.tensors()):
                values = torch.arange(tensor.numel()) + 1000 * number + 100_000 * step
                tensor.copy_(values.reshape(tensor.shape))

    def train(self) -> None:
        """One step of the optimizer, as training takes right after a save."""
        self._learn()
        self.optimizer.step()

    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": self}

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def equals(self, step: int) -> bool:
        """Whether it is the state after ``step``, bit by bit."""
        other = Training()
        other.fill(step)
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        return self.step == step and all(torch.equal(mine, theirs) for mine, theirs in pairs)


def preload() -> None:
    """What takes a second the first time; called once, before the forks."""
    torch.set_num_threads(1)
    training = Training()
    training.train()
    with tempfile.TemporaryDirectory() as folder, keepstep.Checkpointer(folder) as checkpointer:
        checkpointer.restore(training.state())


def train(root: str, rank: str, world: str, first: str, fd: int) -> int:
    """A rank that saves ``OLD`` (unless ``first``), waits, and saves ``NEW``; tells how it went."""
    if int(world) > 1:
        # torch does not export it by name.
        store = dist.FileStore(  # type: ignore[attr-defined]
            str(Path(root).with_name("store")), int(world)
        )
        dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world))
    training = Training()
    with socket.socket(fileno=fd) as channel:
        checkpointer = keepstep.Checkpointer(root, keep_last=1)
        if not int(first):
            training.fill(OLD)
            checkpointer.async_save(training.state(), OLD)
            checkpointer.finalize(LIMIT_S)
        training.fill(NEW)
        channel.send(b"ready")
        if not channel.recv(_LARGEST):
            checkpointer.close()
            return 0
        error = ""
        try:
            checkpointer.async_save(training.state(), NEW)
            training.train()
            checkpointer.finalize(LIMIT_S)
        except SaveFailed as failure:
            error = str(failure)
        channel.send(error.encode() + b"\n")
        channel.recv(_LARGEST)  # the end of it
        checkpointer.close(abort=bool(error))
    return 0


def resume(root: str) -> int:
    """A fresh process: the step that it restores, or 0 if that is not exactly what was saved.

    It then makes the next save.
    """
    training = Training()
    with keepstep.Checkpointer(root, keep_last=2) as checkpointer:
        step = checkpointer.restore(training.state())
        if not training.equals(step):
            return 0
        training.fill(step + 5)
        checkpointer.async_save(training.state(), step + 5)
        checkpointer.finalize(LIMIT_S)
    return step


class Rank:
    """A forked rank that waits before its save of ``NEW``."""

    def __init__(self, forks: Forks, root: Path, rank: int, world: int, *, first: bool) -> None:
        self._forks = forks
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(2 * LIMIT_S)
        with theirs:
            words = [str(root), str(rank), str(world), str(int(first))]
            self.pid = forks.start(f"{PRELOAD}:train", *words, fds=(theirs.fileno(),))

    def ready(self) -> None:
        """Wait until it is about to save."""
        assert self._socket.recv(_LARGEST) == b"ready"

    def save(self) -> None:
        """Let it save ``NEW``."""
        self._socket.send(b"go")

    def answer(self) -> str | None:
        """The error of its save, empty if it is committed, None if the rank was killed."""
        try:
            answer = self._socket.recv(_LARGEST).decode()
        except ConnectionResetError:  # it was killed before it had read what it was told
            answer = ""
        return answer.removesuffix("\n") if answer else None

    def kill(self) -> None:
        """End it as a launcher does where another rank was lost."""
        os.kill(self.pid, 9)

    def close(self) -> int:
        """Let it end; returns its status."""
        self._socket.close()
        return self._forks.wait(self.pid)
