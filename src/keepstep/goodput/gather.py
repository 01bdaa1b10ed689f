"""Builds the timeline of a run from its events, given in any order. Pure.

Never raises on odd input: an event whose data does not fit its kind is evidence of time only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import msgspec

from keepstep import events as ev
from keepstep.events import Event, EventData
from keepstep.goodput.timeline import Evidence, Injected, Launch, Restart, Round, Span

STALL = "checkpoint_stall"


def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds in ``seconds``, to the microsecond: a float of seconds since the epoch
    holds no more."""
    return round(seconds * 1e6) * 1000


def gather(events: Iterable[Event]) -> list[Launch]:
    """Sort ``events`` into launches, oldest first."""
    builder = _Builder()
    for event in sorted(events, key=_order):
        builder.add(event)
    for launch in builder.launches:
        _close_spans(launch)
        _settle_rounds(launch)
        _infer_restarts(launch)
        _match_faults(launch)
        for restart in launch.restarts:
            restart.fault = _fault_time(launch, restart)
    return builder.launches


def _order(event: Event) -> tuple[object, ...]:
    """A total order that does not depend on the order of files."""
    numbers = [-1 if n is None else n for n in (event.rank, event.round, event.step)]
    head = (nanoseconds(event.t), event.src, event.node, numbers[0], event.seq)
    return (*head, event.kind, *numbers[1:], event.mono)


