"""A rank of the shard-writer suite, and its clauses as this rank's part of them.

Started by ``shard_writer.Ranks`` as ``python -m ...torch_ranks``; takes one ``Command`` a line from
its input and appends one ``Answer`` a line to a file. Every rank runs the same clause at the same
time; an ``AssertionError`` says what does not hold here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist

from keepstep import linux
from keepstep.checkpoint import catalog, layout, manifest
from keepstep.checkpoint.verify import verify
from keepstep.clock import SYSTEM
from keepstep.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    KeepstepError,
    SaveFailed,
)
from keepstep.ports import PendingWrite, ShardWriter
from keepstep.rank.checkpointer import Place, WriterFactory, native_writer
from keepstep.testing.conformance import torch_states
from keepstep.testing.conformance.processes import is_tracker, living, wait_until
from keepstep.testing.conformance.shard_writer import Answer, Command
from keepstep.wire.types import Version

GROUP_LIMIT_S = 80.0
SAVE_LIMIT_S = 30.0
"""How long a save may take to be committed or to fail."""
LOST_LIMIT_S = 3.0
"""How long to look whether a save that cannot be whole is committed all the same."""
EARLY_LIMIT_S = 3.0
"""How long the first rank's part may take; then the others begin in any case."""
GONE_S = 10.0
TRIES = 8
LARGE = 1 << 19
"""Elements of each tensor of a state whose writing takes a while (32 MiB in all)."""
_KEPT = 16


class Here:
    """This rank in one clause."""

    def __init__(self, rank: int, world: int, root: Path, factory: WriterFactory) -> None:
        self.rank, self.world, self.root = rank, world, root
        self._factory = factory
        self._writers: list[ShardWriter] = []
        self._before = set(_children())

    def writer(self, root: Path | None = None, factory: WriterFactory | None = None) -> ShardWriter:
        """A new writer of the engine (or of ``factory``); closed with the clause."""
        place = Place(root or self.root, self.rank, self.world, _KEPT, SYSTEM)
        made = (factory or self._factory)(place)
        self._writers.append(made)
        return made

    def version(self, step: int) -> Version:
        """The version of the clause's checkpoint ``step``."""
        return Version(run="conformance", term=1, round=1, step=step, world=self.world)

    def begin(self, writer: ShardWriter, state: Mapping[str, object], step: int) -> PendingWrite:
        """Begin to save ``state`` as checkpoint ``step``."""
        return writer.begin(state, self.version(step), self.root)

    def helpers(self) -> list[int]:
        """Processes that the engine has started in this clause and that live."""
        return living([pid for pid in _children() if pid not in self._before], 0.0)

    def every(self, value: bool) -> bool:
        """Whether ``value`` is true on every rank. Collective."""
        told = torch.tensor(int(value))
        dist.all_reduce(told, op=dist.ReduceOp.MIN)
        return bool(told.item())

    def barrier(self) -> None:
        """Go on when every rank is here. Collective."""
        self.every(True)

    def committed(self, root: Path | None = None) -> dict[int, str]:
        """Folder of each committed checkpoint, by step."""
        return {info.step: info.folder for info in catalog.committed(root or self.root)}

    def must_hold(self, step: int, root: Path | None = None) -> str:
        """The folder of checkpoint ``step``, which must be committed and verify. Collective."""
        self.barrier()
        root = root or self.root
        found = self.committed(root)
        assert step in found, f"step {step} is not committed, only {sorted(found)}"
        problems = verify(root, found[step])
        assert not problems, f"the checkpoint of step {step} does not verify: {problems}"
        return found[step]

    def must_save(self, writer: ShardWriter, state: Mapping[str, object], step: int) -> str:
        """Save and wait; returns the folder. Collective."""
        self.begin(writer, state, step).wait(SAVE_LIMIT_S)
        return self.must_hold(step)

    def must_equal(
        self,
        state: Mapping[str, object],
        wanted: Mapping[str, object],
        *,
        but_tensors: bool = False,
    ) -> None:
        """``state`` must have the bits ``wanted``; with ``but_tensors`` only what is no tensor."""
        wrong = torch_states.differing(torch_states.bits(state), wanted)
        if but_tensors:
            wrong = [name for name in wrong if isinstance(wanted.get(name), str)]
        assert not wrong, f"{len(wrong)} of {len(wanted)} values are others: {wrong[:8]}"

    def end(self) -> None:
        """Close what the clause has left open."""
        for writer in self._writers:
            with contextlib.suppress(KeepstepError):
                writer.close(abort=True)


