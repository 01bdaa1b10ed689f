"""What every ``ports.Restarter`` must do, seen in whole runs of ``keepstep run``. Runs in tests.

A run of the probe (``torch_probe``) fails as its plan says and writes down what its ranks see; the
clauses read that. A run is made when a clause first asks for it, and kept for the others.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from keepstep.errors import ExitCode
from keepstep.testing.conformance import clauses as common
from keepstep.testing.conformance.clauses import Clause, Result
from keepstep.testing.conformance.processes import Mark, living, tail

RUN_LIMIT_S = 90.0
"""How long a run may take: less than a collective, so that a rank that is not freed is found."""
COLLECTIVE_LIMIT_S = 600.0
GONE_S = 5.0
EXIT_CODE = 7
"""With what the probe leaves where it is told to exit."""
RECORDS = "records.jsonl"
_PROBE = Path(__file__).with_name("torch_probe.py")
_ENTRY = "import sys; from keepstep.cli.main import main; sys.exit(main())"

Kind = Literal["begin", "waits", "fault", "unwound", "result"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What ``rank`` does to itself: once in a run, or in each attempt (``always``)."""

    rank: int
    kind: Literal["exception", "usage", "exit", "kill"]
    always: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of a run, in their order."""

    faults: list[Fault]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has written down.

    ``kind``: an attempt begins or is unwound, the rank is about to wait for another that fails, is
    about to fail, or has the run's result (``text``). ``attempt`` counts in its process. With
    ``begin`` come size and rank as the process group has them, the first random numbers, and how
    many objects of the attempt before are still there.
    """

    kind: Kind
    rank: int
    pid: int
    attempt: int
    round: int = 0
    size: int = 0
    group_rank: int = 0
    random: list[float] = []
    alive: int = 0
    text: str = ""


