"""What every ``ports.ShardWriter`` must do, checked on real ranks. Runs in tests.

``Ranks`` are processes with a gloo group that make writers by the engine's factory; they run the
same clause at the same time (``torch_ranks`` holds the code). Ranks that fail or hang are ended,
and the next clause gets fresh ones.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from keepstep.testing.conformance import clauses as common
from keepstep.testing.conformance.clauses import Clause, Result
from keepstep.testing.conformance.processes import Mark, living, tail, wait_until

START_LIMIT_S = 90.0
CLAUSE_LIMIT_S = 90.0
"""How long a rank may take for one clause before it counts as blocked."""
AFTER_FAILURE_S = 1.0
"""How long the other ranks may go on after one has failed."""
GONE_S = 30.0
"""How long an engine's processes may outlive their rank, to finish what they have."""
_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore::FutureWarning"}
_MODULE = "keepstep.testing.conformance.torch_ranks"


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks are asked to do: ``root`` is the clause's own folder."""

    clause: str
    root: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank did: ``error`` is empty if the clause holds there; ``pids`` are its helpers."""

    clause: str
    error: str = ""
    pids: list[int] = []


@dataclass(slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    answers: Path
    log: Path
    taken: int = 0

    def answer(self) -> Answer | None:
        """The next answer, if it is there."""
        lines = self.answers.read_bytes().splitlines(keepends=True)
        if len(lines) <= self.taken or not lines[self.taken].endswith(b"\n"):
            return None
        self.taken += 1
        return msgspec.json.decode(lines[self.taken - 1], type=Answer)


class Ranks:
    """Processes that use an engine's writer; a context manager.

    Args:
        writer: The factory as ``module:function``, a ``rank.checkpointer.WriterFactory``.
        folder: For logs and checkpoints.
        small_disk: A folder on a file system of its own with 12 to 24 MiB of room, for the clause
            ``full-disk``; None: it cannot be checked.
        world: Number of ranks, at least 2.
    """

    def __init__(
        self, writer: str, folder: Path, *, small_disk: Path | None = None, world: int = 2
    ) -> None:
        self._writer, self._folder, self._world = writer, folder, world
        self.small_disk = small_disk
        self._mark = Mark()
        self._ranks: list[_Rank] = []
        self._starts = self._roots = 0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """End the ranks and whatever they have started."""
        for rank in self._ranks:
            if rank.process.stdin is not None:
                rank.process.stdin.close()
            rank.process.kill()
            rank.process.wait()
        self._ranks = []
        self._mark.kill()

    def kill_ranks(self) -> None:
        """SIGKILL to the ranks and to nobody else."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()

    def call(self, clause: str, root: Path | None = None) -> list[Answer]:
        """Have all ranks run ``clause`` in ``root``, by default in a new folder.

        Raises:
            AssertionError: it does not hold on some rank, or a rank died or is blocked.
        """
        if not self._ranks:
            self._start()
        self._roots += 1
        place = root or self._folder / f"{self._roots:02d}-{clause}"
        command = msgspec.json.encode(Command(clause=clause, root=str(place))) + b"\n"
        for rank in self._ranks:
            assert rank.process.stdin is not None
            rank.process.stdin.write(command)
            rank.process.stdin.flush()
        return self._collect(clause, CLAUSE_LIMIT_S)

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._starts += 1
        for rank in range(self._world):
            name = f"start-{self._starts}-rank-{rank}"
            answers, log = self._folder / f"{name}.answers", self._folder / f"{name}.log"
            answers.touch()
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", _MODULE, "--rank", str(rank)),
                        *("--world", str(self._world), "--writer", self._writer),
                        *("--store", str(self._folder / f"store-{self._starts}")),
                        *("--answers", str(answers)),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._mark.environment(_ENVIRONMENT),
                )
            self._ranks.append(_Rank(process, answers, log))
        self._collect("", START_LIMIT_S)

    def _collect(self, clause: str, limit_s: float) -> list[Answer]:
        answers: dict[int, Answer] = {}

        def settled() -> bool:
            for number, rank in enumerate(self._ranks):
                if number not in answers:
                    # In this order: the last answer of a rank that has ended is there to be read.
                    ended = rank.process.poll()
                    found = rank.answer()
                    if found is None and ended is not None:
                        found = Answer(clause=clause, error=f"its process ended with {ended}")
                    if found is not None:
                        if found.clause != clause:
                            raise RuntimeError(f"asked was {clause!r}, the answer is {found}")
                        answers[number] = found
            return len(answers) == self._world

        failed = wait_until(lambda: settled() or any(a.error for a in answers.values()), limit_s)
        if failed and not settled():
            wait_until(settled, AFTER_FAILURE_S)
        told = [f"rank {number}: {a.error}" for number, a in sorted(answers.items()) if a.error]
        blocked = [number for number in range(self._world) if number not in answers]
        if blocked and not told:
            told = [f"rank {number} is blocked for over {limit_s:g} s" for number in blocked]
        if told:
            logs = "".join(f"\n--- {rank.log.name}\n{tail(rank.log)}" for rank in self._ranks)
            self.end()
            raise AssertionError("; ".join(told) + logs)
        return [answers[number] for number in range(self._world)]


