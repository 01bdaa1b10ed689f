"""The rank numbers of a job and the processes that have them, as the coordinator sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Member:
    """One rank number and the process that has it.

    ``state``: absent (needs a process), starting, joined (ready for the next round), running (in
    a round, or still leaving an aborted one), returned (its ``main`` did), gone (process ended).
    ``since`` is when the state began. ``told``: this process has reported an exception of its own
    in this round. ``seqs`` and ``step`` are its collective sequence numbers and its step
    at the last abort.
    """

    inc: int = -1
    pid: int = 0
    state: str = "absent"
    since: float = 0.0
    stepped: bool = False
    told: bool = False
    saving: int = 0
    seqs: dict[str, int] | None = None
    step: int | None = None


class Members:
    """All ranks of a world."""

    def __init__(self, world: int) -> None:
        self._members = [Member() for _ in range(world)]

    def __iter__(self) -> Iterator[tuple[int, Member]]:
        return iter(enumerate(self._members))

    def __getitem__(self, rank: int) -> Member:
        return self._members[rank]

    def put(self, rank: int, member: Member) -> None:
        """A new process has the number."""
        self._members[rank] = member

    def find(self, rank: int, inc: int) -> Member | None:
        """The member, if the message about it is of its present incarnation."""
        known = 0 <= rank < len(self._members) and self._members[rank].inc == inc
        return self._members[rank] if known else None

    def all_are(self, *states: str) -> bool:
        """Whether every member is in one of ``states``."""
        return all(member.state in states for member in self._members)

    def those(self, *states: str) -> list[int]:
        """Ranks in one of ``states``."""
        return [rank for rank, member in self if member.state in states]

    def pids(self) -> dict[str, int]:
        """Process id by rank."""
        return {str(rank): member.pid for rank, member in self}

    def seqs(self) -> dict[int, dict[str, int]]:
        """Sequence numbers at the abort, of the ranks that told them."""
        return {rank: member.seqs for rank, member in self if member.seqs}
