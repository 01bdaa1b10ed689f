"""A copy beside training and those who wait for it: hooks, the next save, a load, the end."""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from keepstep.errors import RestartSignal, SaveFailed
from keepstep.rank.shard_writer import NativeShardWriter
from tests.checkpoint.torch_worlds import version
from tests.rank.copies import (
    LIMIT_S,
    Gate,
    KeepingStaging,
    adam,
    begin,
    in_thread,
    plain,
    same,
    trained,
    values_of,
    writer_of,
)


def test_mutates_waits_for_the_copy_and_for_nothing_else(
    gate: Gate, staging: KeepingStaging, made: list[NativeShardWriter]
) -> None:
    state = trained(plain(), adam())
    writer = writer_of(staging, made)
    writer.mutates()
    expected = copy.deepcopy(values_of(state))
    pending = begin(writer, state)
    gate.open_on("wait_staged")
    writer.mutates()
    with torch.no_grad():
        state["model"][0].weight.zero_()
    pending.wait(LIMIT_S)
    assert not gate.passed_shut
    assert same(staging.saved(), expected)


def test_the_next_save_and_a_load_first_see_the_copy_through(
    gate: Gate, staging: KeepingStaging, made: list[NativeShardWriter], tmp_path: Path
) -> None:
    state = trained(plain(), adam())
    writer = writer_of(staging, made)
    begin(writer, state, version(1))
    gate.open_on("settle")
    begin(writer, state, version(2))
    with pytest.raises(Exception, match="none"):
        writer.load(state, tmp_path / "none")
    assert [of.step for of, _, _ in staging.submitted] == [1, 2]
    assert {thread for _, _, thread in staging.submitted} == {"keepstep-copy"}
    assert not gate.passed_shut


def test_close_hands_a_copy_in_progress_on_and_abort_drops_it(
    monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    state = trained(plain(), adam())
    gate.open_on("settle")
    for abort in (False, True):
        gate.opened.clear()
        staging = KeepingStaging()
        writer = NativeShardWriter(staging, rank=0, world=1, copy="overlap")
        pending = begin(writer, state)
        writer.close(abort=abort)
        assert staging.closed
        assert bool(staging.submitted) == (not abort)
        assert staging.free
        if abort:
            with pytest.raises(SaveFailed, match="step 1 was called off"):
                pending.wait(0.0)
    assert not gate.passed_shut


def test_a_save_that_failed_elsewhere_is_not_copied_to_the_end(
    gate: Gate, staging: KeepingStaging, made: list[NativeShardWriter]
) -> None:
    writer = writer_of(staging, made)
    pending = begin(writer, trained(plain(), adam()))
    assert pending.writing
    assert gate.reached.wait(LIMIT_S)
    pending.failed(SaveFailed("rank 3 has no room"))
    gate.opened.set()
    with pytest.raises(SaveFailed, match="rank 3 has no room"):
        pending.wait(LIMIT_S)
    assert (pending.writing, pending.done(), staging.submitted) == (False, True, [])


def test_a_copy_that_breaks_and_a_slot_that_is_refused_fail_the_save(
    staging: KeepingStaging, made: list[NativeShardWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(staging, made)
    state = trained(plain(), adam())
    staging.refuse = RuntimeError("the writer is gone")
    with pytest.raises(SaveFailed, match="copy of step 1 failed: RuntimeError: the writer is gone"):
        begin(writer, state).wait(LIMIT_S)
    assert staging.free
    staging.refuse = None
    begin(writer, state, version(2)).wait(LIMIT_S)
    assert len(staging.submitted) == 1


def test_a_wait_that_is_too_short_says_so(
    gate: Gate, staging: KeepingStaging, made: list[NativeShardWriter]
) -> None:
    pending = begin(writer_of(staging, made), trained(plain(), adam()))
    with pytest.raises(SaveFailed, match="step 1 is not copied after 0 s"):
        pending.wait(0.0)
    assert not pending.done()
    gate.opened.set()
    pending.wait(LIMIT_S)


def test_users_own_hooks_run_after_the_copy(
    gate: Gate, staging: KeepingStaging, made: list[NativeShardWriter]
) -> None:
    state = trained(plain(), adam())
    optimizer, weight = state["optimizer"], state["model"][0].weight
    expected = copy.deepcopy(values_of(state))

    def clamp(*_: object) -> None:
        weight.data.zero_()

    optimizer.register_step_pre_hook(clamp)
    pending = begin(writer_of(staging, made), state)
    handle = register_optimizer_step_pre_hook(clamp)
    gate.open_on("wait_staged")
    try:
        optimizer.step()
    finally:
        handle.remove()
    pending.wait(LIMIT_S)
    assert same(staging.saved(), expected)


def test_a_closed_writer_leaves_no_hook(staging: KeepingStaging) -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = len(hooks)
    writer = NativeShardWriter(staging, rank=0, world=1, copy="overlap")
    begin(writer, trained(plain(), adam())).wait(LIMIT_S)
    assert len(hooks) == before + 1
    writer.close()
    assert len(hooks) == before


def test_a_forked_child_waits_for_no_copy(
    gate: Gate, staging: KeepingStaging, made: list[NativeShardWriter]
) -> None:
    state = trained(plain(), adam())
    pending = begin(writer_of(staging, made), state)
    assert gate.reached.wait(LIMIT_S)
    parent = os.getpid()

    def leave(*_: object) -> None:
        if os.getpid() != parent:
            os._exit(7)  # torch itself cannot compute in a forked child

    state["optimizer"].register_step_pre_hook(leave)
    child = os.fork()
    if not child:
        state["optimizer"].step()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    gate.opened.set()
    pending.wait(LIMIT_S)


@pytest.mark.parametrize("after_start", [False, True])
def test_a_restart_in_the_middle_of_the_call_leaves_nobody_waiting(
    after_start: bool,
    staging: KeepingStaging,
    made: list[NativeShardWriter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = trained(plain(), adam())
    writer = writer_of(staging, made)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if after_start:
            start(thread)
        raise RestartSignal

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(RestartSignal):
            begin(writer, state)
    if after_start:
        state["optimizer"].step()
    writer.mutates()
    writer.settle()
    assert staging.free
    assert len(staging.submitted) <= after_start
    begin(writer, state, version(2)).wait(LIMIT_S)
    assert staging.submitted[-1][0] == version(2)


def test_two_threads_may_wait_for_one_copy(
    gate: Gate, staging: KeepingStaging, made: list[NativeShardWriter]
) -> None:
    writer = writer_of(staging, made)
    pending = begin(writer, trained(plain(), adam()))
    with in_thread("first", writer.mutates), in_thread("second", pending.wait_staged):
        gate.opened.set()
    pending.wait(LIMIT_S)
