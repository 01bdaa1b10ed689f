"""Any order of messages, deaths and time: what must hold always, and that the job gets on.

``Cluster`` checks every message of the coordinator (one Go a round and rank, only to a process that
has joined; one Replace a process, only once a cause is known). Here ranks and the agent act late
and in any order, and in the end everybody does what is due: the job must come to its end.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from keepstep.wire.messages import Abort, Finish, Go, Join, RankDown, RankUp, Replace
from tests.coordinator.cluster import Cluster, Process, config

PICK = st.integers(0, 1000)
FAILURES = st.sampled_from(["exception", "timeout", "peer_lost", "checkpoint"])
CODES = st.sampled_from([-9, -11, 1, 0])


class Interleavings(RuleBasedStateMachine):
    """A job whose parts act in any order."""

    adopted = True

    @initialize(world=st.integers(1, 3), budget=st.sampled_from([1, 5]))
    def begin(self, world: int, budget: int) -> None:
        self.job = Cluster(
            world,
            config(max_without_progress=budget),
            adopted=self.adopted,
            automatic=False,
        )
        self.deaths: list[RankDown] = []
        """Processes that have ended, of which the coordinator does not know yet."""
        self.wanted: list[Replace] = []
        """Rank numbers for which the agent has no process yet."""
        self.before = 0
        for rank in range(world):
            self.announce(rank)

    # --- agent and ranks -------------------------------------------------------------------------

    def announce(self, rank: int) -> None:
        process = self.job.processes[rank]
        self.job.rounds.rank_up(RankUp(rank=rank, inc=process.inc, pid=process.pid), self.job.now)
        self.job.pump()

    def end_process(self, rank: int, code: int, by_us: bool) -> None:
        process = self.job.processes[rank]
        process.state = "dead"
        self.deaths.append(
            RankDown(
                rank=rank,
                inc=process.inc,
                code=code,
                oom=False,
                by_us=by_us,
                step=3,
                t=self.job.now,
            )
        )

    def ranks(self, *states: str) -> list[int]:
        return [rank for rank, p in enumerate(self.job.processes) if p.state in states]

    def of(self, pick: int, *states: str) -> int | None:
        found = self.ranks(*states)
        return found[pick % len(found)] if found else None

    def read(self, rank: int, inc: int, body: object) -> None:
        process = self.job.processes[rank]
        if process.inc != inc:
            return
        match body:
            case Go(round=number) if process.state == "joined":
                process.state, process.round = "running", number
            case Abort(round=number) if process.state in ("running", "failed", "returned"):
                process.state = "left" if process.round == number else process.state
            case Finish() if process.state == "returned":
                process.state = "over"
            case _:
                pass

    @precondition(lambda self: self.ranks("starting", "left"))
    @rule(pick=PICK)
    def a_rank_joins(self, pick: int) -> None:
        rank = self.of(pick, "starting", "left")
        if rank is not None:
            self.join(rank)

    def join(self, rank: int) -> None:
        process = self.job.processes[rank]
        process.state = "joined"
        join = Join(inc=process.inc, after_round=process.round)
        self.job.rounds.join(rank, join, self.job.now)
        self.job.pump()

    @precondition(lambda self: self.job.inbox)
    @rule(pick=PICK)
    def a_rank_reads(self, pick: int) -> None:
        rank, _, _ = self.job.inbox[pick % len(self.job.inbox)]
        place = next(n for n, entry in enumerate(self.job.inbox) if entry[0] == rank)
        self.read(*self.job.inbox.pop(place))

    @precondition(lambda self: self.ranks("running"))
    @rule(pick=PICK, failure=FAILURES, error=st.sampled_from(["E1", "E2"]), step=st.integers(1, 9))
    def a_rank_fails(self, pick: int, failure: str, error: str, step: int) -> None:
        rank = self.of(pick, "running")
        if rank is not None:
            self.job.processes[rank].state = "failed"
            self.job.fail(rank, failure, error, step=step)

    @rule(pick=PICK, code=CODES)
    def a_process_ends(self, pick: int, code: int) -> None:
        alive = ("starting", "joined", "running", "failed", "left", "returned")
        rank = self.of(pick, *alive)
        if rank is not None:
            self.end_process(rank, code, by_us=False)

    @precondition(lambda self: self.deaths)
    @rule()
    def the_agent_notices_a_death(self) -> None:
        down = self.deaths.pop(0)
        self.job.rounds.rank_down(down, self.job.now)
        self.job.pump()
        self.give_numbers_away()

    @precondition(lambda self: self.job.orders)
    @rule()
    def the_agent_obeys(self) -> None:
        order = self.job.orders.pop(0)
        process = self.job.processes[order.rank]
        if process.inc == order.inc and process.state not in ("dead", "over"):
            self.end_process(order.rank, -9, by_us=True)
        if isinstance(order, Replace):
            self.wanted.append(order)
        self.give_numbers_away()

    def give_numbers_away(self) -> None:
        """As the agent: only once the process before is known to have ended."""
        for order in list(self.wanted):
            if any(down.rank == order.rank for down in self.deaths):
                continue
            self.wanted.remove(order)
            self.job.processes[order.rank] = Process(order.inc + 1, 2000 + len(self.job.sent))
            self.announce(order.rank)

    @precondition(lambda self: self.ranks("running"))
    @rule(pick=PICK)
    def a_rank_returns(self, pick: int) -> None:
        rank = self.of(pick, "running")
        if rank is not None:
            self.job.finish(rank)

    @precondition(lambda self: self.ranks("running"))
    @rule(pick=PICK, state=st.sampled_from("ST"))
    def ranks_stall(self, pick: int, state: str) -> None:
        rank = self.of(pick, "running")
        seen = [self.job.evidence(other) for other in self.ranks("running") if other != rank]
        if rank is not None:
            self.job.stall(*seen, self.job.evidence(rank, state=state, seq=99))

    @rule(seconds=st.sampled_from([0.05, 0.5, 2.0, 6.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.job.wait(seconds)

    @rule(step=st.integers(1, 9))
    def a_save_commits(self, step: int) -> None:
        if self.job.rounds.state == "running":
            self.job.commit(self.job.stage(step))

    # --- what must hold --------------------------------------------------------------------------

    @invariant()
    def all_go_or_none(self) -> None:
        for number, goes in self.job.goes.items():
            assert len(goes) == self.job.world, f"round {number} went on with {goes}"
            assert len({go.resume for _, go in goes.values()}) == 1

    @invariant()
    def nobody_is_flooded(self) -> None:
        new, self.before = len(self.job.sent) - self.before, len(self.job.sent)
        assert new <= 8 + 6 * self.job.world

    @invariant()
    def the_coordinator_knows_of_no_process_that_is_not_there(self) -> None:
        for rank, member in self.job.rounds.members:
            assert member.inc <= self.job.processes[rank].inc

    def teardown(self) -> None:
        """Everybody does what is due; nothing fails any more. The job must end."""
        if not hasattr(self, "job"):
            return
        for _ in range(60):
            if self.job.end is not None:
                break
            self.all_do_what_is_due()
            self.all_go_or_none()
        assert self.job.end is not None, f"stuck: {self.describe()}"
        assert self.job.end.exit_code in (0, 65, 76, 78)

    def all_do_what_is_due(self) -> None:
        while self.job.orders:
            self.the_agent_obeys()
        while self.deaths:
            self.the_agent_notices_a_death()
        while self.job.inbox:
            self.read(*self.job.inbox.pop(0))
        for rank in self.ranks("starting", "left"):
            self.come_back(rank)
        for rank in self.ranks("running"):
            self.job.finish(rank)
        self.job.wait(0.6)

    def come_back(self, rank: int) -> None:
        self.join(rank)

    def describe(self) -> str:
        rounds = self.job.rounds
        members = [(m.inc, m.state) for _, m in rounds.members]
        return f"{rounds.state}, members {members}, processes {self.job.processes}"


class PlainScripts(Interleavings):
    """The same with a script that does not use keepstep.run: processes only start, step and end."""

    adopted = False

    @precondition(lambda self: self.ranks("starting"))
    @rule(pick=PICK)
    def a_rank_joins(self, pick: int) -> None:
        rank = self.of(pick, "starting")
        if rank is not None:
            self.job.step(rank, 1 + pick % 5)

    def come_back(self, rank: int) -> None:
        self.end_process(rank, 0, by_us=False)


def test_whatever_the_order_the_job_keeps_its_rules_and_ends() -> None:
    run_state_machine_as_test(
        Interleavings, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )


def test_whatever_the_order_a_job_of_plain_scripts_keeps_its_rules_and_ends() -> None:
    run_state_machine_as_test(
        PlainScripts, settings=settings(max_examples=80, stateful_step_count=25, deadline=None)
    )
