"""Invents the event log of a run, as agent, coordinator and ranks would have written it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from keepstep import events as ev
from keepstep.events import Event, EventData

EPOCH = 1_764_000_000.0


class RunLog:
    """Events of one run folder. Times are seconds after ``EPOCH``.

    Args:
        world: Number of ranks.
    """

    def __init__(self, world: int = 2) -> None:
        self.world = world
        self.events: list[Event] = []
        self._seq: dict[tuple[str, int | None], int] = {}

    def add(
        self,
        t: float,
        data: EventData,
        *,
        src: str = "coordinator",
        rank: int | None = None,
        round: int | None = None,
        step: int | None = None,
    ) -> None:
        """One event; ``data`` as the writer would give it."""
        key = (src, rank)
        self._seq[key] = self._seq.get(key, 0) + 1
        self.events.append(
            Event(
                v=1,
                run="invented",
                src=src,
                node=0,
                t=EPOCH + t,
                mono=t,
                seq=self._seq[key],
                kind=data.kind,
                rank=rank,
                world=self.world if src == "rank" else None,
                round=round,
                step=step,
                data=msgspec.to_builtins(data),
            )
        )

    def launch(self, t: float) -> None:
        """The launcher starts."""
        self.add(
            t,
            ev.RunBegin(argv=["run"], engine="native", world=self.world, version="0"),
            src="agent",
        )

    def end(self, t: float, exit_code: int = 0) -> None:
        """The launcher ends."""
        self.add(t, ev.RunEnd(exit_code=exit_code, reason="."), src="agent")

    def ready(
        self, t: float, round: int, resume: int, pids: list[int], *, announced: bool = True
    ) -> None:
        """All ranks joined at ``t`` and go on from step ``resume``."""
        for rank, pid in enumerate(pids):
            self.add(t, ev.RankJoined(pid=pid), src="rank", rank=rank, round=round)
        if announced:
            named = {str(rank): pid for rank, pid in enumerate(pids)}
            self.add(t, ev.RoundReady(pids=named, resume=resume), round=round)

    def restore(self, begin: float, end: float, round: int, step: int) -> None:
        """All ranks load step ``step``."""
        for rank in range(self.world):
            who = {"src": "rank", "rank": rank, "round": round, "step": step}
            self.add(begin, ev.RestoreBegin(tier="storage"), **who)  # type: ignore[arg-type]
            done = ev.RestoreEnd(tier="storage", s=end - begin, bytes=10)
            self.add(end, done, **who)  # type: ignore[arg-type]

    def steps(
        self, begin: float, first: int, last: int, round: int, *, s: float = 1.0, but: int = -1
    ) -> float:
        """All ranks (but one) complete steps ``first`` to ``last``; returns when."""
        t = begin
        for step in range(first, last + 1):
            t = begin + s * (step - first + 1)
            for rank in range(self.world):
                if rank != but:
                    done = ev.StepEnd(s=s)
                    self.add(t, done, src="rank", rank=rank, round=round, step=step)
        return t

    def save(self, t: float, stall_s: float, step: int, round: int, *, save_s: float = 3.0) -> None:
        """All ranks stand still for ``stall_s``, and the save commits."""
        for rank in range(self.world):
            who = {"src": "rank", "rank": rank, "round": round, "step": step}
            self.add(t, ev.CheckpointBegin(), **who)  # type: ignore[arg-type]
            staged = ev.CheckpointStaged(stall_s=stall_s, bytes=500)
            self.add(t + stall_s, staged, **who)  # type: ignore[arg-type]
        commit = ev.CheckpointCommit(folder=f"step-{step:08d}", bytes=1000, save_s=save_s)
        self.add(t + save_s, commit, round=round, step=step)

    def inject(self, t: float, fault: str, rank: int, round: int, step: int) -> None:
        """A drill's fault fires."""
        data = ev.FaultInjected(fault=fault, index=0)
        self.add(t, data, src="rank", rank=rank, round=round, step=step)

    def restart(
        self,
        t: float,
        round: int,
        *,
        cause: str = "killed",
        guilty: int = 1,
        step: int = 0,
        level: str = "rank",
        consequences: tuple[int, ...] = (),
        found_at: float | None = None,
    ) -> None:
        """The coordinator sees a failure of ``round`` and finds its cause."""
        self.add(t, ev.RestartBegin(first_kind=cause), round=round)
        found = ev.RestartCause(
            cause=cause,
            guilty=guilty,
            step=step,
            level=level,
            reason=f"{level}: restart",
            line=f"rank {guilty} {cause} in step {step}; replaced",
            consequences=list(consequences),
        )
        self.add(t if found_at is None else found_at, found, round=round)

    def without(self, *sources: str) -> list[Event]:
        """The events, as if ``sources`` had never written any."""
        return [event for event in self.events if event.src not in sources]

    def write(self, run_dir: Path) -> None:
        """Write the event files of a run folder."""
        folder = run_dir / "events"
        folder.mkdir(parents=True)
        for event in self.events:
            who = "0" if event.rank is None else str(event.rank)
            with (folder / f"{event.src}-{who}-1-1.jsonl").open("ab") as file:
                file.write(msgspec.json.encode(event) + b"\n")


