"""Drives processes of ``tests.storage.saver``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

LIMIT_S = 60.0


class Saver:
    """One script with a ``Checkpointer``.

    Args:
        root: Folder of the checkpoints. nbytes: size of the state.
        before: Command that the script is started by. world: variables of a distributed world.
    """

    def __init__(
        self,
        root: Path,
        nbytes: int = 1 << 20,
        *,
        before: Sequence[str] = (),
        world: dict[str, str] | None = None,
    ) -> None:
        command = [sys.executable, "-m", "tests.storage.saver", str(root), str(nbytes)]
        self.process = subprocess.Popen(
            [*before, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(world or {})},
        )

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        _, told = self.process.communicate()
        if error is not None:
            error.add_note(told)

    def say(self, line: str) -> None:
        """Give a command, and do not wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """The next answer."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        """Give a command and wait for the answer."""
        self.say(line)
        return self.answer()

    def end(self, limit_s: float = LIMIT_S) -> tuple[int, str, str]:
        """Close the checkpointer: exit code, what it answers, and its standard error."""
        out, told = self.process.communicate(timeout=limit_s)
        return self.process.returncode, out.strip(), told


def world(meeting: Path, rank: int, size: int) -> dict[str, str]:
    """The variables of a rank."""
    return {"MEETING": str(meeting), "RANK": str(rank), "WORLD_SIZE": str(size)}