def read(folder: Path) -> list[Record]:
    """All records so far, in the order in which they were written."""
    try:
        lines = (folder / RECORDS).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=Record) for line in lines]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that is over: exit code, records, and the end of what it wrote to its output."""

    code: int
    records: list[Record]
    said: str
    left: int
    """Processes that were still there when it had ended."""

    def begins(self) -> dict[int, list[Record]]:
        """By rank, the attempts that its processes began."""
        found: dict[int, list[Record]] = defaultdict(list)
        for record in self.records:
            if record.kind == "begin":
                found[record.rank].append(record)
        return found

    def must(self, true: bool, sentence: str) -> None:
        """Raise an AssertionError with what the run has said, unless ``true``."""
        if not true:
            raise AssertionError(f"{sentence} (exit code {self.code})\n{self.said}")


class Runs:
    """Runs of the probe under one engine.

    Args:
        flags: Of ``keepstep run``, which choose the engine.
        folder: For everything that the runs write. world: Number of ranks, at least 2.
    """

    def __init__(self, flags: Sequence[str], folder: Path, *, world: int = 2) -> None:
        self._flags, self._folder = list(flags), folder
        self.world = world
        self._done: dict[str, Outcome] = {}

    @property
    def last(self) -> int:
        """The rank that fails where it is not rank 0."""
        return self.world - 1

    def exceptions(self) -> Outcome:
        """An exception on the last rank, then one on rank 0."""
        kinds = [Fault(rank=rank, kind="exception") for rank in (self.last, 0)]
        return self._run("exceptions", kinds)

    def killed(self, rank: int) -> Outcome:
        """SIGKILL of ``rank``."""
        return self._run(f"killed-{rank}", [Fault(rank=rank, kind="kill")])

    def wrong_use(self) -> Outcome:
        """The script's own use of keepstep is wrong, on every rank in the same way."""
        return self._run("wrong-use", [Fault(rank=0, kind="usage", always=True)])

    def exits(self) -> Outcome:
        """``sys.exit`` in each attempt, where one restart is allowed."""
        faults = [Fault(rank=self.last, kind="exit", always=True)]
        return self._run("exits", faults, "--set", "restart.max_restarts=1")

    def all(self) -> dict[str, Outcome]:
        """Every run that there is by now."""
        return dict(self._done)

    def _run(self, name: str, faults: Sequence[Fault], *flags: str) -> Outcome:
        if name not in self._done:
            self._done[name] = self._fresh(self._folder / name, Plan(faults=list(faults)), flags)
        return self._done[name]

    def _fresh(self, folder: Path, plan: Plan, flags: Sequence[str]) -> Outcome:
        folder.mkdir(parents=True)
        log, mark = folder / "output", Mark()
        command = [
            *(sys.executable, "-c", _ENTRY, "run"),
            *("--nproc-per-node", str(self.world), "--run-dir", str(folder / "run")),
            *("--set", f"restart.pg_timeout_s={COLLECTIVE_LIMIT_S:g}"),
            *self._flags,
            *flags,
            *(str(_PROBE), str(folder), msgspec.json.encode(plan).decode()),
        ]
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=mark.environment({}),
                    cwd=folder,
                    start_new_session=True,
                )
            try:
                code = process.wait(RUN_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                text = f"the run was not over after {RUN_LIMIT_S:g} s\n{tail(log)}"
                return Outcome(-1, read(folder), text, 0)
            left = living(mark.pids(), GONE_S)
            return Outcome(code, read(folder), tail(log), len(left))
        finally:
            mark.kill()


def clauses() -> list[Clause[Runs]]:
    """Every clause, in the order of reading."""
    return [
        Clause("attempt-again", "after an exception in one rank all ranks begin again", _again),
        Clause("restart-in-process", "after an exception every rank keeps its process", _same),
        Clause("higher-round", "each attempt has a higher round, the same on all ranks", _rounds),
        Clause("same-world", "rank and world size are the same in every attempt", _world),
        Clause("blocked-rank", "a rank that waits in a collective is freed at once", _freed),
        Clause("unwound", "finally blocks of an attempt run before the next begins", _unwound),
        Clause("random-state", "every attempt in a process begins with equal generators", _random),
        Clause("model-freed", "what an attempt made is freed before the next begins", _freed_model),
        Clause("result", "what main returns is run's result, and the run ends with 0", _result),
        Clause("rank-0-killed", "SIGKILL of rank 0: it goes on with all ranks", _killed_first),
        Clause("rank-killed", "SIGKILL of another: it goes on with all ranks", _killed_last),
        Clause("survivors-keep-process", "who was not killed keeps its process", _survivors),
        Clause("wrong-use", "wrong use ends the run with 64, without a restart", _wrong_use),
        Clause("repeated-exit", "an exit that comes again ends with keepstep's code", _exits),
        Clause("threads-live", "no thread of a rank ends with an exception", _threads),
        Clause("nothing-left", "no process is left when a run has ended", _nothing_left),
    ]


def verify(
    runs: Runs, differences: Mapping[str, str], *, only: Collection[str] | None = None
) -> list[Result]:
    """Check an engine's restarter.

    Args:
        runs: How it is started. differences, only: see ``clauses.run``.
    """
    return common.run(clauses(), lambda: runs, differences, only=only)


def _again(runs: Runs) -> None:
    outcome = runs.exceptions()
    begins = outcome.begins()
    for rank in range(runs.world):
        count = len(begins[rank])
        outcome.must(count >= 3, f"rank {rank} began {count} attempts, and there were two faults")


def _same(runs: Runs) -> None:
    outcome = runs.exceptions()
    _again(runs)
    for rank, begins in outcome.begins().items():
        pids = {one.pid for one in begins}
        outcome.must(len(pids) == 1, f"rank {rank} had the processes {sorted(pids)}")


def _rounds(runs: Runs) -> None:
    outcome = runs.exceptions()
    _again(runs)
    rounds = {rank: [one.round for one in begins] for rank, begins in outcome.begins().items()}
    for rank, numbers in rounds.items():
        rising = all(a < b for a, b in itertools.pairwise(numbers))
        outcome.must(rising, f"the rounds of rank {rank} are {numbers}")
        outcome.must(numbers[-1] == rounds[0][-1], f"the last rounds are not the same: {rounds}")


def _world(runs: Runs) -> None:
    outcome = runs.exceptions()
    _again(runs)
    for rank, begins in outcome.begins().items():
        found = {(one.group_rank, one.size) for one in begins}
        wanted = {(rank, runs.world)}
        outcome.must(found == wanted, f"rank {rank} was (rank, size) {found} in the process group")


def _freed(runs: Runs) -> None:
    outcome = runs.exceptions()
    waited = [one for one in outcome.records if one.kind == "waits"]
    outcome.must(bool(waited), "no rank waited for the one that failed")
    # Had a rank been freed only by the limit of its collective, the run could not be over yet.
    outcome.must(outcome.code >= 0, "a rank was not freed from its collective")
    _again(runs)


def _unwound(runs: Runs) -> None:
    outcome = runs.exceptions()
    _again(runs)
    order: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for one in outcome.records:
        if one.kind in ("begin", "unwound"):
            order[one.pid].append((one.kind, one.attempt))
    for pid, found in order.items():
        attempts = range(1, len(found) // 2 + 1)
        wanted = [(kind, number) for number in attempts for kind in ("begin", "unwound")]
        outcome.must(found == wanted, f"in process {pid} the order was {found}")


def _random(runs: Runs) -> None:
    outcome = runs.exceptions()
    _again(runs)
    by_process: dict[int, set[tuple[float, ...]]] = defaultdict(set)
    for begins in outcome.begins().values():
        for one in begins:
            by_process[one.pid].add(tuple(one.random))
    for pid, found in by_process.items():
        outcome.must(len(found) == 1, f"process {pid} drew different first numbers: {found}")


def _freed_model(runs: Runs) -> None:
    outcome = runs.exceptions()
    _again(runs)
    for rank, begins in outcome.begins().items():
        alive = [one.alive for one in begins]
        outcome.must(not any(alive), f"rank {rank} still had {alive} objects of the attempt before")


def _result(runs: Runs) -> None:
    outcome = runs.exceptions()
    _must_end_well(outcome, runs.world)


def _must_end_well(outcome: Outcome, world: int) -> None:
    results = {one.rank: one.text for one in outcome.records if one.kind == "result"}
    wanted = {rank: f"result of rank {rank}" for rank in range(world)}
    outcome.must(outcome.code == ExitCode.OK, "the run did not end with 0")
    outcome.must(results == wanted, f"the results are {results}")


def _killed_first(runs: Runs) -> None:
    _must_go_on(runs, 0)


def _killed_last(runs: Runs) -> None:
    _must_go_on(runs, runs.last)


def _must_go_on(runs: Runs, rank: int) -> None:
    outcome = runs.killed(rank)
    fired = [one.rank for one in outcome.records if one.kind == "fault"]
    outcome.must(fired == [rank], f"the faults that fired are those of the ranks {fired}")
    _must_end_well(outcome, runs.world)
    last = {one: begins[-1] for one, begins in outcome.begins().items()}
    sizes = {one: record.size for one, record in last.items()}
    wanted = dict.fromkeys(range(runs.world), runs.world)
    outcome.must(sizes == wanted, f"by rank, the world size in the last attempt was {sizes}")


def _survivors(runs: Runs) -> None:
    for killed in (0, runs.last):
        outcome = runs.killed(killed)
        outcome.must(outcome.code == ExitCode.OK, "the run did not end with 0")
        for rank, begins in outcome.begins().items():
            pids = {one.pid for one in begins}
            outcome.must(
                rank == killed or len(pids) == 1,
                f"rank {killed} was killed, and rank {rank} had the processes {sorted(pids)}",
            )


def _wrong_use(runs: Runs) -> None:
    outcome = runs.wrong_use()
    outcome.must(outcome.code == ExitCode.USAGE, "wrong use did not end the run with 64")
    counts = {rank: len(begins) for rank, begins in outcome.begins().items()}
    outcome.must(set(counts.values()) == {1}, f"attempts by rank: {counts}")


def _exits(runs: Runs) -> None:
    outcome = runs.exits()
    wanted = (ExitCode.RESTARTS_EXHAUSTED, ExitCode.SCRIPT_FAILED)
    outcome.must(
        outcome.code in wanted, f"a script that exits with {EXIT_CODE} each time ended otherwise"
    )
    fired = sum(one.kind == "fault" for one in outcome.records)
    outcome.must(fired == 2, f"the script left {fired} times, and one restart was allowed")


def _threads(runs: Runs) -> None:
    runs.exceptions()
    for name, outcome in runs.all().items():
        outcome.must("Exception in thread " not in outcome.said, f"a thread died in the run {name}")


def _nothing_left(runs: Runs) -> None:
    runs.exceptions()
    for name, outcome in runs.all().items():
        outcome.must(outcome.left == 0, f"{outcome.left} processes are left of the run {name}")