def worked_example() -> RunLog:
    """Start 0-20; steps 1-100 at 1 s; a save stalls 2 s; steps 101-150; rank 1 is killed at 172.5,
    noticed at 180; ready 195; restored by 203; steps 101-200; end at 303."""
    log = RunLog()
    log.launch(0.0)
    log.ready(18.0, 1, 0, [10, 11])
    log.steps(20.0, 1, 100, 1)
    log.save(120.0, 2.0, 100, 1)
    log.steps(122.0, 101, 150, 1)
    log.inject(172.5, "kill", 1, 1, 151)
    log.restart(180.0, 1, step=151)
    log.ready(195.0, 2, 100, [10, 12])
    log.restore(195.0, 203.0, 2, 100)
    log.steps(203.0, 101, 200, 2)
    log.end(303.0)
    return log


def four_faults() -> RunLog:
    """40 steps of 0.25 s, saves every 10; an exception, a time-out, a SIGKILL and a hang."""
    log = RunLog()
    log.launch(0.0)
    log.ready(3.1, 1, 0, [10, 11])
    t = log.steps(3.4, 1, 10, 1, s=0.25)
    log.save(t, 0.02, 10, 1, save_s=0.31)
    t = log.steps(t + 0.02, 11, 12, 1, s=0.25)
    log.inject(t + 0.1, "exception", 1, 1, 13)
    log.restart(t + 0.13, 1, cause="exception", step=13, level="kept")
    log.ready(t + 0.4, 2, 12, [10, 11])
    log.restore(t + 0.41, t + 0.47, 2, 12)
    t = log.steps(t + 0.47, 13, 17, 2, s=0.25)
    log.inject(t + 0.05, "desync", 0, 2, 18)
    log.restart(t + 2.1, 2, cause="timeout", guilty=0, step=18, level="kept", consequences=(1,))
    log.ready(t + 2.5, 3, 17, [10, 11])
    log.restore(t + 2.5, t + 2.55, 3, 17)
    t = log.steps(t + 2.55, 18, 20, 3, s=0.25)
    log.save(t, 0.03, 20, 3, save_s=0.28)
    t = log.steps(t + 0.03, 21, 25, 3, s=0.25)
    log.inject(t + 0.01, "kill", 1, 3, 26)
    log.restart(t + 0.06, 3, cause="killed", step=26)
    log.ready(t + 0.9, 4, 25, [10, 12])
    log.restore(t + 0.9, t + 1.1, 4, 25)
    t = log.steps(t + 1.1, 26, 30, 4, s=0.25)
    log.save(t, 0.02, 30, 4, save_s=0.29)
    t = log.steps(t + 0.02, 31, 33, 4, s=0.25)
    log.inject(t + 0.01, "hang", 0, 4, 34)
    log.restart(t + 4.2, 4, cause="hang", guilty=0, step=34)
    log.ready(t + 5.1, 5, 33, [13, 12])
    log.restore(t + 5.1, t + 5.3, 5, 33)
    t = log.steps(t + 5.3, 34, 40, 5, s=0.25)
    log.save(t, 0.02, 40, 5, save_s=0.35)
    log.end(t + 0.6)
    return log
