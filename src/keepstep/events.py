"""Events: what every process writes down about itself, and how it is read back.

One JSON object a line, one file per process incarnation
(``events/<src>-<rank or node>-<start>-<pid>.jsonl``), with a fixed head
``v run src node rank world round t mono seq kind step`` and the rest in ``data``.
``t`` is wall time in seconds; ``mono`` orders and measures inside one node.
``rank`` is absent (never 0) where a process has no rank. Whatever can be killed half-way has a
``begin`` and an ``end``. Kinds are a closed list: the recorder accepts no others, the reader keeps
kinds it does not know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import msgspec

from keepstep.clock import SYSTEM, Clock

VERSION = 1
KINDS: dict[str, type[EventData]] = {}


class EventData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the ``data`` part of an event; ``kind`` names it on disk."""

    kind: ClassVar[str] = ""


def _kind(name: str) -> Callable[[type[EventData]], type[EventData]]:
    def register(cls: type[EventData]) -> type[EventData]:
        cls.kind = name
        KINDS[name] = cls
        return cls

    return register


# --- the run: written by the agent -----------------------------------------------------------


@_kind("run.begin")
class RunBegin(EventData):
    """The launcher started. ``argv`` is the command line, ``engine`` the engine's name."""

    argv: list[str]
    engine: str
    world: int
    version: str


@_kind("run.end")
class RunEnd(EventData):
    """The launcher is about to exit with ``exit_code``; ``reason`` is one sentence."""

    exit_code: int
    reason: str


@_kind("node.begin")
class NodeBegin(EventData):
    """An agent is up; ``pid`` is its process, ``local_world`` its number of ranks."""

    pid: int
    local_world: int


# --- rounds and restarts: written by the coordinator ---------------------------------------------


@_kind("round.begin")
class RoundBegin(EventData):
    """Ranks may now join the round named in the head."""

    reason: str


@_kind("round.ready")
class RoundReady(EventData):
    """All ranks joined and were told to go. ``pids`` by rank; ``resume`` is the step resumed from
    (0: from the start)."""

    pids: dict[str, int]
    resume: int


@_kind("restart.begin")
class RestartBegin(EventData):
    """A failure was seen and the ranks are being freed. Written at the first evidence.

    ``t`` in the head is when the coordinator knew. The round in the head is the one that failed.
    """

    first_kind: str


@_kind("restart.cause")
class RestartCause(EventData):
    """What the failure was found to be, and what is done about it.

    ``cause`` is one of exception, timeout, peer_lost, killed, oom, exit, hang, checkpoint, unknown.
    ``guilty`` is the rank (-1: nobody is blamed), ``step`` the step in which it failed (nobody is
    blamed: the oldest step that a rank which reported was in), ``level`` kept, rerun, rank,
    respawn, node or stop. ``consequences`` are ranks that failed because of it.
    """

    cause: str
    guilty: int
    step: int
    level: str
    reason: str
    line: str
    consequences: list[int] = []
    stack: str = ""


@_kind("restart.end")
class RestartEnd(EventData):
    """Every rank of the new round (in the head) has completed a step."""

    resume: int
    first_step: int


# --- ranks: exits and starts written by the agent, the rest by the rank --------------------------


@_kind("rank.start")
class RankStart(EventData):
    """A process got a rank number. ``method`` is fork or spawn, or exec where another launcher
    started it; ``spare`` is whether it was parked."""

    pid: int
    incarnation: int
    method: str
    spare: bool


@_kind("rank.exit")
class RankExit(EventData):
    """A rank's process ended. ``code`` is the exit code (-N: by signal N), ``oom`` whether the
    kernel killed it for memory, ``by_us`` whether keepstep or the launcher ended it. ``seen`` is
    whether the code could be read: where the launcher alone saw it, ``code`` is 0."""

    pid: int
    incarnation: int
    code: int
    oom: bool = False
    by_us: bool = False
    seen: bool = True


@_kind("rank.suspect")
class RankSuspect(EventData):
    """No progress for ``idle_s`` seconds in ``phase``; nothing is done yet."""

    idle_s: float
    limit_s: float
    phase: str


@_kind("rank.hung")
class RankHung(EventData):
    """No progress beyond the learned limit; the rank is ended. ``stack`` where it stood."""

    idle_s: float
    limit_s: float
    phase: str
    evidence: str
    stack: str = ""


@_kind("rank.beat")
class RankBeat(EventData):
    """The longest time without progress since the last such event, where another launcher limits
    it: ``limit_s`` is what that launcher allows in ``section`` (step, section:NAME, a phase)."""

    age_s: float
    limit_s: float
    section: str


