"""Messages between agent, ranks, zygote, writer and coordinator.

Tagged msgspec structs, decoded strictly; unknown tags and fields of the wrong type are errors.
``inc`` is the incarnation of a rank number: a message of an older one is dropped by the receiver.
Times are CLOCK_MONOTONIC seconds of the node unless they say ``wall``.
"""

from __future__ import annotations

import msgspec

from keepstep.wire.types import Version

PROTOCOL = 1


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""


# --- agent -> zygote, zygote -> agent ------------------------------------------------------------


class Spawn(Message):
    """Make a parked process (four descriptors follow: control socket, board, stdout, stderr)."""

    ticket: int


class ZygoteReady(Message):
    """Preloading is done. ``threads`` above 1 means that forking is not safe."""

    pid: int
    threads: int
    error: str = ""


class Spawned(Message):
    """Answer to Spawn ``ticket``."""

    ticket: int
    pid: int


class ChildExited(Message):
    """``status`` as of waitpid; ``t`` when it was seen."""

    pid: int
    status: int
    t: float


class KillTree(Message):
    """End a rank's process, its group and all its descendants."""

    pid: int


# --- agent -> rank ------------------------------------------------------------------------------


class Start(Message):
    """A parked process becomes a rank: environment, command line, and settings as JSON."""

    run: str
    rank: int
    local_rank: int
    world: int
    local_world: int
    node: int
    inc: int
    round: int
    env: dict[str, str]
    mode: str
    target: str
    args: list[str]
    config: bytes
    run_dir: str


class Attach(Message):
    """What a rank of another launcher must know, in the variable ``ATTACH_VARIABLE`` as JSON.

    ``boards`` are the paths of the node's boards by local rank, ``store`` is HOST:PORT of the store
    outside the ranks; ``mode`` and ``target`` say what to run.
    """

    run: str
    run_dir: str
    log_dir: str
    node: int
    boards: list[str]
    store: str
    config: bytes
    mode: str
    target: str


class Go(Message):
    """All ranks joined round ``round``; resume from ``resume`` (0: from the start).

    ``folder`` is the checkpoint's folder name, empty with ``resume`` 0.
    """

    term: int
    round: int
    resume: int
    folder: str


class Abort(Message):
    """Leave round ``round`` at once."""

    round: int
    reason: str


class StopAt(Message):
    """Stop after completing ``step``; with ``final`` everybody has agreed."""

    step: int
    final: bool


class Finish(Message):
    """Every rank returned and the last save is settled: leave the round for good.

    ``exit_code`` is what the process ends with where it is not 0.
    """

    exit_code: int


class SlotGrant(Message):
    """A staging slot (one descriptor follows) of ``size`` bytes, one of ``of`` that are granted."""

    slot: int
    size: int
    of: int = 1


class SlotFree(Message):
    """The slot's bytes are durable, or the save was given up."""

    slot: int


class SaveResult(Message):
    """The save of ``step`` is committed (``error`` empty) or failed."""

    step: int
    error: str


class SaveAnswer(Message):
    """Answer to SaveAsk: ``reason`` is empty if the save may begin, else says why it is skipped."""

    round: int
    step: int
    reason: str


class SlotsDenied(Message):
    """Answer to SlotWanted: the node has no memory for the slots; ``error`` says so in numbers."""

    error: str


class StoreReply(Message):
    """Answer to StoreCall ``id``; ``error`` is empty when it worked."""

    id: int
    values: list[bytes] = []
    number: int = 0
    error: str = ""


# --- rank -> agent -------------------------------------------------------------------------------


class Hello(Message):
    """The process is parked and can become a rank. ``protocol`` must match."""

    pid: int
    protocol: int = PROTOCOL


class Join(Message):
    """The rank has left the old round and is ready for the next one.

    ``seqs`` are the collective sequence numbers at the abort, by group; ``step`` is the step that
    was in progress then.
    """

    inc: int
    after_round: int
    step: int = 0
    seqs: dict[str, int] = {}