def _children() -> list[int]:
    # Python's trackers are not the engine's; they end with the last process that uses them.
    pids = [child.pid for child in psutil.Process().children(recursive=True)]
    return [pid for pid in pids if not is_tracker(pid)]


# --- clauses --------------------------------------------------------------------------------------


def _values_at_the_call(here: Here) -> None:
    writer = here.writer()
    for step in (1, 2):  # the second save uses again what the first has made
        state = torch_states.plain(float(step))
        wanted = torch_states.bits(state)
        pending = here.begin(writer, state, step)
        torch_states.spoil(state)
        assert pending.staged(), "the state may not be changed after begin has returned"
        pending.wait(SAVE_LIMIT_S)
        assert pending.done(), "wait has returned and the save is not done"
        folder = here.must_hold(step)
        assert writer.load(state, here.root / folder) > 0, "load says that it read no bytes"
        here.must_equal(state, wanted)


def _bit_equal(here: Here) -> None:
    writer = here.writer()
    state = torch_states.every_kind(1)
    wanted = torch_states.bits(state)
    folder = here.must_save(writer, state, 1)
    fresh = torch_states.every_kind(2)
    places = {name: tensor.data_ptr() for name, tensor in torch_states.tensors("", fresh)}
    writer.load(fresh, here.root / folder)
    here.must_equal(fresh, wanted)
    kept = {name: tensor.data_ptr() for name, tensor in torch_states.tensors("", fresh)}
    moved = [name for name in places if name.startswith("/model") and kept[name] != places[name]]
    assert not moved, f"tensors were replaced, not filled in place: {moved}"


def _commit_verifies(here: Here) -> None:
    writer = here.writer()
    folder = here.must_save(writer, torch_states.plain(1.0, 1000), 7)
    found = manifest.decode((here.root / folder / layout.MANIFEST).read_bytes())
    assert found.version == here.version(7), f"the manifest is of {found.version}"
    ranks = sorted(info.rank for info in found.files.values())
    assert ranks == list(range(here.world)), f"the manifest has files of the ranks {ranks}"


def _not_offered_early(here: Here) -> None:
    writer = here.writer()
    state = torch_states.plain(1.0, 1000)
    pending = None
    if here.rank == 0:
        pending = here.begin(writer, state, 1)
        wait_until(lambda: _receipt(here, 1).exists(), EARLY_LIMIT_S)
    early = here.committed()
    here.barrier()
    assert not early, "a checkpoint is offered of which only rank 0 has begun to save its part"
    if pending is None:
        pending = here.begin(writer, state, 1)
    pending.wait(SAVE_LIMIT_S)
    here.must_hold(1)


def _saves_in_a_row(here: Here) -> None:
    writer = here.writer()
    state = torch_states.plain(0.0)
    wanted, saves = {}, []
    for step in (1, 2, 3, 4):
        for _, tensor in torch_states.tensors("", state):
            tensor.fill_(10.0 * step + here.rank)
        state["data"]["value"] = step
        wanted[step] = torch_states.bits(state)
        saves.append(here.begin(writer, state, step))
    torch_states.spoil(state)
    for pending in saves:
        pending.wait(SAVE_LIMIT_S)
    for step, bits in wanted.items():
        folder = here.must_hold(step)
        writer.load(state, here.root / folder)
        here.must_equal(state, bits)


def _refused_state(here: Here) -> None:
    writer = here.writer()
    try:
        here.begin(writer, {"thin": torch.ones(2).to_sparse()}, 1)
    except CheckpointError as error:
        assert "thin" in str(error), f"the error does not name what it is about: {error}"
    else:
        raise AssertionError("a sparse tensor was accepted")
    here.must_save(writer, torch_states.plain(1.0, 1000), 2)
    assert here.committed().keys() == {2}, f"committed are {sorted(here.committed())}"


