"""The observer: ``keepstep run`` where another launcher starts the ranks. One per node, no torch.

One thread, one loop, as in the agent: nothing here waits for storage, a rank or the launcher. It
never starts, ends or replaces a rank by itself: it writes down what happens, and ends everything
once policy says that the run is over.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable

from keepstep import events
from keepstep.agent.console import Console
from keepstep.agent.files import EventFiles
from keepstep.agent.hangs import HangWatch
from keepstep.agent.health_watch import HealthWatch
from keepstep.agent.launch_spec import Launch
from keepstep.agent.observe.beats import Beats, bounds
from keepstep.agent.observe.failures import nobody
from keepstep.agent.observe.far import FarNodes
from keepstep.agent.observe.helpers import Boards, Helpers
from keepstep.agent.observe.launcher_log import LauncherLog, launcher_log
from keepstep.agent.observe.rounds import Rounds
from keepstep.agent.observe.seats import Ended, Gone, Occupant, Seats, Seen, Started, Told
from keepstep.agent.observe.state import State
from keepstep.agent.observe.waiter import Waiter
from keepstep.agent.store_host import MODULE as STORE_HOST
from keepstep.agent.tail import Tails
from keepstep.clock import SYSTEM
from keepstep.errors import ExitCode, UsageError
from keepstep.policy.ladder import SCRIPT_KINDS
from keepstep.policy.nvrx_limits import NvrxLimits
from keepstep.ports import Finding, HealthCheck
from keepstep.wire.messages import JobEnd, Notice

_TICK_S = 0.05
_RANKS_S = 0.2
"""From the signal that stops the launcher until the ranks are killed."""
_ALL_S = 5.0
"""From that signal until whatever is left is killed."""
"""Kubernetes' number of this pod in an indexed job."""


