from __future__ import annotations

import pytest

from keepstep.coordinator.members import Member, Members


def three() -> Members:
    members = Members(3)
    for rank in range(3):
        members.put(rank, Member(inc=rank, pid=100 + rank, state="starting"))
    return members


def test_at_first_no_rank_has_a_process() -> None:
    members = Members(2)
    assert members.all_are("absent")
    assert members.find(0, 0) is None
    assert members.seqs() == {}


def test_a_member_is_found_by_its_present_incarnation_only() -> None:
    members = three()
    assert members.find(1, 1) is members[1]
    assert members.find(1, 0) is None
    members.put(1, Member(inc=2))
    assert members.find(1, 1) is None


@pytest.mark.parametrize("rank", [-1, -3, 3, 99])
def test_ranks_outside_of_the_world_are_not_found(rank: int) -> None:
    members = three()
    assert all(members.find(rank, inc) is None for inc in range(-2, 4))


def test_states_are_asked_for_all_or_listed_by_rank() -> None:
    members = three()
    members[2].state = "joined"
    assert members.those("starting") == [0, 1]
    assert members.those("joined", "starting") == [0, 1, 2]
    assert members.those("gone") == []
    assert members.all_are("starting", "joined")
    assert not members.all_are("starting")


def test_process_ids_and_sequence_numbers_by_rank() -> None:
    members = three()
    members[1].seqs = {"0": 4}
    members[2].seqs = {}
    assert members.pids() == {"0": 100, "1": 101, "2": 102}
    assert members.seqs() == {1: {"0": 4}}
    assert [(rank, member.inc) for rank, member in members] == [(0, 0), (1, 1), (2, 2)]
