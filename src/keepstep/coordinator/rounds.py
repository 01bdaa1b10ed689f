"""Rounds: who is in, what failed, who is replaced, when all go on. The coordinator's state machine.

No I/O: messages come in with the time, messages for the agents go out. Policy (who is to blame, what
is done) is asked, not made here. One ``Rounds`` serves one job.

    forming --all joined--> running --a failure--> aborting --cause and level known--> forming
    running --all returned and saved--> done
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keepstep import events, policy
from keepstep.config import Config
from keepstep.coordinator.saves import Saves
from keepstep.errors import ExitCode
from keepstep.wire.messages import (
    FROM_COORDINATOR,
    Abort,
    Failed,
    Finish,
    Go,
    JobEnd,
    Join,
    Kill,
    Notice,
    RankDown,
    RankUp,
    Replace,
    Returned,
    Stalled,
    Stepped,
    StopAck,
    StopAt,
    StopRequest,
    ToRank,
)

Emit = Callable[..., None]
PickResume = Callable[[frozenset[str]], tuple[int, str]]


@dataclass(slots=True)
class Member:
    """One rank number and the process that has it."""

    inc: int = -1
    pid: int = 0
    state: str = "absent"  # absent, starting, joined, running, returned, gone
    since: float = 0.0
    stepped: bool = False
    ended: bool = False
    saving: int = 0
    seqs: dict[str, int] | None = None


class Rounds:
    """The job's membership.

    Args:
        world: Number of ranks. config: settings. term: this coordinator's term.
        saves: Saves in flight. emit: writes an event. pick_resume: newest usable committed step and
            its folder, leaving out the folders given.
    """

    def __init__(
        self,
        world: int,
        config: Config,
        term: int,
        saves: Saves,
        emit: Emit,
        pick_resume: PickResume,
    ) -> None:
        self.world = world
        self._config = config
        self._term = term
        self._saves = saves
        self._emit = emit
        self._pick = pick_resume
        self.round = 1
        self.state = "forming"
        self.members = [Member() for _ in range(world)]
        self._adopted = False
        self._reports: list[policy.Report] = []
        self._first_t = 0.0
        self._decided = True
        self._history: list[policy.Record] = []
        self._highest = 0
        self._unusable: set[str] = set()
        self._resume = 0
        self._awaiting_first = False
        self._folder = ""
        self._out: list[FROM_COORDINATOR] = []
        self._stop: StopAt | None = None
        self._stop_live: dict[int, int] = {}
        self._stop_margin = 2
        self._stop_signal = ""
        self.opened_round = 0
        """Newest round whose store may be used."""

    def begin(self) -> None:
        """The first round may form."""
        self._emit(events.RoundBegin(reason="the run starts"), round=self.round)

    def take(self) -> list[FROM_COORDINATOR]:
        """Messages to send since the last call."""
        out, self._out = self._out, []
        return out

    # --- membership ---------------------------------------------------------------------------------

    def rank_up(self, up: RankUp, now: float) -> None:
        """A process was given a rank number."""
        self.members[up.rank] = Member(inc=up.inc, pid=up.pid, state="starting", since=now)
        if self._history and not self._adopted and self.state == "forming":
            self._start_unadopted()

    def _member(self, rank: int, inc: int) -> Member | None:
        """The member, if the message is of its present incarnation."""
        member = self.members[rank] if 0 <= rank < self.world else None
        return member if member is not None and member.inc == inc else None

    def join(self, rank: int, join: Join, now: float) -> None:
        """A rank is ready for the next round."""
        member = self._member(rank, join.inc)
        if member is None or self.state == "done":
            return
        self._adopted = True
        member.state, member.since, member.seqs = "joined", now, join.seqs
        self._emit(events.RankJoined(pid=member.pid), rank=rank)
        self.progress(now)

    def rank_failed(self, rank: int, failed: Failed, now: float) -> None:
        """A rank's own code failed."""
        member = self._member(rank, failed.inc)
        if member is None or self.state == "done":
            return
        self._emit(
            events.RankFailed(
                failure=failed.failure, error=failed.error, location=failed.location
            ),
            rank=rank,
            step=failed.step,
        )
        if failed.failure == "checkpoint" and not failed.fatal and self._folder:
            self._unusable.add(self._folder)
            self._emit(
                events.CheckpointUnusable(folder=self._folder, error=failed.error),
                step=self._resume,
            )
            self._say("fail", f"checkpoint {self._folder} is not usable: {failed.error}")
        member.seqs = failed.seqs
        report = policy.Report(
            rank=rank,
            t=failed.t,
            kind=failed.failure,
            error=failed.error,
            location=failed.location,
            step=failed.step,
            fresh=failed.fresh,
            fatal=failed.fatal,
            seqs=failed.seqs,
        )
        self._failure(report, failed.stack, now)

    def rank_down(self, down: RankDown, now: float) -> None:
        """A rank's process ended."""
        member = self._member(down.rank, down.inc)
        if member is None:
            return
        was, member.state, member.ended = member.state, "gone", True
        if self.state == "done":
            return
        if down.by_us:
            self.progress(now)
            return
        if was != "returned" and down.code == 0 and not self._adopted:
            if all(m.ended for m in self.members):
                self._end(0, "the script ended on every rank", graceful=True)
            return
        kind = "oom" if down.oom else ("killed" if down.code < 0 else "exit")
        said = [r for r in self._reports if r.rank == down.rank and r.kind == "exception"]
        if said and kind == "exit":
            self.progress(now)  # the exception that it reported itself is the better cause
            return
        report = policy.Report(
            rank=down.rank,
            t=down.t,
            kind=kind,
            code=down.code,
            step=down.step,
            fresh=was == "starting",
            error="" if kind != "exit" else f"exit code {down.code} before the run was over",
        )
        self._failure(report, "", now)

    def stalled(self, stalled: Stalled, now: float) -> None:
        """Somebody made no progress beyond the limit."""
        current = [e for e in stalled.ranks if self._member(e.rank, e.inc) is not None]
        if self.state != "running" or not current:
            return
        verdict = policy.blame(current)
        for seen in current:
            if seen.rank in verdict.guilty:
                self._emit(
                    events.RankHung(
                        idle_s=round(seen.idle_s, 3),
                        limit_s=round(seen.limit_s, 3),
                        phase=seen.phase,
                        evidence=verdict.reason,
                        stack=seen.stack,
                    ),
                    rank=seen.rank,
                    step=seen.step,
                )
        if self._config.heartbeat.on_hang == "report":
            self._say("fail", verdict.reason)
            return
        for seen in current:
            if seen.rank in verdict.guilty:
                self.members[seen.rank].state = "gone"
                self._out.append(Kill(rank=seen.rank, inc=seen.inc, reason=verdict.reason))
                report = policy.Report(
                    rank=seen.rank,
                    t=now - seen.idle_s,
                    kind="hang",
                    step=seen.step,
                    phase=seen.phase,
                    error=verdict.reason,
                )
                self._failure(report, seen.stack, now)
        if not verdict.guilty:
            worst = max(current, key=lambda seen: seen.idle_s)
            report = policy.Report(
                rank=worst.rank,
                t=now - worst.idle_s,
                kind="timeout",
                step=worst.step,
                error=verdict.reason,
            )
            self._failure(report, worst.stack, now)

    def returned(self, rank: int, returned: Returned, now: float) -> None:
        """A rank's ``main`` returned."""
        member = self._member(rank, returned.inc)
        if member is None or self.state != "running" or returned.round != self.round:
            return
        member.state, member.saving = "returned", returned.saving
        self.progress(now)

    def stepped(self, message: Stepped, now: float) -> None:
        """A rank completed its first step of a round."""
        member = self._member(message.rank, message.inc)
        if member is None or (self._adopted and message.round != self.round):
            return
        self._highest = max(self._highest, message.step)
        member.stepped = True
        if not self._adopted and self.state == "forming" and self.opened_round < self.round:
            self._start_unadopted()
        if self._awaiting_first and all(m.stepped for m in self.members):
            self._awaiting_first = False
            self._emit(
                events.RestartEnd(resume=self._resume, first_step=self._resume + 1),
                round=self.round,
            )
            self._say("ready", f"round {self.round}: all {self.world} ranks train again")

    def _start_unadopted(self) -> None:
        """A script without keepstep.run: its round runs when all its processes do."""
        if not all(m.state == "starting" for m in self.members):
            return
        self.opened_round = self.round
        self.state = "running"
        self._resume = 0
        self._ready()

    # --- failures -----------------------------------------------------------------------------------

    def _failure(self, report: policy.Report, stack: str, now: float) -> None:
        self._highest = max(self._highest, report.step)
        self._stack = stack or (self._stack if self._reports else "")
        if self.state in ("running", "forming") and self._decided:
            self.state, self._decided = "aborting", False
            self._reports = [report]
            self._stack = stack
            self._first_t = now
            self._emit(
                events.RestartBegin(first_kind=report.kind), rank=report.rank, step=report.step
            )
            self._abort(f"rank {report.rank}: {report.kind}", now)
        else:
            self._reports.append(report)
            if self._decided and report.kind in policy.DEFINITE:
                self._replace_gone()
        self.progress(now)

    _stack = ""

    def _abort(self, reason: str, now: float) -> None:
        for rank, member in enumerate(self.members):
            if member.state in ("running", "returned"):
                member.state, member.since = "running", now
                self._to(rank, Abort(round=self.round, reason=reason))

    def progress(self, now: float) -> None:
        """Look whether something can be decided; call after every change and now and then."""
        if self.state == "aborting" and not self._decided:
            self._decide(now)
        if self.state == "aborting" and self._decided and self._stop_signal:
            self._end_stopped()
        self._late_members(now)
        if self.state in ("aborting", "forming") and self._decided:
            if all(member.state == "joined" for member in self.members):
                self._go(now)
        if self.state == "running" and all(m.state == "returned" for m in self.members):
            self._finish()

    def _decide(self, now: float) -> None:
        accounted = {r for r, m in enumerate(self.members) if m.state in ("joined", "gone")}
        settle_s = self._config.restart.settle_s
        if not policy.settled(
            self._reports, self.world, accounted, now, self._first_t, settle_s
        ):
            return
        seqs = {rank: m.seqs for rank, m in enumerate(self.members) if m.seqs}
        found = policy.attribute(self._reports, world=self.world, seqs=seqs, settle_s=settle_s)
        reached = policy.Progress(committed=self._saves.committed, highest=self._highest)
        decision = policy.decide(
            self._history, found, reached, self._config.restart, in_process=self._adopted
        )
        self._history.append(policy.Record.of(found, reached))
        self._decided = True
        self._emit(
            events.RestartCause(
                cause=found.cause,
                guilty=found.guilty,
                step=self._step_begun(found),
                level=decision.level,
                reason=decision.reason,
                line=found.line,
                consequences=list(found.consequences),
                stack=self._stack,
            ),
            round=self.round,
        )
        if decision.level == "stop":
            self._end(decision.exit_code, decision.reason, graceful=False)
            return
        self._say("restart", f"{found.line}; level {decision.level}: {decision.reason}")
        doomed = range(self.world) if decision.level == "respawn" else decision.replace
        for rank in doomed:
            self._replace(rank, found.line)
        self._replace_gone()

    def _step_begun(self, found: policy.Attribution) -> int:
        """The newest step that any rank had begun when the round failed."""
        return max([found.step, *(report.step for report in self._reports)])

    def _replace(self, rank: int, reason: str) -> None:
        member = self.members[rank]
        if member.state == "absent":
            return
        member.state = "absent"
        self._out.append(
            Replace(rank=rank, inc=member.inc, round=self.round + 1, reason=reason)
        )

    def _replace_gone(self) -> None:
        for rank, member in enumerate(self.members):
            if member.state == "gone":
                self._replace(rank, "its process ended")

    def _late_members(self, now: float) -> None:
        """End whoever does not leave the aborted round, or never arrives."""
        limits = self._config.restart
        for rank, member in enumerate(self.members):
            waited = now - member.since
            if (
                self.state in ("aborting", "forming")
                and member.state == "running"
                and waited > limits.abort_limit_s
            ):
                self._emit(
                    events.RankHung(
                        idle_s=round(waited, 3),
                        limit_s=limits.abort_limit_s,
                        phase="abort",
                        evidence="did not leave the aborted round",
                    ),
                    rank=rank,
                )
                self._say("fail", f"rank {rank} did not leave the round in {waited:.0f} s")
                member.state = "gone"
                self._out.append(
                    Kill(rank=rank, inc=member.inc, reason="did not leave the aborted round")
                )
                if self._decided:
                    self._replace_gone()
            elif (
                self._adopted
                and self.state in ("aborting", "forming")
                and member.state == "starting"
                and waited > limits.join_limit_s
            ):
                text = f"rank {rank} did not reach keepstep.run in {waited:.0f} s"
                self._end(ExitCode.SCRIPT_FAILED, text, graceful=False)

    # --- going on -------------------------------------------------------------------------------------

    def _go(self, now: float) -> None:
        if self._stop_signal:
            self._end_stopped()
            return
        if self._history and self._saves.will_finish():
            if now - self._first_t < self._config.restart.save_wait_s:
                return  # a save that needs no rank any more is about to commit: lose less
        if self._history:
            self.round += 1
            self._emit(events.RoundBegin(reason="restart"), round=self.round)
        self._resume, self._folder = self._pick(frozenset(self._unusable))
        self._saves.close_above(self._resume, self.round)
        self.opened_round = self.round
        self.state = "running"
        for rank, member in enumerate(self.members):
            member.state, member.stepped, member.saving = "running", False, 0
            go = Go(
                term=self._term, round=self.round, resume=self._resume, folder=self._folder
            )
            self._to(rank, go)
        self._ready()

    def _ready(self) -> None:
        pids = {str(rank): member.pid for rank, member in enumerate(self.members)}
        self._emit(events.RoundReady(pids=pids, resume=self._resume), round=self.round)
        self._reports = []
        self._awaiting_first = bool(self._history)
        at = f"resuming after step {self._resume}" if self._resume else "from the start"
        self._say("go", f"round {self.round}: {self.world} ranks, {at}", self._resume)

    def _finish(self) -> None:
        if any(member.saving and self._saves.pending(member.saving) for member in self.members):
            return
        wanted = max(member.saving for member in self.members)
        code, reason = 0, "every rank finished"
        if wanted > self._saves.committed:
            code = ExitCode.CHECKPOINT
            reason = f"every rank finished, but the last save (step {wanted}) did not commit"
        elif self._stop_signal:
            code = ExitCode.STOPPED_ON_NOTICE
            reason = f"stopped on {self._stop_signal}; step {self._saves.committed} is committed"
        for rank in range(self.world):
            self._to(rank, Finish(exit_code=int(code)))
        self._end(code, reason, graceful=True)

    def _end(self, code: int, reason: str, *, graceful: bool) -> None:
        self.state = "done"
        self._out.append(JobEnd(exit_code=int(code), reason=reason, graceful=graceful))

    def fail(self, code: int, reason: str) -> None:
        """End the job for a reason outside of the rounds (saves that keep failing)."""
        if self.state != "done":
            self._end(code, reason, graceful=False)

    # --- stopping on notice ------------------------------------------------------------------------

    def stop_request(self, request: StopRequest, now: float) -> None:
        """SIGTERM or Ctrl-C: agree on a step, save it, end."""
        if self.state == "done" or self._stop_signal:
            return
        self._stop_signal = request.signal
        if not self._adopted:
            return  # the agent passes the signal on
        if self.state != "running":
            self._end_stopped()
            return
        self._ask_stop(request.live)

    def _end_stopped(self) -> None:
        text = f"stopped on {self._stop_signal} during a restart; newest committed step "
        self._end(
            ExitCode.STOPPED_ON_NOTICE, f"{text}{self._saves.committed}", graceful=False
        )

    def _ask_stop(self, live: int) -> None:
        self._stop = StopAt(step=live + self._stop_margin, final=False)
        self._stop_margin *= 2
        self._stop_live.clear()
        for rank in range(self.world):
            self._to(rank, self._stop)

    def stop_ack(self, rank: int, ack: StopAck, now: float) -> None:
        """A rank told which step it is in."""
        if self._stop is None or ack.step != self._stop.step or self._stop.final:
            return
        self._stop_live[rank] = ack.live
        if len(self._stop_live) < self.world:
            return
        live = max(self._stop_live.values())
        if live > self._stop.step:
            self._ask_stop(live)
            return
        self._stop = StopAt(step=self._stop.step, final=True)
        self._say("stop", f"stopping after step {self._stop.step}", self._stop.step)
        for other in range(self.world):
            self._to(other, self._stop)

    # --- helpers ------------------------------------------------------------------------------------

    def _to(self, rank: int, body: Go | Abort | StopAt | Finish) -> None:
        self._out.append(ToRank(rank=rank, inc=self.members[rank].inc, body=body))

    def _say(self, kind: str, text: str, step: int = 0) -> None:
        self._out.append(Notice(kind=kind, text=text, step=step))

    def incarnations(self) -> Sequence[int]:
        """Present incarnation of each rank."""
        return [member.inc for member in self.members]