@_kind("rank.failed")
class RankFailed(EventData):
    """The rank's own code failed: ``failure`` is exception, timeout, peer_lost or checkpoint.

    The rest is there where no coordinator is told otherwise: ``fatal`` is an exit code where a
    restart cannot help, ``fresh`` as in ``policy.Report``, ``seqs`` collectives entered by group.
    """

    failure: str
    error: str
    location: str
    stack: str = ""
    fatal: int = 0
    fresh: bool = False
    seqs: dict[str, int] = {}


@_kind("rank.joined")
class RankJoined(EventData):
    """The rank is ready for the next round (the one in the head)."""

    pid: int


@_kind("rank.left")
class RankLeft(EventData):
    """The rank has left the round in the head after a failure in it, and its process lives."""


@_kind("step.end")
class StepEnd(EventData):
    """The step in the head is completed; ``s`` is its length in seconds."""

    s: float
    loss: float | None = None


@_kind("section.begin")
class SectionBegin(EventData):
    """``name`` has its own learned limit and goodput category."""

    name: str


@_kind("section.end")
class SectionEnd(EventData):
    """End of section ``name`` after ``s`` seconds."""

    name: str
    s: float


# --- checkpoints: staged by the rank, written by the agent's writer, committed by the coordinator


@_kind("checkpoint.begin")
class CheckpointBegin(EventData):
    """A rank starts to copy its state of the step in the head."""


@_kind("checkpoint.staged")
class CheckpointStaged(EventData):
    """The next step may begin. ``stall_s`` is how long training stood still; of ``bytes`` what only
    an optimizer changes may still be copied."""

    stall_s: float
    bytes: int


@_kind("checkpoint.copied")
class CheckpointCopied(EventData):
    """The copy of the step in the head is complete and handed over to be written.

    ``mode`` is overlap or blocking, ``reason`` why. ``copy_s`` from its begin; for ``waited_s`` of
    that an optimizer was held back.
    """

    mode: str
    reason: str
    copy_s: float
    waited_s: float
    bytes: int


@_kind("checkpoint.shard")
class CheckpointShard(EventData):
    """A rank's shard is durable. ``write_s`` from hand-over to the end of fsync."""

    bytes: int
    write_s: float


@_kind("checkpoint.commit")
class CheckpointCommit(EventData):
    """The manifest is published and durable. ``save_s`` from the first staged shard."""

    folder: str
    bytes: int
    save_s: float


@_kind("checkpoint.fail")
class CheckpointFail(EventData):
    """The save of the step in the head did not commit."""

    error: str


@_kind("checkpoint.skip")
class CheckpointSkip(EventData):
    """The save that was due at the step in the head was not begun; ``reason`` says why."""

    reason: str


@_kind("checkpoint.retry")
class CheckpointRetry(EventData):
    """Storage refused a rank's shard for the ``attempt``-th time; it is tried again."""

    error: str
    attempt: int


@_kind("checkpoint.memory")
class CheckpointMemory(EventData):
    """A rank was granted ``slots`` staging slots of ``slot_bytes`` each; ``available_bytes`` were
    there before, in the tightest of the machine and the memory cgroups."""

    slots: int
    slot_bytes: int
    available_bytes: int


@_kind("checkpoint.unusable")
class CheckpointUnusable(EventData):
    """A committed checkpoint was refused while loading; the next older one is taken."""

    folder: str
    error: str


@_kind("restore.begin")
class RestoreBegin(EventData):
    """A rank starts to load the step in the head from ``tier`` (storage, memory, peer)."""

    tier: str


@_kind("restore.end")
class RestoreEnd(EventData):
    """State of the step in the head is in place; ``bytes`` were read."""

    tier: str
    s: float
    bytes: int


@_kind("storage.rated")
class StorageRated(EventData):
    """How long a save of ``bytes`` takes at the rated speed of the file system, in 10^6 bytes a
    second; written at the first save (in the head)."""

    file_system: str
    mb_s: float
    bytes: int
    save_s: float


@_kind("storage.stalled")
class StorageStalled(EventData):
    """Storage took nothing of ``process`` (writer, commit, coordinator) for ``idle_s`` seconds;
    ``state`` is the process's in /proc (D: blocked in the kernel)."""

    process: str
    pid: int
    state: str
    idle_s: float


@_kind("storage.moves")
class StorageMoves(EventData):
    """Storage goes on: it took nothing of ``process`` for ``idle_s`` seconds."""

    process: str
    idle_s: float