def _dead_writer(here: Here) -> None:
    writer = here.writer()
    here.must_save(writer, torch_states.plain(1.0), 1)
    pending, killed, step = _strike(here, writer, 2, mine=True)
    _must_fail(pending, killed)
    here.barrier()
    assert step not in here.committed(), "a save whose writers were killed is committed"
    here.must_save(writer, torch_states.plain(2.0), step + 1)
    here.must_hold(1)


def _one_dead_writer(here: Here) -> None:
    writer = here.writer()
    here.must_save(writer, torch_states.plain(1.0), 1)
    last = here.world - 1
    pending, killed, step = _strike(here, writer, 2, mine=here.rank == last)
    if here.rank == last:
        _must_fail(pending, killed)
    else:
        try:
            pending.wait(LOST_LIMIT_S)
        except SaveFailed:
            pass
        else:
            raise AssertionError(f"a save was told to be done, although rank {last} has lost it")
    here.barrier()
    assert step not in here.committed(), f"a save that rank {last} has lost is committed"
    here.must_save(writer, torch_states.plain(2.0), step + 1)


def _strike(
    here: Here, writer: ShardWriter, step: int, *, mine: bool
) -> tuple[PendingWrite, list[int], int]:
    """Kill this rank's helpers (if ``mine``) while a save is in flight; returns it and its step."""
    state = torch_states.plain(5.0, LARGE)
    for attempt in range(step, step + TRIES):
        pending = here.begin(writer, state, attempt)
        helpers = here.helpers() if mine else []
        for pid in helpers:
            os.kill(pid, signal.SIGSTOP)
        caught = not mine or (bool(helpers) and not _receipt(here, attempt).exists())
        if here.every(caught):
            for pid in helpers:
                os.kill(pid, signal.SIGKILL)
            return pending, helpers, attempt
        for pid in helpers:
            os.kill(pid, signal.SIGCONT)
        pending.wait(SAVE_LIMIT_S)
    raise AssertionError(f"none of {TRIES} saves could be caught in flight in another process")


def _must_fail(pending: PendingWrite, killed: list[int]) -> None:
    try:
        pending.wait(SAVE_LIMIT_S)
    except SaveFailed as error:
        named = [pid for pid in killed if str(pid) in str(error)]
        assert named, f"the error names none of the killed processes {killed}: {error}"
    else:
        raise AssertionError(f"a save is told to be done whose processes {killed} were killed")


def _receipt(here: Here, step: int) -> Path:
    folder = next(layout.folder_names(here.version(step)))
    return here.root / folder / layout.receipt_name(here.rank)


def _abort_ends_processes(here: Here) -> None:
    writer = here.writer()
    here.must_save(writer, torch_states.plain(1.0), 1)
    here.begin(writer, torch_states.plain(2.0, LARGE), 2)
    helpers = here.helpers()
    writer.close(abort=True)
    left = living(helpers, GONE_S)
    assert not left, f"{len(left)} of {len(helpers)} processes live {GONE_S:g} s after the abort"
    here.must_hold(1)


def _close_waits(here: Here) -> None:
    writer = here.writer()
    here.begin(writer, torch_states.plain(1.0, LARGE), 1)
    helpers = here.helpers()
    writer.close()
    here.must_hold(1)
    left = living(helpers, GONE_S)
    assert not left, f"{len(left)} of {len(helpers)} processes live {GONE_S:g} s after close"
    writer.close()  # a second time does nothing


def _full_disk(here: Here) -> None:
    writer = here.writer()
    small = torch_states.plain(1.0, 1000)
    here.must_save(writer, small, 1)
    try:
        here.begin(writer, torch_states.plain(2.0, LARGE), 2).wait(SAVE_LIMIT_S)
    except SaveFailed as error:
        assert "No space left" in str(error), f"the error does not say that it is full: {error}"
    else:
        raise AssertionError("a save larger than the file system is told to be done")
    here.barrier()
    assert here.committed().keys() == {1}, f"committed are {sorted(here.committed())}"
    here.must_save(writer, small, 3)
    here.must_hold(1)


def _loads_native(here: Here) -> None:
    _from_to(here, here.writer(factory=native_writer), here.writer())


def _native_loads(here: Here) -> None:
    _from_to(here, here.writer(), here.writer(factory=native_writer))


