"""Rounds as the ranks' events and ends show them: who joined, who ended, when all go on.

The counterpart of the coordinator where nobody asks keepstep before acting. No I/O: what happened
comes in with the time, notices go out.
"""

from __future__ import annotations

import math
import signal

import msgspec

from keepstep import events, policy
from keepstep.agent.observe.episode import ended_report, failed_report, silent_report
from keepstep.agent.observe.failures import Emit, Failures, Forward, nobody
from keepstep.agent.observe.seats import Occupant
from keepstep.agent.observe.state import Forming, Member, State
from keepstep.errors import ExitCode
from keepstep.events import Event
from keepstep.shm import Phase
from keepstep.wire.messages import JobEnd, Notice

_BEFORE_S = 1e-3
_SLACK = 0.9


class Rounds:
    """The ranks that this process watches.

    Args:
        state: What is known of the run. emit: writes an event.
        kill_after_s: How long the launcher waits from SIGTERM to SIGKILL.
        hard_s: How long after it has acted on a hang it may end the rank.
        silent_s: A rank killed after so long a silence was ended for it.
        forward: Gets each report too; for a node that does not decide.
    """

    def __init__(
        self,
        state: State,
        emit: Emit,
        *,
        kill_after_s: float,
        hard_s: float = 0.0,
        silent_s: float = math.inf,
        forward: Forward = nobody,
    ) -> None:
        self._state = state
        self._emit = emit
        self._kill_after_s = kill_after_s
        self._silent_s = silent_s
        self.failures = Failures(state, emit, hard_s=hard_s, forward=forward)
        self._begun = 0
        self._resume = 0
        self._first_steps_due = False

    def begin(self) -> None:
        """The first round may form."""
        self._begin_round(1, "the run starts")

    def take(self) -> list[Notice | JobEnd]:
        """What is to be said since the last call."""
        out, self._state.out = self._state.out, []
        return out

    # --- processes --------------------------------------------------------------------------------

    def started(self, who: Occupant, now: float) -> None:
        """A process took the board of a rank."""
        state = self._state
        before = [rank for rank, one in state.members.items() if one.who.board is who.board]
        if state.running and before:
            self._add_silent(before[0], state.members[before[0]].who.step, now)
        for rank in before:
            del state.members[rank]  # usually the same number, but the launcher gives them out
        state.members[who.rank] = Member(who=who, since=now)
        if not who.far:
            begun = events.RankStart(pid=who.pid, incarnation=who.inc, method="exec", spare=False)
            self._emit(begun, rank=who.rank)
        self.progress(now)

    def gone(self, who: Occupant, now: float) -> None:
        """A process ended; how it ended comes later, by ``ended``."""
        member = self._member(who)
        if member is not None:
            member.lives, member.unsure = False, True
            self.progress(now)

    def ended(self, who: Occupant, code: int, seen: bool, now: float) -> None:
        """A process ended with ``code`` (-N: by signal N); ``seen``: that is known."""
        member = self._member(who)
        state = self._state
        asked = state.over or (bool(state.signal) and not state.adopted)
        by_launcher = asked or (member is not None and self._by_launcher(member, code, now))
        exited = events.RankExit(
            pid=who.pid,
            incarnation=who.inc,
            code=code,
            oom=who.oom,
            by_us=by_launcher and code != 0,
            seen=seen,
        )
        number = (member.joined or None) if member is not None else None
        self._emit(exited, rank=who.rank, step=who.step, round=number)
        if member is None:
            return
        member.lives = member.unsure = False
        self.failures.acted(now)
        reported = self.failures.episode is not None and member.told
        if code and not by_launcher and not (reported and code > 0):
            fresh = not member.joined
            report = ended_report(who.rank, code, oom=who.oom, step=who.step, fresh=fresh, now=now)
            report = self._or_hang(report, who, now)
            self._look_ready(force=True)
            self.failures.add(report, "", now)
        self.progress(now)

    def _or_hang(self, report: policy.Report, who: Occupant, now: float) -> policy.Report:
        """A rank that was frozen for longer than the launcher allows was ended by it, also where
        that came before we judged: the two look at the same limit."""
        silent = now - who.progress
        stepping = who.phase is Phase.STEP and not who.far
        if report.kind != "killed" or not stepping or silent < self._silent_s:
            return report
        what = f"no progress for {silent:.1f} s, then ended by signal {-report.code}"
        return policy.Report(rank=who.rank, t=who.progress, kind="hang", step=who.step, error=what)

    def failed_far(self, report: policy.Report, stack: str, now: float, t: float) -> None:
        """Another node reports a failure, of which it knew at ``t`` (wall time)."""
        member = self._state.members.get(report.rank)
        if member is not None and not self._state.over:
            self._look_ready(force=True)
            self.failures.acted(now)
            member.told = member.told or report.kind == "exception"
            self.failures.add(report, stack, now, t=t)
            self.progress(now)

    def over_far(self, who: Occupant, now: float) -> None:
        """A process of another node has ended."""
        member = self._member(who)
        if member is not None and not self._state.over:
            member.lives = False
            self.failures.acted(now)
            self.progress(now)

    def went_on_far(self, who: Occupant) -> None:
        """A rank of another node that stood still goes on by itself."""
        member = self._member(who)
        if member is not None:
            member.hang = None
            self.failures.forget_standing(who.rank)

    def _member(self, who: Occupant) -> Member | None:
        member = self._state.members.get(who.rank)
        return member if member is not None and member.who is who else None

    def _by_launcher(self, member: Member, code: int, now: float) -> bool:
        """Whether the launcher ended a process: because it hangs, or because another has failed."""
        if code >= 0:
            return False
        if member.hang is not None and not member.went_on:
            return True
        episode = self.failures.episode
        if episode is None and self._state.several and code == -signal.SIGTERM:
            return True  # another node's rank has failed, and that is not known here yet
        if episode is None or episode.pids.get(member.who.rank) != member.who.pid:
            return False
        waited = now - episode.first_t
        late = waited >= _SLACK * self._kill_after_s
        return code == -signal.SIGTERM or (code == -signal.SIGKILL and late)

    def _add_silent(self, rank: int, step: int, now: float, t: float | None = None) -> None:
        """The launcher begins anew: because of a rank that hangs, or nobody has said why."""
        self.failures.acted(now, t=t)
        if self.failures.episode is None:
            self.failures.add(silent_report(rank, step, now), "", now, t=t)

    # --- events of ranks --------------------------------------------------------------------------

    def told(self, who: Occupant, event: Event, now: float) -> None:
        """A rank wrote an event."""
        member, state = self._member(who), self._state
        if member is None or state.over:
            return
        try:
            data = events.data_of(event)
        except msgspec.ValidationError:
            return
        match data:
            case events.RankJoined():
                self._joined(member, event, now)
            case events.RankLeft():
                self.failures.acted(now, t=event.t)
                member.left = event.round or 0
            case events.RankFailed():
                self._look_ready(force=True)
                self.failures.acted(now)
                report = failed_report(who.rank, event, data)
                member.told = member.told or report.kind == "exception"
                self.failures.add(report, data.stack, now, t=event.t)
            case events.StepEnd():
                self._stepped(member, event, data.s)
            case events.RestoreEnd():
                if state.forming is not None and event.round == state.forming.number:
                    state.forming.restored = event.step or 0
            case events.StopNotice():  # asked for on another node
                state.signal = state.signal or data.signal
            case events.CheckpointCommit():
                step = event.step or 0
                state.committed = max(state.committed, step)
                state.say("commit", f"step {step} is committed", step)
        self.progress(now)

    def _joined(self, member: Member, event: Event, now: float) -> None:
        state, number = self._state, event.round or 0
        if number < (state.forming.number if state.forming is not None else state.round + 1):
            return
        state.adopted = member.who.adopted = True
        self._look_ready(force=True)  # the round before, if all had joined it
        if state.running:
            # What is answered now came before: reports read the order of facts from times.
            self._add_silent(member.who.rank, member.who.step, now, event.t - _BEFORE_S)
        forming = state.forming
        if forming is None or number > forming.number:
            self._begin_round(number, "restart" if state.round else "the run starts", event.t)
            forming = state.forming = Forming(number, set())
        member.joined, member.told = number, False
        forming.joined.add(member.who.rank)
        forming.t = max(forming.t, event.t)

    def _begin_round(self, number: int, reason: str, t: float | None = None) -> None:
        if number > self._begun:
            self._begun = number
            if self._state.decides:
                self._emit(events.RoundBegin(reason=reason), round=number, t=t)

    def _stepped(self, member: Member, event: Event, seconds: float) -> None:
        state, step = self._state, event.step or 0
        state.highest = max(state.highest, step)
        if not state.adopted and not state.running:
            self._start_unadopted(event.t - seconds)
        forming = state.forming
        if forming is not None and event.round == forming.number and forming.first is None:
            forming.first = step
            self._look_ready()
        current = not event.round or event.round == state.round
        member.stepped = member.stepped or (state.running and current)
        if self._first_steps_due and all(one.stepped for one in state.members.values()):
            self._first_steps_due = False
            done = events.RestartEnd(resume=self._resume, first_step=self._resume + 1)
            if state.decides:
                self._emit(done, round=state.round, t=event.t)
            state.say("ready", f"round {state.round}: all {state.world} ranks train again")

    def _start_unadopted(self, t: float) -> None:
        """A script without keepstep.run never joins: its round runs once all its processes do."""
        state, episode = self._state, self.failures.episode
        old = episode.pids if episode is not None else {}
        new = [
            rank
            for rank, one in state.members.items()
            if one.lives and one.who.pid != old.get(rank)
        ]
        if len(new) == state.world:
            number = state.round + 1
            self._begin_round(number, "restart", t)
            state.forming = Forming(number, set(new), t=t, first=1)
            self._look_ready()

    # --- going on ---------------------------------------------------------------------------------

    def progress(self, now: float) -> None:
        """Look whether something can be said; call after every change and now and then."""
        state = self._state
        self.failures.progress(now)
        self._look_ready()
        limit = state.config.restart.join_limit_s
        for rank, member in state.members.items():
            late = member.lives and not member.joined and now - member.since > limit
            if state.adopted and late:
                text = f"rank {rank} did not reach keepstep.run within {limit:.0f} s"
                state.end(ExitCode.SCRIPT_FAILED, text)

    @property
    def admitted(self) -> int:
        """The newest round that may begin; 0: that is not decided now. Ranks wait for it."""
        state, episode = self._state, self.failures.episode
        if state.over or (episode is not None and episode.found is None):
            return 0
        forming = state.forming.number if state.forming is not None else 0
        if episode is not None:
            return max(forming, episode.round + 1)
        return max(forming, state.round if state.running else state.round + 1)

    def _look_ready(self, *, force: bool = False) -> None:
        """A round is ready when all have joined; said once it is known where it resumes from."""
        state, forming = self._state, self._state.forming
        if state.over or forming is None or not state.all_joined:
            return
        resume = forming.restored
        if resume is None and forming.first is not None:
            resume = forming.first - 1
        if resume is None and (force or state.at_first_step):
            resume = 0
        if resume is None:
            return
        self._first_steps_due = self._first_steps_due or self.failures.episode is not None
        self.failures.close()
        if state.over:
            return
        state.forming, state.round, self._resume = None, forming.number, resume
        state.running = True
        state.committed = max(state.committed, resume)
        for member in state.members.values():
            member.who.resumed_at, member.stepped, member.hang = resume, False, None
        if state.decides:
            pids = {str(rank): pid for rank, pid in state.pids().items()}
            ready = events.RoundReady(pids=pids, resume=resume)
            self._emit(ready, round=state.round, t=forming.t)
        at = f"resuming after step {resume}" if resume else "from the start"
        state.say("go", f"round {state.round}: {state.world} ranks, {at}", resume)

    def finished(self) -> tuple[int, str]:
        """The launcher says that all went well: exit code and reason."""
        state = self._state
        code = int(ExitCode.STOPPED_ON_NOTICE) if state.signal else 0
        if not state.adopted:
            text = "the script ended on every rank"
            return code, f"{text} after {state.signal}" if state.signal else text
        if state.signal:
            return code, f"stopped on {state.signal}; step {state.committed} is committed"
        return code, "every rank finished"
