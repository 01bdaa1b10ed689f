"""Rounds: who is in, what failed, who is replaced, when all go on: the coordinator's core.

No I/O: messages come in with the time, messages for the agents go out. Policy (who is to blame,
what is done) is asked, not made here. One ``Rounds`` serves one job.

    forming --all joined--> running --a failure--> aborting --cause and level known--> forming
    running --all returned, last save settled--> done

A script that does not use keepstep.run never joins: its round runs once all its processes do.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from keepstep import events, policy
from keepstep.config import Config
from keepstep.coordinator.episode import Episode, early_report, ended_report, failed_report
from keepstep.coordinator.members import Member, Members
from keepstep.coordinator.resumption import Resumes, Resumption
from keepstep.coordinator.saves import Saves
from keepstep.coordinator.stopping import StopVote
from keepstep.errors import ExitCode, KeepstepError
from keepstep.wire.messages import (
    FROM_COORDINATOR,
    Abort,
    Evidence,
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


class Rounds:
    """The job's membership.

    Args:
        world: Number of ranks. config: settings. saves: Saves in flight. emit: writes an event.
        lineage: this coordinator's term, and where to resume from.
    """

    def __init__(
        self,
        world: int,
        config: Config,
        saves: Saves,
        emit: Emit,
        lineage: Resumes,
    ) -> None:
        self.world = world
        self._config = config
        self._saves = saves
        self._emit = emit
        self._from = Resumption(lineage)
        self.round = 1
        self.opened_round = 0
        """Newest round whose store may be used."""
        self.state = "forming"
        self.members = Members(world)
        self._adopted = False
        self._episode: Episode | None = None
        self._history: list[policy.Record] = []
        self._highest = 0
        self._first_steps_due = False
        self._stop: StopVote | None = None
        self._out: list[FROM_COORDINATOR] = []

    def begin(self) -> None:
        """The first round may form."""
        self._emit(events.RoundBegin(reason="the run starts"), round=self.round)

    def take(self) -> list[FROM_COORDINATOR]:
        """Messages to send since the last call."""
        out, self._out = self._out, []
        return out

    # --- membership -----------------------------------------------------------------------------

    def rank_up(self, up: RankUp, now: float) -> None:
        """A process was given a rank number."""
        self.members.put(up.rank, Member(inc=up.inc, pid=up.pid, state="starting", since=now))
        if self._history and not self._adopted:
            self._start_unadopted()

    def join(self, rank: int, join: Join, now: float) -> None:
        """A rank is ready for the next round."""
        member = self.members.find(rank, join.inc)
        if member is None or self.state == "done" or member.state in ("absent", "gone"):
            return  # a process that is being ended may still have said so
        member.state, member.since, member.seqs = "joined", now, join.seqs
        member.step = join.step if join.after_round == self.round else None
        self._emit(events.RankJoined(pid=member.pid), rank=rank, round=self._next_round)
        if not self._adopted:
            self._adopt(now)
        self.progress(now)

    def _adopt(self, now: float) -> None:
        """The script uses keepstep.run; until now it looked like one that does not."""
        self._adopted = True
        if self.state == "running":
            self.state = "forming"
        if self.state == "forming" and self._stop is not None:
            self._stopped("before the round began")
        if self.state == "forming":
            for rank in self.members.those(
                "gone"
            ):  # ended well, as it seemed, but before it joined
                self._failure(early_report(rank, now), "starting", "", now)

    @property
    def _next_round(self) -> int:
        return self.opened_round + 1

    def returned(self, rank: int, returned: Returned, now: float) -> None:
        """A rank's ``main`` returned."""
        member = self.members.find(rank, returned.inc)
        if member is None or self.state != "running" or returned.round != self.round:
            return
        member.state, member.saving = "returned", returned.saving
        self.progress(now)

    def stepped(self, message: Stepped, now: float) -> None:
        """A rank completed its first step of a round."""
        member = self.members.find(message.rank, message.inc)
        late = self.state == "done" or (self._adopted and message.round != self.round)
        if member is None or late:
            return
        self._highest = max(self._highest, message.step)
        member.stepped = True
        if not self._adopted:
            self._start_unadopted()
        all_stepped = all(m.stepped for _, m in self.members)
        if all_stepped:
            self.loaded()
        if self._first_steps_due and all_stepped:
            self._first_steps_due = False
            done = events.RestartEnd(resume=self._from.step, first_step=self._from.step + 1)
            self._emit(done, round=self.round)
            self._say("ready", f"round {self.round}: all {self.world} ranks train again")

    def _start_unadopted(self) -> None:
        if self.state != "forming" or not self.members.all_are("starting"):
            return
        self._open_round()
        self._ready()

    # --- failures -------------------------------------------------------------------------------

    def rank_failed(self, rank: int, failed: Failed, now: float) -> None:
        """A rank's own code failed."""
        member = self.members.find(rank, failed.inc)
        if member is None or self.state == "done":
            return
        about = events.RankFailed(
            failure=failed.failure, error=failed.error, location=failed.location
        )
        self._emit(about, rank=rank, step=failed.step)
        if failed.failure == "checkpoint" and not failed.fatal:
            if self._from.folder:
                self._refuse_checkpoint(failed.error)
            else:  # not of ours: the script's own error
                failed = msgspec.structs.replace(failed, failure="exception")
        member.told = member.told or failed.failure == "exception"
        member.seqs = failed.seqs
        self._failure(failed_report(rank, failed), member.state, failed.stack, now)

    def _refuse_checkpoint(self, error: str) -> None:
        if not self._from.refuse():
            return  # another rank found out first
        step, folder = self._from.step, self._from.folder
        self._emit(events.CheckpointUnusable(folder=folder, error=error), step=step)
        self._say("fail", f"checkpoint {folder} is not usable: {error}", step)

    def rank_down(self, down: RankDown, now: float) -> None:
        """A rank's process ended."""
        member = self.members.find(down.rank, down.inc)
        if member is None:
            return
        was, member.since = member.state, now
        if was == "absent" or self.state == "done":
            return  # it was replaced already, or it does not matter any more
        member.state = "gone"
        if not self._adopted and self._ended_unadopted(down):
            self.progress(now)
            return
        reported = self._episode is not None and member.told
        if down.by_us or (reported and down.code > 0):
            self._replace_gone()  # the cause is known already
            self.progress(now)
            return
        self._failure(ended_report(down, fresh=was == "starting"), was, "", now)

    def _ended_unadopted(self, down: RankDown) -> bool:
        """A rank of a script without keepstep.run ended in an orderly way."""
        if self._stop is None and down.code != 0:
            return False
        if self.state != "aborting" and self.members.all_are("gone"):
            reason = "the script ended on every rank"
            code = 0
            if self._stop is not None:
                code = ExitCode.STOPPED_ON_NOTICE
                reason = f"{reason} after {self._stop.signal}"
            self._end(code, reason, graceful=True)
        return True

    def stalled(self, stalled: Stalled, now: float) -> None:
        """Somebody made no progress beyond the limit."""
        current = [seen for seen in stalled.ranks if self.members.find(seen.rank, seen.inc)]
        if self.state != "running" or not current:
            return
        verdict = policy.blame(current)
        guilty = [seen for seen in current if seen.rank in verdict.guilty]
        for seen in guilty:
            self._hung(seen, verdict.reason)
        if self._config.heartbeat.on_hang == "report":
            self._say("fail", verdict.reason)
            return
        for seen in guilty:
            self.members[seen.rank].state = "gone"
            self._out.append(Kill(rank=seen.rank, inc=seen.inc, reason=verdict.reason))
        worst = max(current, key=lambda seen: seen.idle_s)
        for seen in guilty or [worst]:
            report = policy.Report(
                rank=seen.rank,
                t=now - seen.idle_s,
                kind="hang" if guilty else "timeout",
                step=seen.step,
                phase=seen.phase,
                error=verdict.reason,
                seqs=seen.seqs,
            )
            self._failure(report, "running", seen.stack, now)

    def _hung(self, seen: Evidence, reason: str) -> None:
        hung = events.RankHung(
            idle_s=round(seen.idle_s, 3),
            limit_s=round(seen.limit_s, 3),
            phase=seen.phase,
            evidence=reason,
            stack=seen.stack,
        )
        self._emit(hung, rank=seen.rank, step=seen.step)

    def _failure(self, report: policy.Report, was: str, stack: str, now: float) -> None:
        """Evidence of a failure by a member that was in state ``was``."""
        self._highest = max(self._highest, report.step)
        fresh_trouble = self.state == "forming" and was in ("starting", "joined")
        if self.state == "running" or fresh_trouble:
            self.state = "aborting"
            if not self._adopted:
                self.opened_round = self.round  # its processes met each other, in whatever state
            self._episode = Episode(report, stack, now)
            begun = events.RestartBegin(first_kind=report.kind)
            self._emit(begun, rank=report.rank, step=report.step)
            for rank in self.members.those("running", "returned"):
                self.members[rank].state, self.members[rank].since = "running", now
                self._to(rank, Abort(round=self.round, reason=f"rank {report.rank} failed"))
        elif self._episode is not None:
            self._episode.add(report, stack)
            self._replace_gone()
        self.progress(now)

    # --- deciding -------------------------------------------------------------------------------

    def progress(self, now: float) -> None:
        """Look whether something can be decided; call after every change and now and then."""
        if self.state == "aborting":
            self._decide(now)
        if self.state in ("aborting", "forming"):
            self._end_late_members(now)
        if self.state == "forming" and self.members.all_are("joined"):
            self._go(now)
        if self.state == "running" and self.members.all_are("returned"):
            self._finish()

    def _decide(self, now: float) -> None:
        episode, settle_s = self._episode, self._config.restart.settle_s
        accounted = set(self.members.those("joined", "gone"))
        if episode is None or not episode.settled(self.world, accounted, now, settle_s):
            return
        if self._stop is not None:
            self._stopped("after a failure")
            return
        found = episode.attribute(self.world, self.members.seqs(), settle_s)
        reached = policy.Progress(committed=self._saves.committed, highest=self._highest)
        decision = policy.decide(
            self._history, found, reached, self._config.restart, in_process=self._adopted
        )
        self._history.append(policy.Record.of(found, reached))
        cause = events.RestartCause(
            cause=found.cause,
            guilty=found.guilty,
            step=found.step if found.cause in policy.DEFINITE else self._oldest_step(episode),
            level=decision.level,
            reason=decision.reason,
            line=found.line,
            consequences=list(found.consequences),
            stack=episode.stack(found.guilty),
        )
        self._emit(cause, round=self.round)
        if decision.level == "stop":
            self._end(decision.exit_code, decision.reason, graceful=False)
            return
        self.state = "forming"
        self._say("restart", f"{found.line}; level {decision.level}: {decision.reason}")
        doomed = range(self.world) if decision.level == "respawn" else decision.replace
        for rank in doomed:
            self._replace(rank, found.line)
        self._replace_gone()

    def _oldest_step(self, episode: Episode) -> int:
        """The step that the world was in: a step is over only when every rank has completed it."""
        joined = [m.step for _, m in self.members if m.state == "joined" and m.step is not None]
        return min([*joined, *(report.step for report in episode.reports)])

    def _replace(self, rank: int, reason: str) -> None:
        member = self.members[rank]
        if member.state != "absent":
            member.state = "absent"
            self._out.append(
                Replace(rank=rank, inc=member.inc, round=self._next_round, reason=reason)
            )

    def _replace_gone(self) -> None:
        """Once it is decided that the job goes on, whoever is gone gets a successor."""
        if self.state == "forming" and self._history:
            for rank in self.members.those("gone"):
                self._replace(rank, "its process ended")

    def _end_late_members(self, now: float) -> None:
        """End whoever does not leave the aborted round; give up on who never arrives."""
        limits = self._config.restart
        for rank in self.members.those("running"):
            member = self.members[rank]
            waited = now - member.since
            if waited > limits.abort_limit_s:
                text = f"rank {rank} did not leave the aborted round within {waited:.0f} s"
                self._say("fail", text)
                member.state = "gone"
                self._out.append(Kill(rank=rank, inc=member.inc, reason=text))
                self._replace_gone()
        for rank in self.members.those("starting"):
            waited = now - self.members[rank].since
            if self._adopted and waited > limits.join_limit_s:
                text = f"rank {rank} did not reach keepstep.run within {waited:.0f} s"
                self._end(ExitCode.SCRIPT_FAILED, text, graceful=False)
                return

    # --- going on -------------------------------------------------------------------------------

    def _go(self, now: float) -> None:
        episode = self._episode
        waited = now - episode.first_t if episode is not None else math.inf
        if self._saves.will_finish() and waited < self._config.restart.save_wait_s:
            return  # a save that needs no rank any more is about to commit: lose less
        try:
            self._from.choose()
        except KeepstepError as error:
            self._end(error.exit_code, str(error), graceful=False)
            return
        except OSError as error:
            text = f"round {self._next_round} cannot begin: storage failed with {error}"
            self._end(ExitCode.CHECKPOINT, text, graceful=False)
            return
        self._open_round()
        self._saves.resume(self._from.step, self.round)
        for rank, member in self.members:
            member.state, member.stepped, member.saving = "running", False, 0
            member.told = False
            go = Go(
                term=self._from.term,
                round=self.round,
                resume=self._from.step,
                folder=self._from.folder,
            )
            self._to(rank, go)
        self._ready()

    def loaded(self) -> bool:
        """Every rank has loaded what this round resumes from, which is written down now.

        Returns:
            False if it cannot be; the job has been ended then.
        """
        try:
            self._from.loaded(self.round)
        except OSError as error:
            text = f"round {self.round} cannot be written down: storage failed with {error}"
            self._end(ExitCode.CHECKPOINT, text, graceful=False)
            return False
        return True

    def _open_round(self) -> None:
        if self.opened_round:
            self.round = self._next_round
            self._emit(events.RoundBegin(reason="restart"), round=self.round)
        self.opened_round = self.round
        self.state = "running"

    def _ready(self) -> None:
        ready = events.RoundReady(pids=self.members.pids(), resume=self._from.step)
        self._emit(ready, round=self.round)
        self._first_steps_due = self._first_steps_due or self._episode is not None
        self._episode = None
        text = f"round {self.round}: {self.world} ranks, {self._from.words}"
        self._say("go", text, self._from.step)

    def _finish(self) -> None:
        wanted = max(member.saving for _, member in self.members)
        if wanted and self._saves.pending(wanted):
            return
        code, reason = 0, "every rank finished"
        if wanted > self._saves.committed:
            code = ExitCode.CHECKPOINT
            reason = f"every rank finished, but the last save (step {wanted}) did not commit"
        elif self._stop is not None:
            code = ExitCode.STOPPED_ON_NOTICE
            reason = f"stopped on {self._stop.signal}; step {self._saves.committed} is committed"
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

    # --- stopping on notice -----------------------------------------------------------------------

    def stop_request(self, request: StopRequest, now: float) -> None:
        """SIGTERM or Ctrl-C: agree on a step, save it, end."""
        if self.state == "done" or self._stop is not None:
            return
        self._stop = StopVote(self.world, request.signal)
        if self.state == "running" and self._adopted:
            self._tell_all(self._stop.ask(request.live))
        elif self._adopted or self.state == "aborting":
            self._stopped("during a restart")
        # Else the agent has passed the signal on, and the script's processes end in their own way.

    def _stopped(self, when: str) -> None:
        if self._stop is not None:
            text = f"stopped on {self._stop.signal} {when}"
            reason = f"{text}; newest committed step {self._saves.committed}"
            self._end(ExitCode.STOPPED_ON_NOTICE, reason, graceful=False)

    def stop_ack(self, rank: int, ack: StopAck, now: float) -> None:
        """A rank told which step it is in."""
        known = self.members.find(rank, ack.inc) is not None and self.state != "done"
        told = self._stop.answered(rank, ack) if self._stop is not None and known else None
        if told is not None:
            if told.final:
                self._say("stop", f"stopping after step {told.step}", told.step)
            self._tell_all(told)

    # --- helpers ----------------------------------------------------------------------------------

    def _tell_all(self, body: StopAt) -> None:
        for rank in range(self.world):
            self._to(rank, body)

    def _to(self, rank: int, body: Go | Abort | StopAt | Finish) -> None:
        self._out.append(ToRank(rank=rank, inc=self.members[rank].inc, body=body))

    def _say(self, kind: str, text: str, step: int = 0) -> None:
        self._out.append(Notice(kind=kind, text=text, step=step))

    def incarnations(self) -> list[int]:
        """Present incarnation of each rank."""
        return [member.inc for _, member in self.members]
