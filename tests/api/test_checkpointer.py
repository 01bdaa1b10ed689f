"""``Checkpointer`` in one process, and with FSDP2 over two and three."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import keepstep
from keepstep import memory
from keepstep.api.checkpointer import Checkpointer
from keepstep.checkpoint import catalog, layout
from keepstep.checkpoint.torch_rng import RngState
from keepstep.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotWritable,
    NotEnoughMemory,
    SaveFailed,
    UsageError,
)
from tests.api import fsdp_job

JOB_LIMIT_S = 100.0
WRITER = "keepstep.checkpoint.writer_process"


class Training:
    """A small model with everything that has state."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.progress = {"seen": 0}

    def state(self) -> dict[str, object]:
        return {
            "random": RngState(),
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "progress": self.progress,
        }

    def run(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.model(torch.randn(5, 4)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.progress["seen"] += 5
            losses.append(loss.item())
        return losses


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def shard(root: Path, folder: str) -> Path:
    return root / folder / layout.shard_name(0)


def test_a_restored_training_goes_on_bit_by_bit(tmp_path: Path) -> None:
    training = Training(0)
    training.run(3)
    with keepstep.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(training.state()) == 0
        assert checkpointer.latest() == 0
        checkpointer.async_save(training.state(), 3)
        expected = training.run(4)  # at once: what is saved is the state at the call
        checkpointer.finalize()
        assert checkpointer.latest() == 3
        assert checkpointer.restore(training.state()) == 3  # over newer state
        assert training.run(4) == expected
    other = Training(1)  # a new process
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(other.state()) == 3
    assert other.run(4) == expected
    assert other.progress == {"seen": 35}


def test_a_flipped_byte_is_reported_and_the_older_step_taken(tmp_path: Path) -> None:
    data = {"step": 0, "t": torch.zeros(3)}
    with Checkpointer(tmp_path, when_busy="wait") as checkpointer:
        for step in (1, 2, 3):
            data["step"] = step
            checkpointer.async_save({"data": data}, step)
        checkpointer.finalize()
        flip(shard(tmp_path, "step-00000003"))
        flip(tmp_path / "step-00000002" / layout.MANIFEST, 100)
        with pytest.warns(RuntimeWarning) as caught:
            assert checkpointer.restore({"data": data}) == 1
        assert data["step"] == 1
        text = [str(one.message) for one in caught]
        assert len(text) == 2
        assert "step-00000003" in text[0] and "rank-00000.safetensors" in text[0]
        assert "expected" in text[0] and "found" in text[0]
        assert "step-00000002" in text[1]
        # The same steps again are other versions beside the damaged ones.
        checkpointer.async_save({"data": data}, 3)
        checkpointer.finalize()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing newer is damaged
            assert checkpointer.restore({"data": data}) == 3
    assert layout.list_folders(tmp_path)[-1].startswith("step-00000003.t1r")


def test_only_damaged_checkpoints_are_an_error_and_no_start_from_nothing(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.async_save({"t": tensor}, 1)
        checkpointer.finalize()
        flip(shard(tmp_path, "step-00000001"))
        tensor.zero_()
        with (
            pytest.warns(RuntimeWarning),
            pytest.raises(CheckpointCorrupt, match="all 1 checkpoints are damaged"),
        ):
            checkpointer.restore({"t": tensor})
        assert not tensor.any()


def test_another_run_and_another_model_are_refused_by_name(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, run_id="first") as checkpointer:
        checkpointer.async_save({"model": nn.Linear(2, 2)}, 1)
    with Checkpointer(tmp_path, run_id="second") as checkpointer:
        assert checkpointer.latest() == 0
        with pytest.raises(CheckpointMismatch, match="of run 'first', this is run 'second'"):
            checkpointer.restore({"model": nn.Linear(2, 2)})
    with Checkpointer(tmp_path, run_id="first") as checkpointer:
        with pytest.raises(CheckpointMismatch, match=r"model\.bias"):
            checkpointer.restore({"model": nn.Linear(2, 2, bias=False)})
        with pytest.raises(CheckpointMismatch, match=r"1 missing \(net\), 1 unexpected \(model\)"):
            checkpointer.restore({"net": nn.Linear(2, 2)})
        assert checkpointer.restore({"model": nn.Linear(2, 2)}) == 1


def _writers() -> list[int]:
    """Writer processes of this process."""
    children = psutil.Process().children()
    module = "keepstep.checkpoint.writer_process"
    return [child.pid for child in children if module in child.cmdline()]


def test_a_failed_save_raises_at_the_next_call_and_saving_goes_on_after_it(tmp_path: Path) -> None:
    state = {"t": torch.ones(2)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.async_save(state, 1)
        checkpointer.finalize()
        (pid,) = _writers()
        os.kill(pid, signal.SIGSTOP)  # so that the next save is in flight for sure
        pending = checkpointer.async_save(state, 2)
        assert pending.staged() and not pending.done()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SaveFailed, match="ended by signal 9"):
            pending.wait(JOB_LIMIT_S)
        with pytest.raises(SaveFailed, match=rf"{pid} was ended by signal 9 before step 2"):
            checkpointer.async_save(state, 3)
        checkpointer.async_save(state, 3)
        checkpointer.finalize()
        assert checkpointer.latest() == 3


def test_a_later_process_never_writes_into_an_unfinished_folder_of_an_earlier_one(
    tmp_path: Path,
) -> None:
    state = {"t": torch.ones(2)}
    for _ in range(2):
        with Checkpointer(tmp_path, keep_last=9) as checkpointer:
            checkpointer.async_save(state, 1)
        first = tmp_path / "step-00000001" / layout.MANIFEST
        first.unlink(missing_ok=True)  # as if it had not been committed
    # The newer commit has overtaken the unfinished folder, which is gone.
    assert layout.list_folders(tmp_path) == ["step-00000001.t2r1"]


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep_last=2, when_busy="wait") as checkpointer:
        for step in range(1, 6):
            checkpointer.async_save({"t": torch.ones(1)}, step)
    assert layout.list_folders(tmp_path) == ["step-00000004", "step-00000005"]


def test_wrong_use_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep_last is 0"):
        Checkpointer(tmp_path, keep_last=0)
    with pytest.raises(UsageError, match="no engine 'fast'"):
        Checkpointer(tmp_path, engine="fast")  # type: ignore[arg-type]
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(UsageError, match="step -1"):
        checkpointer.async_save({}, -1)
    with pytest.raises(CheckpointError, match="number cannot be kept: a int"):
        checkpointer.async_save({"number": 3}, 1)
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(UsageError, match="closed"):
        checkpointer.async_save({"t": torch.ones(1)}, 1)
    file = tmp_path / "file"
    file.write_text("")
    with (
        Checkpointer(file) as other,
        pytest.raises(CheckpointNotWritable, match="cannot be written"),
    ):
        other.async_save({"t": torch.ones(1)}, 1)


def test_the_scripts_own_error_is_the_one_that_is_seen(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as checkpointer:
        checkpointer.async_save({"t": torch.ones(1)}, 1)
        raise ZeroDivisionError
    assert Checkpointer(tmp_path).latest() == 1


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    def open_now() -> tuple[int, int, int]:
        process = psutil.Process()
        return process.num_fds(), len(threading.enumerate()), len(process.children())

    before = open_now()
    for _ in range(3):
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.async_save({"t": torch.ones(1)}, 1)
            checkpointer.restore({"t": torch.zeros(1)})
    assert open_now() == before


def run_job(world: int, root: Path) -> None:
    """Run ``fsdp_job`` in ``world`` processes until all have ended."""
    rendezvous = root.parent / f"rendezvous-{world}"
    processes = []
    for rank in range(world):
        environment = {
            **os.environ,
            **{"RANK": str(rank), "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"},
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(["src", ".", *filter(None, sys.path)]),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.api.fsdp_job", str(root), str(rendezvous)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs, codes = [], []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=JOB_LIMIT_S)[0])
            codes.append(process.returncode)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
    assert codes == [0] * world, "\n".join(outputs)


@pytest.mark.process
@pytest.mark.slow
def test_fsdp_saved_by_two_ranks_loads_in_three_and_in_one(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    run_job(2, root)
    run_job(3, root)
    expected = torch.load(root.parent / fsdp_job.EXPECTED, weights_only=True)
    model, optimizer = fsdp_job.build(seed=9, shard=_nothing)
    tracked = fsdp_job.tracked(model, optimizer)
    with (
        Checkpointer(root, run_id="job") as checkpointer,
        pytest.warns(RuntimeWarning, match="step-00000005 cannot be used"),
    ):
        assert checkpointer.restore(tracked) == fsdp_job.SAVED
    found = fsdp_job.whole(model, optimizer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _nothing(module: nn.Module) -> None:
    """One process needs no shards."""


# --- saves that storage holds up ------------------------------------------------------------------


def writers() -> list[int]:
    """Writer processes of this process."""
    children = psutil.Process().children()
    return [one.pid for one in children if WRITER in one.cmdline()]


@contextlib.contextmanager
def stopped_writer() -> Iterator[int]:
    """The writer of this process stands still, so that saves are in flight for sure."""
    (pid,) = writers()
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_save_while_all_slots_are_in_use_is_skipped_and_finalize_does_not_mind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"t": torch.ones(2)}
    with Checkpointer(tmp_path, keep_last=9) as checkpointer:
        checkpointer.async_save(state, 1)
        checkpointer.finalize()
        with stopped_writer():
            saves = [checkpointer.async_save(state, step) for step in (2, 3, 4)]
            assert [save.skipped for save in saves] == [False, False, True]
            assert saves[2].done() and saves[2].staged()
            saves[2].wait(0.0)
            assert "2 saves are still being written, the oldest (step 2)" in saves[2].reason
        checkpointer.finalize()
        assert not checkpointer.async_save(state, 5).skipped
    found = [info.step for info in catalog.committed(tmp_path)]
    assert found == [5, 3, 2, 1]
    err = capsys.readouterr().err
    assert err.count("checkpoint of step 4 was skipped: 2 saves") == 1


def test_a_save_that_one_rank_could_not_begin_is_told_to_all_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"t": torch.ones(2)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.async_save(state, 1)
        checkpointer.finalize()
        with monkeypatch.context() as patch:
            patch.setattr(memory, "room", lambda: memory.Room(0, 1 << 20, "the machine's memory"))
            with pytest.raises(NotEnoughMemory):  # the state has grown
                checkpointer.async_save({"t": torch.ones(1 << 20)}, 2)
        with pytest.raises(SaveFailed, match="save of step 2 could not be begun"):
            checkpointer.async_save(state, 3)
        checkpointer.async_save(state, 3)
    assert catalog.committed(tmp_path)[0].step == 3


def test_a_save_may_wait_instead(tmp_path: Path) -> None:
    state = {"t": torch.ones(2)}
    with Checkpointer(tmp_path, keep_last=9, when_busy="wait") as checkpointer:
        for step in range(1, 5):
            assert not checkpointer.async_save(state, step).skipped
        checkpointer.async_save(state, 5, when_busy="skip")
        checkpointer.async_save(state, 6, when_busy="wait")
    assert catalog.committed(tmp_path)[0].step == 6


def test_memory_is_made_ahead_and_stated_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"t": torch.ones(1 << 20)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.prepare(state)
        checkpointer.prepare(state)
        checkpointer.async_save(state, 1)
    lines = [line for line in capsys.readouterr().err.splitlines() if "staging of saves" in line]
    assert len(lines) == 1
    assert "2 x 4.5 MB, 1 rank" in lines[0]


def test_without_memory_for_a_copy_the_error_says_so_before_anything_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = memory.Room(1 << 20, 1 << 30, "the memory cgroup /sys/fs/cgroup/job")
    monkeypatch.setattr(memory, "room", lambda: small)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(NotEnoughMemory, match=r"4\.5 MB .* 1\.0 MB are available.*/job"):
            checkpointer.async_save({"t": torch.ones(1 << 20)}, 1)
        assert writers() == [], "not even a writer was started"
        monkeypatch.undo()
        checkpointer.async_save({"t": torch.ones(1 << 20)}, 1)
    assert catalog.committed(tmp_path)[0].step == 1


def test_with_memory_for_one_copy_the_second_save_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight = memory.Room(8 << 20, 8 << 20, "the machine's memory")
    monkeypatch.setattr(memory, "room", lambda: tight)
    state = {"t": torch.ones(1 << 20)}
    with Checkpointer(tmp_path, keep_last=9) as checkpointer:
        checkpointer.async_save(state, 1)
        checkpointer.finalize()
        with stopped_writer():
            assert not checkpointer.async_save(state, 2).skipped
            assert checkpointer.async_save(state, 3).skipped


@pytest.mark.process
@pytest.mark.parametrize("failed", [False, True])
def test_a_script_that_forgets_close_is_told_what_became_of_its_last_save(
    tmp_path: Path, failed: bool
) -> None:
    script = """
    import os, pathlib, signal, sys, psutil, torch, keepstep
    root, failed = pathlib.Path(sys.argv[1]), sys.argv[2] == "True"
    checkpointer = keepstep.Checkpointer(root)
    checkpointer.async_save({"t": torch.ones(2)}, 1).wait(60)
    children = psutil.Process().children()
    (writer,) = [one for one in children if "keepstep.checkpoint.writer_process" in one.cmdline()]
    writer.suspend()
    save = checkpointer.async_save({"t": torch.ones(2)}, 2)
    if failed:
        writer.kill()
        while not save.done():
            pass
    print(writer.pid)
    """
    root, out, err = tmp_path / "saved", tmp_path / "out", tmp_path / "err"
    with out.open("w") as stdout, err.open("w") as stderr:  # the writer holds them longer
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), str(root), str(failed)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", *filter(None, sys.path)])},
            stdout=stdout,
            stderr=stderr,
            timeout=JOB_LIMIT_S,
        )
    assert done.returncode == 0, "Python offers no way to change it at this point"
    if failed:
        assert "before step 2 was committed" in err.read_text()
        assert "The exit code does not show it" in err.read_text()
        return
    assert "the script ends while the save of step 2 goes on" in err.read_text()
    writer = psutil.Process(int(out.read_text().split()[-1]))
    writer.resume()
    writer.wait(JOB_LIMIT_S)
    assert catalog.committed(root)[0].step == 2, "it is finished all the same"