_TEXTS = {
    "values-at-the-call": "what is saved are the values at the call, whatever is written later",
    "bit-equal": "every kind of state comes back bit by bit",
    "commit-verifies": "a save that is done is committed, verifies, and has the version asked for",
    "not-offered-early": "nothing is offered before every rank's part is durable",
    "saves-in-a-row": "saves begun before the last is done lose nothing and mix nothing up",
    "refused-state": "a state that cannot be kept is refused by name, and later saves work",
    "dead-writer": "a writer process that dies fails the save by name, and the next save works",
    "one-dead-writer": "a save that one rank has lost is not committed, and the next save works",
    "abort-ends-processes": "close(abort=True) ends every process of the writer",
    "close-waits": "close returns when the save in flight is committed, and leaves no process",
    "full-disk": "a full disk fails the save in words, and a smaller one works afterwards",
    "loads-native": "it loads a checkpoint of the native engine",
    "native-loads": "the native engine loads its checkpoints",
    "damage-is-found": "a changed byte is found before anything but tensors is changed",
    "other-model": "a checkpoint of another model is refused and nothing is changed",
}
_ENDS_WITH_RANK = "ends-with-its-rank"


def clauses() -> list[Clause[Ranks]]:
    """Every clause, in the order of reading."""
    found = [Clause(name, text, _everywhere(name)) for name, text in _TEXTS.items()]
    text = "no process outlives its rank by more than it takes to finish what it has"
    return [*found, Clause(_ENDS_WITH_RANK, text, _ends_with_rank)]


def verify(
    ranks: Ranks, differences: Mapping[str, str], *, only: Collection[str] | None = None
) -> list[Result]:
    """Check an engine's shard writer.

    Args:
        ranks: Who uses it. differences, only: see ``clauses.run``. Without a small disk its clause
            is left out.
    """
    wanted = {clause.name for clause in clauses()} if only is None else set(only)
    if ranks.small_disk is None:
        wanted.discard("full-disk")
    return common.run(clauses(), lambda: ranks, differences, only=wanted)


def _everywhere(name: str) -> Callable[[Ranks], None]:
    def check(ranks: Ranks) -> None:
        small = ranks.small_disk if name == "full-disk" else None
        ranks.call(name, small and small / "checkpoints")

    return check


def _ends_with_rank(ranks: Ranks) -> None:
    helpers = [pid for answer in ranks.call(_ENDS_WITH_RANK) for pid in answer.pids]
    ranks.kill_ranks()
    left = living(helpers, GONE_S)
    ranks.end()
    assert not left, f"{len(left)} of {len(helpers)} processes live {GONE_S:g} s after their rank"
