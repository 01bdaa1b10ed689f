"""Failures: from the evidence to the cause, what the launcher makes of it, and when it is enough.

Policy is asked as natively, but the launcher does not wait for the answer: it restarts as it does,
and what it did is written down. Only "stop" is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from keepstep import events, policy
from keepstep.agent.observe.episode import Episode
from keepstep.agent.observe.seats import Occupant
from keepstep.agent.observe.state import Hang, State, cause_event
from keepstep.errors import ExitCode
from keepstep.wire.messages import Evidence, Stalled

_UNJUDGED = policy.Blame(guilty=(), cause="unknown", reason="ranks of this node stand still")
_LEVEL_S = 1.0
"""How long after the cause is settled the launcher may show what it does about it."""


class Emit(Protocol):
    """Writes an event; see ``events.Recorder.emit``."""

    def __call__(
        self,
        data: events.EventData,
        *,
        step: int | None = None,
        rank: int | None = None,
        round: int | None = None,
        t: float | None = None,
    ) -> None:
        """Record ``data``."""


class _Standing(NamedTuple):
    """How a rank looked when somebody stood still, when, and its progress mark then."""

    seen: Evidence
    at: float
    mark: float

    def holds(self, who: Occupant, now: float) -> bool:
        """Whether it still looks so, as far as is known."""
        same = (self.seen.inc, self.mark) == (who.inc, who.progress)
        return same and now - self.at <= self.seen.limit_s


Forward = Callable[[policy.Report, str, float], None]
"""Gets a report, the stack, and the time at which it was known (monotonic)."""


def nobody(report: policy.Report, stack: str, now: float) -> None:
    """Nobody else is to know of ``report``."""


class Failures:
    """The failures of a run, one after the other.

    Args:
        state: What is known of the run. emit: writes an event.
        hard_s: How long after it has acted on a hang the launcher may end the rank.
        forward: Gets each report too; for a node that does not decide.
    """

    def __init__(
        self, state: State, emit: Emit, *, hard_s: float, forward: Forward = nobody
    ) -> None:
        self._state = state
        self._emit = emit
        self._hard_s = hard_s
        self._forward = forward
        self._standing: dict[int, _Standing] = {}
        self._history: list[policy.Record] = []
        self.episode: Episode | None = None
        """The failure that the next round is to answer; None while all is well."""
        self.went_on: list[int] = []
        """Ranks that stood still and go on by themselves; the reader empties it."""

    # --- evidence ---------------------------------------------------------------------------------

    def add(self, report: policy.Report, stack: str, now: float, *, t: float | None = None) -> None:
        """Evidence of a failure; ``t`` is the wall time at which it was known, where not now."""
        state, episode = self._state, self.episode
        if state.over:
            return
        state.highest = max(state.highest, report.step)
        self._forward(report, stack, now)
        pid = state.pids().get(report.rank)
        joined = state.members[report.rank].joined if report.rank in state.members else 0
        again = episode is not None and episode.found is not None and joined > episode.round
        same = episode is not None and pid is not None and episode.pids.get(report.rank) == pid
        if episode is not None and same and not again:
            if (report.rank, report.kind) not in {(r.rank, r.kind) for r in episode.reports}:
                episode.add(report, stack)
            return
        self.close()  # a process or round that is newer than the failure: it is another one
        if state.over:
            return
        if state.signal:
            self.stopped("after a failure")
            return
        boards = {rank: one.who.board for rank, one in state.members.items() if one.lives}
        self.episode = Episode(
            report,
            stack,
            now,
            round=max(state.round, joined),
            pids=state.pids(),
            seqs={rank: seqs for rank, one in boards.items() if (seqs := one.sequence_numbers)},
        )
        state.running = False
        if state.decides:
            begun = events.RestartBegin(first_kind=report.kind)
            number = state.round or None
            self._emit(begun, rank=report.rank, step=report.step, round=number, t=t)

    def stalled(self, stalled: Stalled, now: float) -> None:
        """Somebody made no progress nearly as long as the launcher allows.

        It is written down, and becomes a failure when the launcher acts: a rank that goes on before
        has only been slow.
        """
        state = self._state
        if not state.running or state.over:
            return
        current = self._together(stalled, now)
        verdict = policy.blame(current) if state.decides else _UNJUDGED
        guilty = [seen for seen in current if seen.rank in verdict.guilty]
        for seen in guilty:
            hung = events.RankHung(
                idle_s=round(seen.idle_s, 3),
                limit_s=round(seen.limit_s, 3),
                phase=seen.phase,
                evidence=verdict.reason,
                stack=seen.stack,
            )
            self._emit(hung, rank=seen.rank, step=seen.step)
        if not current:
            return
        state.say("fail", verdict.reason)
        # Where nobody is blamed, the ranks that stand still are like ones whose collective timed
        # out: since when each does, and what it has entered, may tell whom they wait for.
        longest = max(seen.idle_s for seen in current)
        still = [seen for seen in current if seen.idle_s > longest / 2]
        for seen in guilty or still:
            report = policy.Report(
                rank=seen.rank,
                t=now - seen.idle_s,
                kind="hang" if guilty else "timeout",
                step=seen.step,
                phase=seen.phase,
                error=verdict.reason,
                seqs=seen.seqs,
            )
            member = state.members[seen.rank]
            member.hang = Hang(report, seen.stack, member.who.progress, member.who.round)

    def _together(self, stalled: Stalled, now: float) -> list[Evidence]:
        """All that is known of how ranks stand still now; nothing until other nodes say how theirs
        do, since who hangs is seen from the others only."""
        state = self._state
        for seen in stalled.ranks:
            if seen.rank in state.members:
                mark = state.members[seen.rank].who.progress
                self._standing[seen.rank] = _Standing(seen, now, mark)
        current: list[Evidence] = []
        for rank, one in state.members.items():
            if not one.lives:
                continue
            standing = self._standing.get(rank)
            if standing is not None and standing.holds(one.who, now):
                current.append(standing.seen)
            elif state.several:
                return []
        return current

    def forget_standing(self, rank: int) -> None:
        """``rank`` goes on."""
        self._standing.pop(rank, None)

    def acted(self, now: float, *, t: float | None = None) -> None:
        """The launcher or a rank does something: hangs that lasted until now are failures; ``t`` is
        the wall time at which it did, where not now."""
        for member in list(self._state.members.values()):
            hang = member.hang
            if hang is not None and not member.went_on:
                self.add(hang.report, hang.stack, now, t=t)

    # --- deciding ---------------------------------------------------------------------------------

    def progress(self, now: float) -> None:
        """Look whether something can be said; call after every change and now and then."""
        for member in self._state.members.values():
            if member.went_on:
                member.hang = None
                self.went_on.append(member.who.rank)
        episode = self.episode
        if episode is not None and not self._state.over:
            self._settle(episode, now)
        if episode is not None and not self._state.over:
            limit_s = self._state.config.restart.settle_s + _LEVEL_S
            if episode.found is not None and episode.found.cause == "hang":
                limit_s += self._hard_s
            self._tell_cause(episode, late=now - episode.first_t >= limit_s)

    def close(self) -> None:
        """The launcher has gone on: whatever is not decided yet is decided now."""
        episode, self.episode = self.episode, None
        if episode is not None:
            self._settle(episode, episode.first_t, force=True)
            if not self._state.over:
                self._tell_cause(episode, late=True)

    def _settle(self, episode: Episode, now: float, *, force: bool = False) -> None:
        """Find the cause, and decide whether the run goes on."""
        state = self._state
        joined = [
            rank
            for rank, one in state.members.items()
            if one.joined > episode.round or one.left >= episode.round > 0
        ]
        gone = [r for r in state.changed(episode.pids) if not state.members[r].unsure]
        accounted = {*joined, *gone}
        settings = state.config.restart
        found = episode.settle(state.world, accounted, now, settings.settle_s, force=force)
        if found is None:
            return
        reached = policy.Progress(committed=state.committed, highest=state.highest)
        decision = policy.decide(
            self._history, found, reached, settings, in_process=state.in_process
        )
        self._history.append(policy.Record.of(found, reached))
        if decision.level == "stop" and state.decides:
            self._cause(episode, found, "stop", decision.reason)
            state.end(decision.exit_code, decision.reason)

    def _tell_cause(self, episode: Episode, *, late: bool) -> None:
        """Write down cause and level once the launcher shows which it is."""
        found, state = episode.found, self._state
        if found is None or episode.told:
            return
        changed = state.changed(episode.pids)
        if not state.in_process:
            why = "nothing restarts inside the processes: the launcher replaces all of them"
            self._restart(episode, found, "respawn", why)
        elif changed:
            gone = [found.guilty] if found.guilty in changed else changed
            name = f"rank {gone[0]}" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))}"
            why = f"{name} cannot go on in the same process: the launcher replaces all processes"
            self._restart(episode, found, "respawn", why)
        elif late or state.all_joined:
            self._restart(episode, found, "rerun", "all processes live: main is called again")

    def _restart(
        self, episode: Episode, found: policy.Attribution, level: str, reason: str
    ) -> None:
        self._cause(episode, found, level, reason)
        self._state.say("restart", f"{found.line}; level {level}: {reason}")

    def _cause(self, episode: Episode, found: policy.Attribution, level: str, reason: str) -> None:
        episode.told = True
        if self._state.decides:
            stack = episode.stack(found.guilty)
            cause = cause_event(found, level, reason, oldest=episode.oldest_step, stack=stack)
            self._emit(cause, round=episode.round or None)

    # --- the end ----------------------------------------------------------------------------------

    def stopped(self, when: str) -> None:
        """The run was asked to stop, and there is nothing left that could be saved."""
        state = self._state
        text = f"stopped on {state.signal} {when}"
        reason = f"{text}; newest committed step {state.committed}"
        state.end(ExitCode.STOPPED_ON_NOTICE, reason)

    def gave_up(self, now: float) -> policy.Attribution | None:
        """The launcher ended with an error: the failure that it did not recover from, if any. The
        run may be over then, for a reason of policy's."""
        self.acted(now)
        episode = self.episode
        if episode is None or self._state.over:
            return None
        self._settle(episode, now, force=True)
        if episode.found is not None and not episode.told:
            self._cause(episode, episode.found, "stop", "the launcher has ended")
        return episode.found