class _Builder:
    """Takes events in time order.

    A launch opens with a ``run.begin`` of node 0. Where the agent's events are missing it is seen
    from a round number that goes back, or a rank that joins again a round in which it worked.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._begun = False
        self._round_of: dict[int, int] = {}
        self._worked: set[int] = set()

    def add(self, event: Event) -> None:
        t = nanoseconds(event.t)
        if not self.launches or self._opens_launch(event):
            self.launches.append(Launch(begin=t, end=t))
            self._begun = False
            self._round_of.clear()
            self._worked.clear()
        launch = self.launches[-1]
        launch.end = max(launch.end, t)
        launch.run = launch.run or event.run
        self._begun = self._begun or event.kind == "run.begin"
        if event.src == "rank" and event.rank is not None:
            self._note_rank(launch, t, event, event.rank)
        handler = _HANDLERS.get(event.kind)
        if handler is None:
            return
        try:
            data = ev.data_of(event)
        except msgspec.ValidationError:
            return
        if data is not None:
            handler(launch, t, event, data)

    def _opens_launch(self, event: Event) -> bool:
        if event.kind == "run.begin":
            return event.node == 0 and (self._begun or bool(self._round_of))
        if not event.round:
            return False
        if event.kind in ("round.begin", "round.ready"):
            told = [number for number, entry in self.launches[-1].rounds.items() if entry.told]
            return event.round <= max(told, default=-1)
        if event.src != "rank" or event.rank is None:
            return False
        before = self._round_of.get(event.rank, event.round)
        again = event.kind == "rank.joined" and event.rank in self._worked
        return event.round < before or (again and event.round == before)

    def _note_rank(self, launch: Launch, t: int, event: Event, rank: int) -> None:
        launch.last_rank_event = max(launch.last_rank_event, t)
        number = _number(launch, event)
        if self._round_of.get(rank) != number:
            self._round_of[rank] = number
            self._worked.discard(rank)
        if event.kind in ("step.end", "restore.begin"):
            self._worked.add(rank)
        entry = launch.round(number)
        entry.seen.add(rank)
        entry.world = max(entry.world, event.world or 0)
        if event.kind != "rank.joined":
            entry.last_seen[rank] = t


def _number(launch: Launch, event: Event) -> int:
    """The round of an event; where its head has none (0: a rank under another launcher that has
    not joined one), the newest one that was ready."""
    if event.round:
        return event.round
    return max((number for number, entry in launch.rounds.items() if entry.told), default=0)


# --- one handler per kind of event ---------------------------------------------------------------


def _run_begin(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if isinstance(data, ev.RunBegin):
        launch.engine = data.engine
        launch.run = event.run


def _run_end(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if isinstance(data, ev.RunEnd) and event.node == 0:
        launch.exit_code = data.exit_code


def _round_ready(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if isinstance(data, ev.RoundReady) and event.round is not None:
        entry = launch.round(event.round)
        if not entry.told:
            entry.told, entry.ready, entry.resume = True, t, data.resume
            entry.pids = {int(rank): pid for rank, pid in data.pids.items() if rank.isdigit()}


def _restart_begin(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if isinstance(data, ev.RestartBegin):
        launch.restarts.append(Restart(begin=t, round=event.round, first_kind=data.first_kind))


def _restart_cause(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if not isinstance(data, ev.RestartCause):
        return
    waiting = [restart for restart in launch.restarts if restart.cause is None]
    same = [restart for restart in waiting if restart.round == event.round]
    if same or waiting:
        restart = (same or waiting)[0]
    else:  # a second failure during the same recovery
        restart = Restart(begin=t, round=event.round, first_kind=data.cause)
        launch.restarts.append(restart)
    restart.cause, restart.cause_t = data, t


def _rank_exit(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if isinstance(data, ev.RankExit) and data.code != 0 and not data.by_us:
        cause = "oom" if data.oom else "killed" if data.code < 0 else "exit"
        launch.evidence.append(Evidence(t, event.rank, cause, t))


def _rank_hung(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if isinstance(data, ev.RankHung):
        since = t - nanoseconds(max(0.0, data.idle_s))
        launch.evidence.append(Evidence(t, event.rank, "hang", since))


def _rank_failed(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if isinstance(data, ev.RankFailed):
        launch.evidence.append(Evidence(t, event.rank, data.failure, t))


def _rank_joined(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if isinstance(data, ev.RankJoined) and event.rank is not None and event.round is not None:
        entry = launch.round(event.round)
        entry.joined[event.rank] = t
        if not entry.told:
            entry.pids[event.rank] = data.pid


def _step_end(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if not isinstance(data, ev.StepEnd) or event.rank is None or event.step is None:
        return
    entry, rank, step = launch.round(_number(launch, event)), event.rank, event.step
    begin = t - nanoseconds(max(0.0, data.s))
    launch.begin = min(launch.begin, begin)
    lowest, _ = entry.ends.get(step, (rank, t))
    if rank <= lowest:
        entry.ends[step] = (rank, t)
    entry.newest[rank] = max(entry.newest.get(rank, step), step)
    entry.firsts.setdefault(rank, (begin, t))


def _section_begin(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if isinstance(data, ev.SectionBegin) and event.rank is not None:
        entry = launch.round(_number(launch, event))
        entry.open_sections.setdefault(event.rank, []).append((t, data.name))


def _section_end(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if not isinstance(data, ev.SectionEnd) or event.rank is None:
        return
    entry = launch.round(_number(launch, event))
    for at, (begin, name) in reversed(list(enumerate(entry.open_sections.get(event.rank, [])))):
        if name == data.name:
            del entry.open_sections[event.rank][at]
            entry.spans.setdefault(event.rank, []).append(Span(begin, t, f"section:{name}"))
            return


def _staged(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if isinstance(data, ev.CheckpointStaged) and event.rank is not None:
        entry = launch.round(_number(launch, event))
        begin = t - nanoseconds(max(0.0, data.stall_s))
        entry.spans.setdefault(event.rank, []).append(Span(begin, t, STALL))


def _copied(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if isinstance(data, ev.CheckpointCopied) and event.rank is not None:
        entry = launch.round(_number(launch, event))
        begin = t - nanoseconds(max(0.0, data.waited_s))
        entry.spans.setdefault(event.rank, []).append(Span(begin, t, STALL))


def _commit(launch: Launch, t: int, event: Event, data: EventData) -> None:
    launch.commits.append(t)


def _restore_begin(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if event.rank is not None:
        launch.round(_number(launch, event)).loading[event.rank] = t


def _restore_end(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if not isinstance(data, ev.RestoreEnd) or event.rank is None:
        return
    entry = launch.round(_number(launch, event))
    begin = entry.loading.pop(event.rank, t - nanoseconds(max(0.0, data.s)))
    entry.restores.append(Span(begin, t, "restore"))
    entry.restored = event.step if entry.restored is None else entry.restored


def _fault_injected(launch: Launch, t: int, event: Event, data: EventData) -> None:
    if isinstance(data, ev.FaultInjected):
        number = _number(launch, event)
        launch.injected.append(Injected(t, event.rank, event.step, number, data.fault))


_HANDLERS: dict[str, Callable[[Launch, int, Event, EventData], None]] = {
    "run.begin": _run_begin,
    "run.end": _run_end,
    "round.ready": _round_ready,
    "restart.begin": _restart_begin,
    "restart.cause": _restart_cause,
    "rank.exit": _rank_exit,
    "rank.hung": _rank_hung,
    "rank.failed": _rank_failed,
    "rank.joined": _rank_joined,
    "step.end": _step_end,
    "section.begin": _section_begin,
    "section.end": _section_end,
    "checkpoint.staged": _staged,
    "checkpoint.copied": _copied,
    "checkpoint.commit": _commit,
    "restore.begin": _restore_begin,
    "restore.end": _restore_end,
    "fault.injected": _fault_injected,
}


# --- when all events of a launch are there --------------------------------------------------------


def _close_spans(launch: Launch) -> None:
    """A section whose end is missing ends with the last evidence of its rank."""
    for entry in launch.rounds.values():
        for rank, sections in entry.open_sections.items():
            for begin, name in sections:
                end = max(begin, entry.last_seen.get(rank, begin))
                entry.spans.setdefault(rank, []).append(Span(begin, end, f"section:{name}"))


def _settle_rounds(launch: Launch) -> None:
    """Find out which rounds ran, and when those became ready that no coordinator announced."""
    announced = any(entry.told for entry in launch.rounds.values())
    for entry in launch.rounds.values():
        work = entry.first_work()
        if entry.told:  # a script without keepstep.run steps before its round is announced
            ready = entry.ready or 0
            entry.ready = ready if work is None else min(ready, work)
            continue
        joins = [t for t in entry.joined.values() if work is None or t <= work]
        if work is not None:
            entry.ready = max(joins, default=work)
        elif not announced and joins and entry.expected() <= set(entry.joined):
            entry.ready = max(joins)
    ran = [entry for entry in launch.rounds.values() if entry.ready is not None]
    launch.ran = sorted(ran, key=lambda entry: (entry.ready or 0, entry.number))


def _infer_restarts(launch: Launch) -> None:
    """Between two rounds that ran there was a restart, whether or not a coordinator wrote it."""
    for old, new in itertools.pairwise(launch.ran):
        low, high = old.ready or 0, new.ready or 0
        if any(low <= restart.begin <= high for restart in launch.restarts):
            continue
        signs = [(e.t, e.cause) for e in launch.evidence if low <= e.t <= high]
        signs += [(t, "unknown") for t in new.joined.values() if low <= t <= high]
        begin, cause = min(signs, default=(high, "unknown"))
        launch.restarts.append(Restart(begin, old.number, cause, cause_t=begin, inferred=True))
    launch.restarts.sort(key=lambda restart: restart.begin)


def _match_faults(launch: Launch) -> None:
    """Find for each restart the drill's fault behind it, then those that it answered too."""
    written = [restart for restart in launch.restarts if not restart.inferred]
    for restart in written:
        guilty = restart.cause.guilty if restart.cause else -1
        pool = _open_faults(launch, 0, max(restart.begin, restart.cause_t))
        if guilty >= 0:
            pool = [fault for fault in pool if fault.rank == guilty]
        else:
            pool = [fault for fault in pool if not _went_on(launch, fault)]
        before = [fault for fault in pool if fault.t <= restart.begin]
        for fault in (before or pool)[-1:]:
            fault.matched, restart.injected = True, fault
    for restart in written:
        last, following = launch.round_before(restart.begin), launch.round_after(restart.begin)
        low = last.ready if last and last.ready else launch.begin
        high = following.ready if following and following.ready else launch.end
        hit = restart.cause.consequences if restart.cause else []
        for fault in _open_faults(launch, low, high):
            if _went_on(launch, fault):
                continue
            signs = [e for e in launch.evidence if e.rank == fault.rank and fault.t <= e.t <= high]
            if signs or fault.rank in hit:
                fault.matched, fault.found = True, min(signs, key=lambda e: e.t, default=None)
                restart.also.append(fault)


def _open_faults(launch: Launch, low: int, high: int) -> list[Injected]:
    return [fault for fault in launch.injected if low <= fault.t <= high and not fault.matched]


def _went_on(launch: Launch, fault: Injected) -> bool:
    """Whether the rank completed more than the next step after the fault: it had no effect."""
    entry = launch.rounds.get(fault.round, Round(fault.round))
    newest = entry.newest.get(-1 if fault.rank is None else fault.rank, 0)
    return fault.step is not None and newest > fault.step + 1


def _fault_time(launch: Launch, restart: Restart) -> int:
    """When the failure happened, not after it was known."""
    if restart.injected:
        return min(restart.begin, restart.injected.t)
    before = launch.round_before(restart.begin)
    low = launch.begin if before is None or before.ready is None else before.ready
    signs = [e for e in launch.evidence if low <= e.t <= restart.begin]
    times = [max(low, e.since) for e in signs] + [fault.t for fault in restart.also]
    if restart.inferred:
        times += [f.t for f in launch.injected if not _went_on(launch, f)]
    return min([t for t in times if low <= t <= restart.begin], default=restart.begin)
