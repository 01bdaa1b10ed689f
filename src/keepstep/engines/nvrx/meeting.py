"""Where ranks meet under NVRx: prefixes of the store that ``keepstep run`` hosts outside of them.

A prefix names the launcher's cycle (by MASTER_ADDR and MASTER_PORT, which the launcher renews with
the ranks) and the Wrapper's iteration in it: what an older cycle left is never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from keepstep.config import env
from keepstep.errors import UsageError
from keepstep.rank.round_groups import Meeting

_ROUNDS = "keepstep/rounds"
_ROUND = "keepstep/round"
_CONNECT_S = 60.0


class OutsideStore:
    """Makes the store class that ``inprocess.Wrapper`` is to use.

    NVRx's own mixin comes first: ``torch.distributed.Store`` has had a ``barrier`` of its own since
    torch 2.13, and in NVRx's order it hides NVRx's.
    """

    @staticmethod
    def of(mixin: Any) -> Any:
        """A class of ``mixin`` and torch's PrefixStore; arguments as ``Turn.store_arguments``."""

        def init(self: Any, host: str, port: int, prefix: str, timeout_s: float) -> None:
            dist.PrefixStore.__init__(  # type: ignore[attr-defined]
                self, prefix, connect(host, port, timeout_s)
            )

        return type(
            "OutsideStore",
            (mixin, dist.PrefixStore),  # type: ignore[attr-defined]
            {"__init__": init},
        )


def connect(host: str, port: int, timeout_s: float) -> Any:
    """A client of the store outside the ranks; waits up to ``timeout_s`` seconds in each call."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


@dataclass(slots=True)
class Turn:
    """Which turn of which cycle a rank is in. ``address`` is HOST:PORT of the store."""

    address: str
    pg_timeout_s: float
    iteration: int = 0
    aborted: bool = False
    """Set before the groups are aborted: whoever is on the way into the turn turns back."""
    round: int = 0
    """Number of the turn's round in the run; known once ``meeting`` has returned."""
    store: Any = None
    """Client of the store outside the ranks, from ``meeting`` until the turn is left."""

    @property
    def cycle(self) -> str:
        """What tells this cycle of the launcher from the others."""
        return f"{env.read('MASTER_ADDR')}:{env.read('MASTER_PORT')}"

    def host_and_port(self) -> tuple[str, int]:
        """The store's address taken apart.

        Raises:
            UsageError: it is none.
        """
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal():
            raise UsageError(f"{self.address!r} is no HOST:PORT of a store")
        return host.strip("[]"), int(port)

    def store_arguments(self) -> dict[str, Any]:
        """For the Wrapper's store factory."""
        host, port = self.host_and_port()
        return {
            "host": host,
            "port": port,
            "prefix": f"nvrx/{self.cycle}",
            "timeout_s": _CONNECT_S,
        }


def meeting(turn: Turn) -> Meeting:
    """The store of the turn's process groups; sets ``turn.round``. All ranks of a turn call it.

    Raises:
        RuntimeError: the turn was aborted, or the store is gone.
    """
    host, port = turn.host_and_port()
    store = connect(host, port, turn.pg_timeout_s)
    if turn.aborted:  # the abort may have looked for sockets before this one was there
        raise RuntimeError("the round was aborted")
    turn.store = store
    prefix = f"round/{turn.cycle}/{turn.iteration}"
    own = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    if env.read("RANK") == "0":
        own.set(_ROUND, str(store.add(_ROUNDS, 1)))
    turn.round = int(own.get(_ROUND))
    return Meeting(own, lambda: None)