# --- faults, health, stopping --------------------------------------------------------------------


@_kind("fault.injected")
class FaultInjected(EventData):
    """A drill's fault fires now, at the step in the head. ``fault`` is its kind, ``index`` its
    place in the plan."""

    fault: str
    index: int


@_kind("health.finding")
class HealthFinding(EventData):
    """Result of a health check: ``status`` is ok, bad or absent (not present is never healthy)."""

    check: str
    status: str
    detail: str


@_kind("stop.notice")
class StopNotice(EventData):
    """SIGTERM or Ctrl-C: the run is asked to stop."""

    signal: str


# --- writing and reading -------------------------------------------------------------------------


class Event(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of an event file."""

    v: int
    run: str
    src: str
    node: int
    t: float
    mono: float
    seq: int
    kind: str
    rank: int | None = None
    world: int | None = None
    round: int | None = None
    step: int | None = None
    data: dict[str, object] = {}


class Recorder:
    """Turns typed data into numbered, stamped lines and hands them to ``sink``.

    Thread-safe. The sink must not block: ranks write into shared memory, agents into a queue.

    Args:
        sink: Gets one encoded line, newline included.
        run: Run id. src: rank, agent or coordinator. node: node rank.
        clock: Where time comes from.
    """

    def __init__(
        self,
        sink: Callable[[bytes], object],
        *,
        run: str,
        src: str,
        node: int = 0,
        rank: int | None = None,
        world: int | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._sink = sink
        self._clock = clock
        self._lock = threading.Lock()
        self._encoder = msgspec.json.Encoder()
        self._seq = 0
        self.run, self.src, self.node, self.rank, self.world = run, src, node, rank, world
        self.round: int | None = None

    def emit(
        self,
        data: EventData,
        *,
        step: int | None = None,
        rank: int | None = None,
        round: int | None = None,
        t: float | None = None,
    ) -> None:
        """Record ``data``. ``rank`` and ``round`` default to the recorder's own.

        Raises:
            ValueError: ``data`` is not of a registered kind.
        """
        if KINDS.get(data.kind) is not type(data):
            raise ValueError(f"{type(data).__name__} is not a registered event kind")
        with self._lock:
            self._seq += 1
            event = Event(
                v=VERSION,
                run=self.run,
                src=self.src,
                node=self.node,
                t=self._clock.wall() if t is None else t,
                mono=self._clock.mono(),
                seq=self._seq,
                kind=data.kind,
                rank=self.rank if rank is None else rank,
                world=self.world,
                round=self.round if round is None else round,
                step=step,
                data=msgspec.to_builtins(data),
            )
            self._sink(self._encoder.encode(event) + b"\n")


class Damage(msgspec.Struct, frozen=True):
    """A line of an event file that was passed over: ``line`` counts from 1, ``error`` says why."""

    path: Path
    line: int
    error: str


class Reading(msgspec.Struct, frozen=True):
    """All events of a run in time order, and the lines that could not be read."""

    events: list[Event]
    damaged: list[Damage]


def read_file(path: Path, damaged: list[Damage] | None = None) -> Iterator[Event]:
    """Yield the events of one file.

    A last line cut off by a kill is left out. A damaged line before it (a full disk, a storage
    fault) is passed over, so that it does not hide the rest of the run.

    Args:
        path: The file.
        damaged: Gets what was passed over, in order.

    Raises:
        OSError: the file cannot be read.
    """
    decoder = msgspec.json.Decoder(Event)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                event = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if damaged is not None:
                    damaged.append(Damage(path, number, str(error)))
                continue
            yield event


def read_run(run_dir: Path) -> Reading:
    """All events of a run in time order (wall time, then process, then sequence number).

    Raises:
        OSError: a file cannot be read.
    """
    damaged: list[Damage] = []
    files = sorted((run_dir / "events").glob("*.jsonl"))
    events = [event for path in files for event in read_file(path, damaged)]
    events.sort(key=lambda event: (event.t, event.src, event.rank or 0, event.seq))
    return Reading(events, damaged)


def read(run_dir: Path) -> list[Event]:
    """The events of ``read_run``, for callers that do not ask for damaged lines.

    Raises:
        OSError: a file cannot be read.
    """
    return read_run(run_dir).events


def data_of(event: Event) -> EventData | None:
    """The typed data of an event, or None for a kind this version does not know."""
    cls = KINDS.get(event.kind)
    return None if cls is None else msgspec.convert(event.data, cls)
