from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from keepstep.checkpoint import layout, torch_reader
from tests.checkpoint import dcp_job, pickles
from tests.checkpoint.dcp_folders import dcp_save
from tests.checkpoint.shards import flip
from tests.checkpoint.torch_worlds import save
from tests.cli.checkpoint.commands import run_command


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run folder with one checkpoint of a model and its optimizer."""
    model, optimizer = dcp_job.build(0, dcp_job.plain)
    dcp_job.train(model, optimizer)
    save(tmp_path / "checkpoints", {"model": model, "optimizer": optimizer})
    return tmp_path


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_export_says_what_it_made(trained: Path, to: str) -> None:
    result = run_command("export", trained, trained / "out", "--to", to)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    what = "7 tensors (328 B)" if to == "safetensors" else "everything (992 B)"
    assert result.stdout == f"step-00000001: {what} written to {trained / 'out'}\n"
    assert (trained / "out").is_dir() == (to == "dcp")


def test_safetensors_can_be_stripped_of_prefixes_and_cut_into_files(trained: Path) -> None:
    options = ["--to", "safetensors", "--only", "model", "--strip-prefix"]
    result = run_command(
        "export", trained, trained / "out", *options, "--max-shard-gib", "0.0000001"
    )
    assert result.exit_code == 0, result.output
    assert "in 5 files" in result.stdout
    first = next((trained / "out").glob("model-00001-of-*.safetensors"))
    assert all(not name.startswith("model.") for name in load_file(first))


def test_a_damaged_checkpoint_is_not_exported(trained: Path) -> None:
    flip(trained / "checkpoints/step-00000001" / layout.shard_name(0), 4100)
    result = run_command("export", trained, trained / "out", "--to", "torch")
    assert result.exit_code == 65
    assert "step-00000001 is damaged: rank-00000.safetensors: 1 of its 1 blocks" in result.stderr
    assert "Nothing was written. Export another one, with --step." in result.stderr
    assert not (trained / "out").exists()


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        (["--to", "torch", "--strip-prefix"], 64, "do not go with --to torch"),
        (["--to", "safetensors", "--only", "optimizer"], 65, "no module optimizer"),
        (["--to", "dcp", "--only", "ema"], 65, "the checkpoint has no ema"),
        (["--to", "torch", "--step", "7"], 65, "no committed checkpoint of step 7"),
    ],
)
def test_what_cannot_be_exported_is_told(
    trained: Path, options: list[str], code: int, why: str
) -> None:
    result = run_command("export", trained, trained / "out", *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert why in result.stderr
    assert not (trained / "out").exists()


@pytest.mark.parametrize("to", ["torch", "safetensors", "dcp"])
def test_an_export_replaces_nothing(trained: Path, to: str) -> None:
    (trained / "out").write_text("mine")
    result = run_command("export", trained, trained / "out", "--to", to)
    assert result.exit_code == 64
    assert "out exists. Nothing was written, and it was not changed." in result.stderr
    assert (trained / "out").read_text() == "mine"


def test_an_import_is_a_checkpoint_of_the_run(trained: Path) -> None:
    model, optimizer = dcp_job.build(3, dcp_job.plain)
    dcp_job.train(model, optimizer)
    state = {**dcp_job.nested_state(model, optimizer), "odd": (1, {"a": torch.ones(2)})}
    folder = dcp_save(state, trained / "dcp")
    result = run_command("import", folder, trained / "new", "--step", "40")
    assert result.exit_code == 0, result.output
    root = trained / "new/checkpoints"
    assert result.stdout.splitlines() == [
        "imported: model (module), optimizer (optimizer)",
        f"{root / 'step-00000040'}: step 40 of run new, 992 B of tensors",
    ]
    assert ".metadata is a pickle: it is read as data, nothing in it is run" in result.stderr
    assert "not used: odd: odd[1]['a'] is of type torch.Tensor" in result.stderr
    assert run_command("verify", trained / "new").exit_code == 0
    fresh, fresh_optimizer = dcp_job.build(4, dcp_job.plain)
    tracked = {"model": fresh, "optimizer": fresh_optimizer}
    torch_reader.load(tracked, root, "step-00000040", rank=0, world=1, run="new")
    dcp_job.check_equal(dcp_job.whole(fresh, fresh_optimizer), dcp_job.whole(model, optimizer))
    again = run_command("import", folder, trained / "new", "--step", "41")
    assert again.exit_code == 64
    assert "has 1 checkpoints already" in again.stderr


def test_names_step_and_run_can_be_given(tmp_path: Path) -> None:
    folder = dcp_save({"net.w": torch.ones(2), "step": 12}, tmp_path / "dcp")
    options = ["--map", "net.=model.", "--run-id", "mine"]
    result = run_command("import", folder, tmp_path / "checkpoints", *options)
    assert result.exit_code == 0, result.output
    assert "step 12 of run mine" in result.stdout
    assert "model.w" in run_command("inspect", tmp_path).stdout
    assert run_command("import", folder, tmp_path / "x", "--map", "model").exit_code == 64


def test_a_hostile_folder_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(pickles.call("os.system", f"touch {mark}", 4))
    result = run_command("import", tmp_path / "dcp", tmp_path / "run")
    assert result.exit_code == 65
    assert "it names 'posix.system'" in result.stderr
    assert "Traceback" not in result.output
    assert not mark.exists()
    assert not (tmp_path / "run").exists()


def test_what_is_no_folder_of_dcp_is_a_usage_error(tmp_path: Path) -> None:
    result = run_command("import", tmp_path, tmp_path / "run")
    assert result.exit_code == 64
    assert "is no folder of torch.distributed.checkpoint: it has no .metadata" in result.stderr


def test_without_torch_it_says_what_to_install(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> object:
        if name == "torch":
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    result = run_command("export", trained, trained / "out", "--to", "torch")
    assert result.exit_code == 64
    assert "needs torch, which is not installed" in result.stderr
    assert run_command("export", trained, trained / "out", "--to", "safetensors").exit_code == 0
