"""Who may save into a folder: decisions, and leases as files."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint import lease
from keepstep.checkpoint.lease import Lease, LeaseFiles, Seen, Taker, claiming
from keepstep.errors import FolderInUse, SaveFailed

EXPIRY_S = 60.0
POLL_S = 1.0


def holder(name: str = "a", *, run: str = "", pid: int = 7) -> Lease:
    return Lease(
        run=run or f"run-{name}",
        host=f"host-{name}",
        boot=f"boot-{name}",
        pids="pid:[1]",
        pid=pid,
        started=100,
        since=1000.0,
    )


def taker(me: Lease, alive: bool | None = None, *, relieves: bool = False) -> Taker:
    return Taker(me, relieves=relieves, lives=lambda _: alive, expiry_s=EXPIRY_S, poll_s=POLL_S)


def watched(taker: Taker, seen: Seen | None, seconds: float) -> str:
    """The verdict after looking at the same thing for so many seconds."""
    verdict = taker.saw(seen, 0.0)
    for tick in range(1, int(seconds / POLL_S) + 1):
        if verdict != "wait":
            break
        verdict = taker.saw(seen, tick * POLL_S)
    return verdict


def test_a_folder_without_leases_is_free() -> None:
    assert taker(holder("b")).saw(None, 0.0) == "take"


def test_a_released_lease_is_free_at_once() -> None:
    seen = Seen(3, msgspec.structs.replace(holder(), released=True))
    assert taker(holder("b"), True).saw(seen, 0.0) == "take"


def test_a_holder_that_died_on_this_machine_is_relieved_at_once() -> None:
    assert taker(holder("b"), False).saw(Seen(3, holder()), 0.0) == "take"


def test_a_living_holder_of_this_machine_is_in_the_way_even_for_its_own_run() -> None:
    for relieves in (False, True):
        mine = holder("b", run="run-a")
        assert taker(mine, True, relieves=relieves).saw(Seen(3, holder()), 0.0) == "refuse"


def test_the_own_process_is_never_in_the_way() -> None:
    assert taker(holder(), True).saw(Seen(3, holder()), 0.0) == "take"


def test_a_start_of_the_same_run_elsewhere_is_relieved_only_where_terms_keep_them_apart() -> None:
    mine = holder("b", run="run-a")
    assert taker(mine, relieves=True).saw(Seen(3, holder()), 0.0) == "take"
    assert taker(mine, relieves=False).saw(Seen(3, holder()), 0.0) == "wait"
    assert taker(holder("b"), relieves=True).saw(Seen(3, holder()), 0.0) == "wait"


def test_a_holder_elsewhere_that_renews_is_in_the_way() -> None:
    one = taker(holder("b"))
    assert one.saw(Seen(3, holder()), 0.0) == "wait"
    renewed = msgspec.structs.replace(holder(), beat=1)
    assert one.saw(Seen(3, renewed), 5.0) == "refuse"


def test_a_silent_holder_elsewhere_is_relieved_after_the_expiry_and_not_before() -> None:
    assert watched(taker(holder("b")), Seen(3, holder()), EXPIRY_S - 1) == "wait"
    assert watched(taker(holder("b")), Seen(3, holder()), EXPIRY_S) == "take"


def test_an_unreadable_lease_is_waited_for_like_a_silent_holder() -> None:
    assert watched(taker(holder("b")), Seen(3, None), EXPIRY_S - 1) == "wait"
    assert watched(taker(holder("b")), Seen(3, None), EXPIRY_S) == "take"


def test_a_new_holder_is_watched_from_the_start() -> None:
    one = taker(holder("b"))
    assert watched(one, Seen(3, holder()), EXPIRY_S - 1) == "wait"
    assert one.saw(Seen(4, holder("c")), EXPIRY_S) == "wait"
    assert one.saw(Seen(4, holder("c")), EXPIRY_S + 1) == "wait"


def test_time_in_which_storage_did_not_answer_is_not_held_against_the_holder() -> None:
    one = taker(holder("b"))
    assert one.saw(Seen(3, holder()), 0.0) == "wait"
    assert one.saw(Seen(3, holder()), 1000.0) == "wait"


# --- two at once ---------------------------------------------------------------------------------


class Folder:
    """Implements ``lease.Store`` in memory, and remembers when each lease was written."""

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.written: dict[int, float] = {}
        self.now = 0.0

    def newest(self) -> Seen | None:
        if not self.leases:
            return None
        number = max(self.leases)
        return Seen(number, self.leases[number])

    def create(self, number: int, lease: Lease) -> bool:
        if number in self.leases:
            return False
        self.write(number, lease)
        return True

    def write(self, number: int, lease: Lease) -> None:
        self.leases[number] = lease
        self.written[number] = self.now


class Actor:
    """A job that claims, and then renews whenever it gets its turn."""

    def __init__(self, folder: Folder, name: str) -> None:
        self.folder = folder
        self.me = holder(name)
        self.number = 0
        self.refused = False
        self.over_silent_s: list[float] = []
        """For each lease taken over, how long it had been silent when last looked at."""
        self._looked: tuple[Seen | None, float] = (None, 0.0)
        self._steps = self._claim()

    def newest(self) -> Seen | None:
        seen = self.folder.newest()
        silent_s = self.folder.now - self.folder.written[seen.number] if seen else 0.0
        self._looked = (seen, silent_s)
        return seen

    def create(self, number: int, lease: Lease) -> bool:
        seen, silent_s = self._looked
        made = self.folder.create(number, lease)
        if made and seen is not None:
            self.over_silent_s.append(silent_s)
        return made

    def write(self, number: int, lease: Lease) -> None:
        self.folder.write(number, lease)

    def _claim(self) -> Generator[float, None, int]:
        return claiming(self, taker(self.me), self.me, lambda: self.folder.now, POLL_S)

    def turn(self) -> None:
        if self.refused:
            return
        if self.number:
            if not self.lost:
                self.me = msgspec.structs.replace(self.me, beat=self.me.beat + 1)
                self.write(self.number, self.me)
            return
        try:
            next(self._steps)
        except StopIteration as end:
            self.number = end.value
        except FolderInUse:
            self.refused = True

    @property
    def lost(self) -> bool:
        seen = self.folder.newest()
        return seen is not None and seen.number > self.number


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 0, 0, 1, 1, 1, 2]), st.sampled_from([0.0, 0.5, 1.0, 2.0, 70.0])
        ),
        max_size=400,
    )
)
def test_no_interleaving_takes_a_folder_from_a_holder_that_shows_life(
    schedule: list[tuple[int, float]],
) -> None:
    folder = Folder()
    folder.create(1, holder("old"))
    actors = [Actor(folder, "a"), Actor(folder, "b"), Actor(folder, "c")]
    for who, pause in schedule:
        folder.now += pause
        actors[who].turn()
        holding = [one for one in actors if one.number and not one.lost]
        assert len(holding) <= 1
        for one in actors:
            assert all(silent >= EXPIRY_S for silent in one.over_silent_s)
    numbers = [one.number for one in actors if one.number]
    assert len(numbers) == len(set(numbers))


def test_two_takers_of_a_dead_holder_end_with_one_holder_and_one_refusal() -> None:
    folder = Folder()
    folder.create(1, holder("old"))
    one, other = Actor(folder, "a"), Actor(folder, "b")
    for _ in range(400):
        folder.now += 0.5
        one.turn()
        other.turn()
    assert sorted([one.number, other.number]) == [0, 2]
    assert sorted([one.refused, other.refused]) == [False, True]


# --- files ---------------------------------------------------------------------------------------


def test_a_lease_is_created_once_and_rewritten_in_place(tmp_path: Path) -> None:
    files = LeaseFiles(tmp_path)
    assert files.newest() is None
    assert files.create(1, holder())
    assert not files.create(1, holder("b"))
    path = tmp_path / "leases" / "00000001.json"
    size = path.stat().st_size
    renewed = msgspec.structs.replace(holder(), beat=10**6, released=True)
    files.write(1, renewed)
    assert files.newest() == Seen(1, renewed)
    assert path.stat().st_size == size
    files.write(1, holder())
    assert files.newest() == Seen(1, holder())


def test_the_highest_number_counts_and_old_ones_are_removed(tmp_path: Path) -> None:
    files = LeaseFiles(tmp_path)
    for number in range(1, 31):
        assert files.create(number, holder(pid=number))
    newest = files.newest()
    assert newest is not None and newest.number == 30
    assert files.numbers() == list(range(22, 31))


@pytest.mark.parametrize("text", [b"", b"{", b'{"run": 3}', b"\0" * 1024])
def test_a_damaged_lease_is_seen_and_its_holder_is_not_known(tmp_path: Path, text: bytes) -> None:
    files = LeaseFiles(tmp_path)
    files.create(1, holder())
    (tmp_path / "leases" / "00000002.json").write_bytes(text)
    (tmp_path / "leases" / "x.json").write_bytes(b"{}")
    assert files.newest() == Seen(2, None)


def test_a_number_that_was_removed_long_ago_is_not_taken_for_the_newest(tmp_path: Path) -> None:
    files = LeaseFiles(tmp_path)
    files.create(1, msgspec.structs.replace(holder(), released=True))
    me = holder("b")
    steps = claiming(files, taker(me), me, lambda: 0.0)
    next(steps)  # it has seen lease 1, and now it sleeps for long
    for number in range(2, 30):
        files.create(number, holder("c"))
    with pytest.raises(FolderInUse, match="run run-c, process 7 on host-c"):
        for number in range(100):
            next(steps)
            if number == 5:
                files.write(29, msgspec.structs.replace(holder("c"), beat=1))


def test_a_commit_is_refused_after_the_folder_was_taken_over(tmp_path: Path) -> None:
    files = LeaseFiles(tmp_path)
    files.create(1, holder())
    lease.check(tmp_path, 1)
    files.create(2, holder("b"))
    lease.check(tmp_path, 2)
    lease.check(tmp_path, 0)
    with pytest.raises(SaveFailed, match=r"taken over by run run-b on host-b \(lease 2, ours is 1"):
        lease.check(tmp_path, 1)


def test_a_process_is_told_from_a_dead_one_and_from_those_of_other_machines() -> None:
    mine = lease.of_process("run", os.getpid(), 1000.0)
    assert lease.lives(mine) is True
    assert lease.lives(msgspec.structs.replace(mine, started=mine.started - 1)) is False
    assert lease.lives(msgspec.structs.replace(mine, boot="another")) is None
    assert lease.lives(msgspec.structs.replace(mine, pids="pid:[1]")) is None
    assert lease.lives(msgspec.structs.replace(mine, boot="")) is None
    child = subprocess.Popen(["sleep", "100"])
    theirs = lease.of_process("run", child.pid, 1000.0)
    assert lease.lives(theirs) is True
    child.kill()
    child.wait()
    assert lease.lives(theirs) is False


def test_the_error_names_run_process_host_and_age() -> None:
    text = str(lease.in_use(holder(), 1042.0))
    assert "run run-a, process 7 on host-a, for 42 s" in text