class Observer:
    """Runs one job on one node under another launcher. Used as ``Agent`` is.

    Args:
        spec: What is launched. command, environ: the launcher's.
        limits: What the launcher was told. console: where people look. checks: of the node's
            health. store_host: the module that hosts the store outside the ranks. lost: says, once
            another job has taken the folder of checkpoints, who it is.

    Raises:
        UsageError: the store's port cannot be used, or this node of several has no number.
    """

    def __init__(
        self,
        spec: Launch,
        command: list[str],
        environ: dict[str, str],
        limits: NvrxLimits,
        console: Console,
        checks: list[HealthCheck],
        store_host: str = STORE_HOST,
        lost: Callable[[], str] = str,
    ) -> None:
        self._lost = lost
        self._spec = spec = numbered(spec)
        self._console = console
        node, in_process = spec.node_rank or 0, spec.config.engine.parts.restart == "nvrx"
        name = f"agent-{node}-{int(SYSTEM.wall())}-{os.getpid()}.jsonl"
        self._files = EventFiles(spec.run_dir / "events", name)
        self.recorder = events.Recorder(
            self._files.put, run=spec.run_id, src="agent", node=node, world=spec.world
        )
        self._waiter = Waiter()
        self._tails = Tails(console.show)
        self._log = LauncherLog(launcher_log(spec))
        self._health = HealthWatch(checks, self._waiter.wake)
        self._watch = _hang_watch(spec, limits, in_process=in_process)
        self._beats = Beats(limits, in_process=in_process)
        self._state = State(
            world=spec.world if node == 0 else spec.nproc,
            config=spec.config,
            decides=node == 0,
            several=spec.nnodes > 1,
        )
        self._far = FarNodes(spec, self._state) if spec.nnodes > 1 else None
        self._rounds = self._new_rounds(limits)
        self._boards = Boards(spec.nproc)
        try:
            self._helpers = Helpers(spec, command, environ, self._boards.paths, store_host)
        except BaseException:
            self._never_ran()
            raise
        self._seats = Seats(
            spec,
            self._boards.boards,
            self._waiter,
            self._files,
            self._tails,
            self._helpers.attach,
            self._log.codes,
        )
        self._end: JobEnd | None = None
        self._end_at = 0.0
        self._notice_at = 0.0
        self._asked = False
        self._signal = ""
        self._hurry = False
        self.failed_later: list[int] = []
        """Always empty: this launcher waits for every rank."""

    def _new_rounds(self, limits: NvrxLimits) -> Rounds:
        return Rounds(
            self._state,
            self.recorder.emit,
            kill_after_s=limits.termination_grace,
            hard_s=limits.hard - limits.soft + limits.termination_grace,
            silent_s=limits.soft,
            forward=self._far.failed if self._far is not None else nobody,
        )

    # --- life -------------------------------------------------------------------------------------

    def run(self) -> JobEnd:
        """Watch the job to its end; returns how it ended."""
        spec, helpers = self._spec, self._helpers
        self.recorder.emit(events.NodeBegin(pid=os.getpid(), local_world=spec.nproc))
        self._rounds.begin()
        self._waiter.add(helpers.sock.fileno(), helpers.heard)
        try:
            while not helpers.ended:
                self._waiter.turn(_TICK_S)
                self._tick(SYSTEM.mono())
            self._waiter.remove(helpers.sock.fileno())
            self._log.poll(whole=True)
            now = SYSTEM.mono()
            self._take(self._seats.end_all(now), now)
            self._hear(now)
            self._say()
            end = self._end or self._launcher_ended(now)
            if self._far is not None and end.exit_code not in (0, ExitCode.STOPPED_ON_NOTICE):
                self._far.ended(end)
        finally:
            self._close()
        return end

    def notice(self, number: int) -> None:
        """Signal handler: the run is asked to stop; a second signal ends it at once."""
        self._hurry = bool(self._signal)
        self._signal = self._signal or signal.Signals(number).name
        self._waiter.wake()

    def found(self, finding: Finding) -> None:
        """Record a health finding; a node that must be replaced ends here."""
        self.recorder.emit(
            events.HealthFinding(check=finding.check, status=finding.status, detail=finding.detail)
        )
        if finding.status == "bad":
            self._console.say(f"health check {finding.check} is bad: {finding.detail}")
        if finding.action == "replace_node":
            text = f"this node is unhealthy: {finding.check}: {finding.detail}"
            self._finish(ExitCode.NODE_UNHEALTHY, text)

    def _never_ran(self) -> None:
        self._boards.close()
        self._waiter.close()
        self._files.close()
        if self._far is not None:
            self._far.close()

    def _close(self) -> None:
        self._seats.close()
        self._helpers.close()
        if self._far is not None:
            self._far.close()
        self._health.close(limit_s=5.0)
        self._log.close()
        self._boards.close()
        self._waiter.close()

    def close_files(self) -> bool:
        """Write the last events; False if storage does not take them."""
        return self._files.close()

    # --- the loop ---------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        self._log.poll()
        self._take(self._seats.look(now), now)
        self._tails.poll()
        living = self._seats.living
        for who in living:
            self._beat(who, now)
        self._hear(now)
        if self._end is None:
            self._look_for_hangs(living, now)
            self._rounds.progress(now)
            self._admit()
            self._watch_helpers()
        for finding in self._health.take():
            self.found(finding)
        self._say()
        self._stop_on_notice(now)
        self._end_launcher(now)
        if living:
            board = living[0].board
            self._console.progress(board.done, board.step_s, board.loss, now)

    def _take(self, seen: list[Seen], now: float) -> None:
        for one in seen:
            match one:
                case Started(who):
                    self._rounds.started(who, now)
                case Told(who, event):
                    self._rounds.told(who, event, now)
                case Gone(who):
                    self._rounds.gone(who, now)
                case Ended(who, code, known):
                    self._watch.forget(who)
                    beat = self._beats.last(who.rank)
                    if beat is not None:
                        self.recorder.emit(beat, rank=who.rank, step=who.step)
                    self._rounds.ended(who, code, known, now)
            if self._far is not None:
                self._far.saw(one, now)

    def _hear(self, now: float) -> None:
        """What the other nodes tell."""
        if self._far is None:
            return
        for one in self._far.take(self._rounds, now):
            if isinstance(one, JobEnd):
                self._finish(one.exit_code, f"node 0: {one.reason}")
                continue
            if one.kind in ("commit", "go"):
                self._state.committed = max(self._state.committed, one.step)
            self._say_notice(one)
        went_on, self._rounds.failures.went_on = self._rounds.failures.went_on, []
        self._far.went_on(went_on)

    def _beat(self, who: Occupant, now: float) -> None:
        beat = self._beats.look(who.rank, who.board, now)
        if beat is not None:
            self.recorder.emit(beat, rank=who.rank, step=who.step)

    def _look_for_hangs(self, living: list[Occupant], now: float) -> None:
        stalled, suspects = self._watch.look(living, now)
        for who, suspect in suspects:
            self.recorder.emit(suspect, rank=who.rank, step=who.step)
            self._console.say(
                f"rank {who.rank} is suspect: no progress for {suspect.idle_s:.1f} s in "
                f"{suspect.phase}, step {who.step} (limit {suspect.limit_s:.1f} s)"
            )
        if stalled is not None:
            if self._far is not None:
                self._far.stalled(stalled)
            self._rounds.failures.stalled(stalled, now)

    def _admit(self) -> None:
        """Ranks begin a round once its predecessor's failure is judged."""
        if self._state.decides:
            for board in self._boards.boards:
                board.admit(self._rounds.admitted)

    def _watch_helpers(self) -> None:
        lost = self._helpers.store_lost
        if lost:
            text = f"the process that hosts the store {lost} before the job was over"
            self._finish(ExitCode.INTERNAL, f"{text}; see {self._helpers.store_log}")
        taken = self._lost()
        if taken:  # the ranks commit by themselves, so they must not go on
            self._finish(ExitCode.USAGE, taken)

    def _say(self) -> None:
        for one in self._rounds.take():
            if isinstance(one, JobEnd):
                self._finish(one.exit_code, one.reason)
            elif self._far is None:
                self._say_notice(one)
            elif self._state.decides:  # it says what happened on every node
                self._far.said(one)
                self._say_notice(one)

    def _say_notice(self, notice: Notice) -> None:
        if notice.kind == "restart":
            self._health.start()
        self._console.notice(notice)

    # --- stopping ---------------------------------------------------------------------------------

    def _stop_on_notice(self, now: float) -> None:
        heard = self._state.signal  # by a rank, of another node
        self._signal = self._signal or heard
        if not self._signal or self._end is not None:
            return
        grace = self._spec.config.run.grace_s
        number = signal.Signals[self._signal]
        if not self._notice_at:
            self._notice_at = now
            self._state.signal = self._signal
            if not heard:
                self.recorder.emit(events.StopNotice(signal=self._signal))
            where = " on another node" if heard else ""
            self._console.say(
                f"{self._signal}{where}: ranks have {grace:.0f} s to commit a checkpoint"
            )
            self._ask_stop(number)
        elif now - self._notice_at >= grace or self._hurry:
            waited = now - self._notice_at
            text = f"{self._signal}: ended after {waited:.0f} s without a checkpoint of that time"
            self._finish(128 + number, text)

    def _ask_stop(self, number: int) -> None:
        """Ask the ranks to stop after a step that they agree on; a script without keepstep.run gets
        the signal instead."""
        state = self._state
        if not state.adopted:
            self._helpers.signal(number)
        elif state.at_work:
            for board in self._boards.boards:
                board.ask_stop(number)
        else:
            when = "during a restart" if state.round else "before the round began"
            self._rounds.failures.stopped(when)

    def _finish(self, code: int, reason: str) -> None:
        """The run is over before the launcher says so: stop it."""
        if self._end is None:
            self._state.over = True
            self._end = JobEnd(exit_code=int(code), reason=reason, graceful=False)
            self._end_at = SYSTEM.mono()
            if self._far is not None:
                self._far.ended(self._end)
            self._helpers.signal(signal.SIGTERM)

    def _end_launcher(self, now: float) -> None:
        """It leaves in its own way, so that it removes its files; then it is not waited for."""
        if self._end is None:
            return
        if now - self._end_at >= _RANKS_S:
            self._seats.kill()
        if now - self._end_at >= _ALL_S:
            self._helpers.kill()

    def _launcher_ended(self, now: float) -> JobEnd:
        """The launcher ended by itself: why, as well as it is known."""
        code = self._helpers.code
        wrong = {rank: who.code for rank, who in self._seats.last.items() if who.code}
        if code == 0 and not self._log.unhealthy and (self._state.signal or not wrong):
            exit_code, reason = self._rounds.finished()
            return JobEnd(exit_code=exit_code, reason=reason, graceful=True)
        if self._state.signal and not self._state.adopted:
            exit_code, reason = self._rounds.finished()  # its ranks took the signal as they do
            return JobEnd(exit_code=exit_code, reason=reason, graceful=True)
        failure = self._rounds.failures.gave_up(now)
        self._say()
        if self._end is not None:
            return self._end
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        text = f"the launcher {how} before the job was over; see {self._helpers.log}"
        exit_code = ExitCode.INTERNAL
        if self._log.unhealthy:
            exit_code, text = ExitCode.NODE_UNHEALTHY, f"{text}: it calls this node unhealthy"
        elif failure is not None and code >= 0:
            script = failure.cause in SCRIPT_KINDS
            exit_code = ExitCode.SCRIPT_FAILED if script else ExitCode.INTERNAL
            text = f"{failure.line}, and {text}"
        for line in self._log.last_lines:
            self._console.show(2, f"[launcher] {line}")
        return JobEnd(exit_code=int(exit_code), reason=text, graceful=True)


def _hang_watch(spec: Launch, limits: NvrxLimits, *, in_process: bool) -> HangWatch[Occupant]:
    floor = spec.config.heartbeat.min_limit_s
    return HangWatch[Occupant](
        lambda phase: bounds(phase, limits, in_process=in_process, floor_s=floor),
        spec.run_dir,
        _TICK_S,
    )


def numbered(spec: Launch) -> Launch:
    """``spec`` with this node's number.

    Raises:
        UsageError: it is one of several, and nobody said which.
    """
    if spec.nnodes == 1:
        return spec
    if spec.number is not None and spec.number < spec.nnodes:
        return dataclasses.replace(spec, node_rank=spec.number)
    raise UsageError(
        f"this is one of {spec.nnodes} nodes, and its number is not known",
        done="Nothing was started",
        advice="Give --node-rank, from 0 on another number on every node; node 0 is the one of "
        "--rdzv-endpoint",
    )
