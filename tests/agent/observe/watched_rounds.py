"""Ranks of another launcher for tests of rounds: time is given, nothing runs."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import msgspec

from keepstep import events as ev
from keepstep import shm
from keepstep.agent.observe.rounds import Rounds
from keepstep.agent.observe.seats import Occupant
from keepstep.agent.observe.state import State
from keepstep.config import Config
from keepstep.config.settings import EngineSettings, RestartSettings
from keepstep.events import Event, EventData
from keepstep.shm import Phase
from keepstep.wire.messages import Evidence, JobEnd, Notice, Stalled

FAILED = ev.RankFailed(failure="exception", error="ValueError: x", location="t.py:1", fresh=True)
LOST = ev.RankFailed(failure="peer_lost", error="closed by peer", location="")
KILL_AFTER_S = 3.0


class Run:
    """Ranks of a node on a clock that the test moves."""

    def __init__(self, config: Config, world: int = 2, *, decides: bool = True) -> None:
        self.now = 1000.0
        self.told: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self.state = State(world=world, config=config, decides=decides)
        self.rounds = Rounds(
            self.state, self._emit, kill_after_s=KILL_AFTER_S, hard_s=10.0, silent_s=3.0
        )
        self.boards = []
        for _ in range(world):
            fd = shm.create()
            self.boards.append(shm.Board(fd))
            os.close(fd)
        self.who: dict[int, Occupant] = {}
        self._pids = 100
        self.said: list[Notice | JobEnd] = []
        self.rounds.begin()

    def _emit(
        self,
        data: EventData,
        *,
        step: int | None = None,
        rank: int | None = None,
        round: int | None = None,
        t: float | None = None,
    ) -> None:
        head = {"step": step, "rank": rank, "round": round, "t": t}
        self.told.append((data.kind, msgspec.to_builtins(data), head))

    def close(self) -> None:
        for board in self.boards:
            board.close()

    # --- what happens -----------------------------------------------------------------------------

    def start(self, *ranks: int) -> None:
        """New processes take the boards of these ranks (none given: of all)."""
        for rank in ranks or range(len(self.boards)):
            self._pids += 1
            inc = self.boards[rank].take(self._pids)
            self.who[rank] = Occupant(
                ticket=self._pids,
                rank=rank,
                inc=inc,
                pid=self._pids,
                board=self.boards[rank],
                file="",
                logs={},
            )
            self.rounds.started(self.who[rank], self.now)
        self._take()

    def tell(self, rank: int, data: EventData, *, round: int | None = 1, step: int = 0) -> None:
        """A rank writes an event."""
        event = Event(
            v=1,
            run="r",
            src="rank",
            node=0,
            t=self.now + 1e6,
            mono=self.now,
            seq=1,
            kind=data.kind,
            rank=rank,
            round=round,
            step=step,
            data=msgspec.to_builtins(data),
        )
        self.rounds.told(self.who[rank], event, self.now)
        self._take()

    def join(self, number: int, *ranks: int) -> None:
        """These ranks (none given: all) join a round."""
        for rank in ranks or range(len(self.boards)):
            self.boards[rank].enter_round(number, 0)
            self._note(rank, Phase.LOAD)
            pid = self.who[rank].pid
            self.tell(rank, ev.RankJoined(pid=pid), round=number)

    def step(self, number: int, step: int) -> None:
        """All ranks complete a step of round ``number``."""
        for rank in range(len(self.boards)):
            self.boards[rank].begin_step(step, self.now)
            self._note(rank, Phase.STEP)
            self.tell(rank, ev.StepEnd(s=0.1), round=number, step=step)

    def _note(self, rank: int, phase: Phase) -> None:
        who = self.who[rank]
        who.phase, who.progress, who.round = phase, self.now, who.board.round
        who.step = who.board.step

    def enter(self, rank: int, phase: Phase) -> None:
        """The observer looks at a board and sees the rank in ``phase`` now."""
        self.boards[rank].enter(phase, self.now)
        self._note(rank, phase)
        self.rounds.progress(self.now)

    def end(self, rank: int, code: int, *, seen: bool = True) -> None:
        """A process ends."""
        self.who[rank].code = code
        self.rounds.ended(self.who[rank], code, seen, self.now)
        self._take()

    def stall(self, *idle: float) -> None:
        """All ranks stand still, each for so long; rank 1 has entered fewer collectives."""
        ranks = [
            Evidence(
                rank=rank,
                inc=self.who[rank].inc,
                idle_s=seconds,
                limit_s=4.0,
                beat_age_s=0.0,
                state="S",
                phase="step",
                step=8,
                seq=10 - rank,
                seqs={"0": 10 - rank},
            )
            for rank, seconds in enumerate(idle)
        ]
        self.rounds.failures.stalled(Stalled(ranks=ranks), self.now)
        self._take()

    def pass_time(self, seconds: float) -> None:
        """Nothing happens for a while."""
        self.now += seconds
        self.rounds.progress(self.now)
        self._take()

    # --- what is said -----------------------------------------------------------------------------

    def _take(self) -> None:
        self.said += self.rounds.take()

    def data(self, kind: str) -> list[dict[str, Any]]:
        """The data of all events of ``kind``."""
        return [data for name, data, _ in self.told if name == kind]

    def heads(self, kind: str) -> list[dict[str, Any]]:
        """The heads of all events of ``kind``."""
        return [head for name, _, head in self.told if name == kind]

    @property
    def causes(self) -> list[tuple[str, int, str]]:
        """(cause, guilty, level) of each restart."""
        return [(d["cause"], d["guilty"], d["level"]) for d in self.data("restart.cause")]

    @property
    def ends(self) -> list[int]:
        """Exit codes with which the run is to end."""
        return [one.exit_code for one in self.said if isinstance(one, JobEnd)]


def config_of(restart: str = "nvrx", **restarts: Any) -> Config:
    return dataclasses.replace(
        Config(),
        engine=EngineSettings(launcher="nvrx", restart="nvrx" if restart == "nvrx" else ""),
        restart=RestartSettings(settle_s=1.0, **restarts),
    )