class Failed(Message):
    """The rank's own code failed. ``failure`` is exception, timeout, peer_lost, checkpoint or save.

    ``fatal`` is the exit code where a restart cannot help, else 0.
    """

    inc: int
    round: int
    failure: str
    error: str
    location: str
    step: int
    t: float
    stack: str = ""
    fatal: int = 0
    fresh: bool = False
    seqs: dict[str, int] = {}


class Returned(Message):
    """``main`` returned in ``round`` after completing ``step``; the last save asked for is
    ``saving`` (0: none)."""

    inc: int
    round: int
    step: int
    saving: int


class StopAck(Message):
    """Answer to StopAt: ``live`` is the step in progress."""

    inc: int
    step: int
    live: int


class SlotWanted(Message):
    """The rank wants ``count`` staging slots of ``size`` bytes."""

    inc: int
    size: int
    count: int


class Staged(Message):
    """Slot ``slot`` holds the shard of ``version`` as a whole file image of ``size`` bytes."""

    inc: int
    slot: int
    size: int
    version: Version
    t: float


class Unstaged(Message):
    """The copy for the save of ``version`` failed on this rank: the save cannot be committed."""

    inc: int
    version: Version
    error: str


class SaveAsk(Message):
    """May the save that is due at ``step`` of ``round`` begin? Every rank asks and all get the same
    answer, which is taken when the first one asks."""

    inc: int
    round: int
    step: int


class StoreCall(Message):
    """One operation of torch's store in ``round``."""

    id: int
    inc: int
    round: int
    op: str
    keys: list[str] = []
    values: list[bytes] = []
    number: int = 0
    timeout_s: float = 0.0


# --- agent -> writer, writer -> agent ------------------------------------------------------------


class WriteShard(Message):
    """Write a file image (one descriptor follows) as ``rank``'s shard of ``version``.

    With ``commit`` the writer itself waits for all receipts and publishes (no coordinator), unless
    the lease of this number (0: none) is lost.
    """

    ticket: int
    rank: int
    size: int
    version: Version
    root: str
    commit: bool = False
    keep_last: int = 0
    keep_every_steps: int = 0
    retries: int = 0
    lease: int = 0


class ShardWritten(Message):
    """The shard and its receipt are durable; ``folder`` is the folder's name under ``root``."""

    ticket: int
    rank: int
    version: Version
    folder: str
    bytes: int
    write_s: float


class ShardRetry(Message):
    """Storage refused the shard for the ``attempt``-th time, counted from 1; it is tried again.

    ShardWritten or ShardFailed follows.
    """

    ticket: int
    rank: int
    version: Version
    error: str
    attempt: int


class ShardFailed(Message):
    """The shard could not be written; nothing was committed."""

    ticket: int
    rank: int
    version: Version
    error: str


class Committed(Message):
    """The manifest of ``version`` is published (``error`` empty) or was refused."""

    version: Version
    folder: str
    bytes: int
    error: str = ""


# --- lease process -> who saves into a folder ----------------------------------------------------


class LeaseNews(Message):
    """About the lease of a folder: ``kind`` is held (as ``number``), waiting (for a sign of life of
    another holder), refused (another job has it), failed (by storage) or lost (to ``number``).

    ``text`` is for people; refused and failed have the four parts of an error in ``parts``.
    """

    kind: str
    number: int = 0
    text: str = ""
    parts: tuple[str, str, str, str] = ("", "", "", "")


# --- agent -> coordinator -----------------------------------------------------------------------


class AgentHello(Message):
    """An agent with ``local_world`` ranks joins the job."""

    node: int
    local_world: int
    protocol: int = PROTOCOL


class Ping(Message):
    """Whether the coordinator still answers; it does with a Pong of the same number."""

    number: int


class RankUp(Message):
    """A process was given ``rank``."""

    rank: int
    inc: int
    pid: int