def _from_to(here: Here, source: ShardWriter, target: ShardWriter) -> None:
    state = torch_states.every_kind(3)
    wanted = torch_states.bits(state)
    folder = here.must_save(source, state, 1)
    fresh = torch_states.every_kind(4)
    target.load(fresh, here.root / folder)
    here.must_equal(fresh, wanted)


def _damage_is_found(here: Here) -> None:
    writer = here.writer()
    folder = here.root / here.must_save(writer, torch_states.plain(1.0), 1)
    found = manifest.decode((folder / layout.MANIFEST).read_bytes())
    here.barrier()  # every rank has seen that it was good
    [mine] = [name for name, info in found.files.items() if info.rank == here.rank]
    with (folder / mine).open("r+b") as file:
        file.seek(found.files[mine].size // 2)
        old = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old[0] ^ 1]))
    here.barrier()
    _must_refuse(here, writer, folder, torch_states.plain(2.0), CheckpointCorrupt, filled=True)


def _other_model(here: Here) -> None:
    writer = here.writer()
    folder = here.root / here.must_save(writer, torch_states.plain(1.0, 1000), 1)
    other = torch_states.plain(2.0, 1000)
    other["t0"] = torch.zeros(999)
    _must_refuse(here, writer, folder, other, CheckpointMismatch)
    del other["t0"]
    _must_refuse(here, writer, folder, other, CheckpointMismatch)


def _must_refuse(
    here: Here,
    writer: ShardWriter,
    folder: Path,
    state: dict[str, Any],
    kind: type[CheckpointError],
    *,
    filled: bool = False,
) -> None:
    """``filled``: tensors may be filled in part, as by a reader that verifies on the way."""
    before = torch_states.bits(state)
    try:
        writer.load(state, folder)
    except kind:
        here.must_equal(state, before, but_tensors=filled)
    else:
        raise AssertionError(f"it was loaded; expected was {kind.__name__}")


def _ends_with_its_rank(here: Here) -> None:
    """The suite kills this rank then."""
    writer = here.writer()
    here.must_save(writer, torch_states.plain(1.0), 1)
    here.begin(writer, torch_states.plain(2.0, LARGE), 2)


CHECKS: dict[str, Callable[[Here], None]] = {
    "values-at-the-call": _values_at_the_call,
    "bit-equal": _bit_equal,
    "commit-verifies": _commit_verifies,
    "not-offered-early": _not_offered_early,
    "saves-in-a-row": _saves_in_a_row,
    "refused-state": _refused_state,
    "dead-writer": _dead_writer,
    "one-dead-writer": _one_dead_writer,
    "abort-ends-processes": _abort_ends_processes,
    "close-waits": _close_waits,
    "full-disk": _full_disk,
    "loads-native": _loads_native,
    "native-loads": _native_loads,
    "damage-is-found": _damage_is_found,
    "other-model": _other_model,
    "ends-with-its-rank": _ends_with_its_rank,
}


# --- the process ----------------------------------------------------------------------------------


def _answer(command: Command, rank: int, world: int, factory: WriterFactory) -> Answer:
    here = Here(rank, world, Path(command.root), factory)
    error = ""
    try:
        CHECKS[command.clause](here)
    except AssertionError as broken:
        error = str(broken) or "an assertion without words"
    except Exception as raised:  # noqa: BLE001 - told to the suite, which ends this rank
        error = f"{type(raised).__name__}: {raised}"
    pids = here.helpers()
    if not error and command.clause != "ends-with-its-rank":
        here.end()
    return Answer(clause=command.clause, error=error, pids=pids)


def main() -> None:
    """Serve the suite until it closes the input."""
    parser = argparse.ArgumentParser()
    for name in ("--rank", "--world"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--writer", "--store", "--answers"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    linux.die_with_parent(os.getppid())
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    module, _, name = options.writer.partition(":")
    factory: WriterFactory = getattr(importlib.import_module(module), name)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.store}",
        rank=options.rank,
        world_size=options.world,
        timeout=timedelta(seconds=GROUP_LIMIT_S),
    )
    with Path(options.answers).open("ab", buffering=0) as answers:
        answers.write(msgspec.json.encode(Answer(clause="")) + b"\n")
        for line in sys.stdin.buffer:
            command = msgspec.json.decode(line, type=Command)
            found = _answer(command, options.rank, options.world, factory)
            answers.write(msgspec.json.encode(found) + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main()