class RankEvent(Message):
    """A rank's Join, Failed, Returned, StopAck or SaveAsk, passed on."""

    rank: int
    body: Join | Failed | Returned | StopAck | SaveAsk


class RankDown(Message):
    """A rank's process ended. ``by_us``: ended by the agent after a Kill."""

    rank: int
    inc: int
    code: int
    oom: bool
    by_us: bool
    step: int
    t: float


class Evidence(Message):
    """How one rank looked when somebody was found stalled.

    ``seq`` counts the collectives that it entered over all groups, ``seqs`` by group.
    """

    rank: int
    inc: int
    idle_s: float
    limit_s: float
    beat_age_s: float
    state: str
    phase: str
    step: int
    seq: int
    seqs: dict[str, int] = {}
    stack: str = ""


class Stalled(Message):
    """At least one rank made no progress beyond its limit."""

    ranks: list[Evidence]


class Stepped(Message):
    """``rank`` completed its first step of ``round``."""

    rank: int
    inc: int
    round: int
    step: int


class ShardDone(Message):
    """A shard is durable (``error`` empty) or failed; ``live`` is the newest step begun."""

    rank: int
    version: Version
    folder: str
    bytes: int
    error: str = ""


class SaveBegun(Message):
    """A rank staged its shard of ``version``."""

    rank: int
    version: Version


class SlotsMade(Message):
    """``slots`` staging slots of ``size`` bytes were granted to ``rank``."""

    rank: int
    slots: int
    size: int


class StopRequest(Message):
    """SIGTERM or Ctrl-C; ``live`` is the newest step in progress on this node."""

    signal: str
    live: int


class StoreForward(Message):
    """A rank's StoreCall, passed on."""

    rank: int
    call: StoreCall


# --- coordinator -> agent -----------------------------------------------------------------------


class ToRank(Message):
    """Pass ``body`` on to ``rank`` if its incarnation is still ``inc``."""

    rank: int
    inc: int
    body: Go | Abort | StopAt | Finish | SaveAnswer | SaveResult | StoreReply


class Replace(Message):
    """End what is left of ``rank`` and give its number to another process, for ``round``.

    ``reason`` is for people. Answered by RankUp (and RankDown first, if it still lived).
    """

    rank: int
    inc: int
    round: int
    reason: str


class Kill(Message):
    """End ``rank``'s process; answered by RankDown."""

    rank: int
    inc: int
    reason: str


class Notice(Message):
    """One line for people: ``kind`` restart, ready, commit, fail, skip, stop."""

    kind: str
    text: str
    step: int = 0


class Pong(Message):
    """Answer to Ping."""

    number: int


class JobEnd(Message):
    """The job is over: end all ranks (those that got Finish may leave by themselves first)."""

    exit_code: int
    reason: str
    graceful: bool


TO_ZYGOTE = Spawn | KillTree
FROM_ZYGOTE = ZygoteReady | Spawned | ChildExited
TO_RANK = (
    Start
    | Go
    | Abort
    | StopAt
    | Finish
    | SlotGrant
    | SlotsDenied
    | SlotFree
    | SaveAnswer
    | SaveResult
    | StoreReply
)
FROM_RANK = (
    Hello
    | Join
    | Failed
    | Returned
    | StopAck
    | SlotWanted
    | Staged
    | Unstaged
    | SaveAsk
    | StoreCall
)
TO_WRITER = WriteShard
FROM_LEASE = LeaseNews
FROM_WRITER = ShardWritten | ShardRetry | ShardFailed | Committed
TO_COORDINATOR = (
    AgentHello
    | Ping
    | RankUp
    | RankEvent
    | RankDown
    | Stalled
    | Stepped
    | ShardDone
    | SaveBegun
    | SlotsMade
    | StopRequest
    | StoreForward
)
FROM_COORDINATOR = ToRank | Replace | Kill | Notice | Pong | JobEnd
