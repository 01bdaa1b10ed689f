from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from keepstep.checkpoint import layout, manifest
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.shard_file import ShardPlan, TensorSpec
from tests.checkpoint import foreign_files
from tests.checkpoint.shards import flip, make_version, save, write
from tests.cli.checkpoint.commands import run_command as _run


def test_ls_shows_everything_newest_first_with_its_state(run: Path) -> None:
    result = _run("ls", run)
    assert result.exit_code == 0, result.output
    head, *lines = [line.split() for line in result.stdout.splitlines()]
    assert head == ["step", "state", "committed", "size", "world", "run", "term/round", "folder"]
    when = ["2023-11-14", "22:13:20", "UTC"]
    assert lines[0][:3] == ["15", "unfinished", "-"]
    assert lines[0][-4:] == ["2", "demo", "1/1", "step-00000015"]
    size = ["8.1", "KiB"]
    assert lines[1] == ["10", "good", *when, *size, "2", "demo", "1/10", "step-00000010"]
    assert lines[2] == ["5", "good", *when, *size, "2", "demo", "1/5", "step-00000005"]
    assert len(lines) == 3


def test_ls_takes_the_folder_of_checkpoints_too_and_prints_the_same(run: Path) -> None:
    assert _run("ls", run / "checkpoints").stdout == _run("ls", run).stdout


def test_ls_says_which_checkpoint_is_damaged_and_why(run: Path) -> None:
    (run / "checkpoints/step-00000010" / layout.shard_name(0)).unlink()
    result = _run("ls", run)
    assert result.exit_code == 0
    assert "10    damaged     -" in result.stdout
    assert (
        "step-00000010 is damaged and never used for a restore: rank-00000.safetensors is missing"
        in result.stdout
    )


def test_ls_as_json_has_the_same_and_the_reasons(run: Path) -> None:
    root = run / "checkpoints"
    (root / "step-00000010" / layout.shard_name(0)).unlink()
    _run("pin", run, "5", "--reason", "before\nthe merge")
    result = _run("ls", run, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["v"], found["root"]) == (1, str(root))
    unfinished, damaged, good = found["checkpoints"]
    assert [one["state"] for one in (unfinished, damaged, good)] == [
        "unfinished",
        "damaged",
        "good",
    ]
    assert damaged["problem"] == "rank-00000.safetensors is missing"
    assert (damaged["pinned"], damaged["created"], damaged["run"]) == (False, None, "demo")
    assert (good["step"], good["pinned"], good["reason"]) == (5, True, "before the merge")
    assert (good["world"], good["term"], good["round"]) == (2, 1, 5)
    assert (good["created"], good["folder"]) == (1_700_000_000.0, "step-00000005")
    assert good["bytes"] > 8192


@pytest.mark.parametrize("command", ["ls", "verify", "inspect"])
def test_a_bad_path_is_a_usage_error(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("x")
    for name, reason in (("none", "does not exist"), ("file", "is not a folder")):
        result = _run(command, tmp_path / name)
        assert result.exit_code == 64
        assert result.stdout == ""
        assert reason in result.stderr
        assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["ls", "verify", "inspect"])
def test_a_run_without_checkpoints_exits_with_65(tmp_path: Path, command: str) -> None:
    write(tmp_path / "checkpoints", make_version(), 0)
    result = _run(command, tmp_path)
    assert result.exit_code == 65
    assert "there is no committed checkpoint; 0 are damaged, 1 were never" in result.stderr


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_step_without_a_checkpoint_exits_with_65(run: Path, command: str) -> None:
    result = _run(command, run, "--step", "15")
    assert result.exit_code == 65
    assert "no committed checkpoint of step 15" in result.stderr


def test_inspect_shows_version_files_tensors_and_names_of_values(run: Path) -> None:
    result = _run("inspect", run)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0].startswith("step-00000010: step 10 of run demo, term 1, round 10, 2 ranks")
    assert any(line.startswith("rank-00001.safetensors 4.0 KiB ") for line in lines)
    assert "weight F32 [4, 3] 2" in lines
    assert "count I64 [] 1" in lines
    assert "rng U8 [5] 2" in lines
    assert lines[-2:] == ["values, same on all ranks: lr", "values by rank: seen"]
    assert _run("inspect", run, "--step", "5").stdout.startswith("step-00000005: step 5 ")


def test_inspect_as_json_has_the_whole_description(run: Path) -> None:
    result = _run("inspect", run, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["v"] == 1
    assert found["folder"] == "step-00000010"
    assert found["version"] == {"run": "demo", "term": 1, "round": 10, "step": 10, "world": 2}
    assert found["tensors"]["weight"]["global_shape"] == [4, 3]
    assert [chunk["offsets"] for chunk in found["tensors"]["weight"]["chunks"]] == [[0, 0], [2, 0]]
    assert found["values"] == {"shared": ["lr"], "by_rank": {"0": ["seen"], "1": ["seen"]}}
    assert found["bytes"] == sum(info["size"] for info in found["files"].values())


def test_inspect_of_a_damaged_checkpoint_tells_what_is_wrong(run: Path) -> None:
    (run / "checkpoints/step-00000010" / layout.shard_name(0)).unlink()
    result = _run("inspect", run, "--step", "10")
    assert result.exit_code == 65
    assert "rank-00000.safetensors is missing" in result.stderr


def test_files_of_other_libraries_are_shown_as_such(run: Path) -> None:
    root = run / "checkpoints"
    assert "files" not in _run("ls", run).stdout
    foreign_files.save(root, [{"w": torch.ones(3)}] * 2, make_version(20))
    foreign_files.save(root, [{"w": torch.ones(3)}] * 2, make_version(30, run="demo"), "dcp")
    lines = [line.split() for line in _run("ls", run).stdout.splitlines()]
    assert lines[0][-1] == "files"
    assert {line[0]: line[-1] for line in lines[1:] if line[1] == "good"} == {
        "30": "dcp",
        "20": "torch",
        "10": "safetensors",
        "5": "safetensors",
    }
    flip(root / "step-00000030/.metadata", 3)
    result = _run("verify", run)
    assert result.exit_code == 1
    assert "step-00000010: good\nstep-00000020: good (torch files)\n" in result.stdout
    assert "step-00000030: BAD (dcp files)\n  .metadata: checksum: " in result.stdout
    shown = _run("inspect", run).stdout
    assert "format 2, dcp files" in shown
    assert "\n.metadata " in shown
    found = json.loads(_run("inspect", run, "--json").stdout)
    assert found["layout"] == "dcp"
    assert list(found["others"]) == [".metadata"]


def test_a_checkpoint_of_a_newer_keepstep_is_told_clearly(tmp_path: Path) -> None:
    found, folder = save(tmp_path, make_version())
    newer = msgspec.structs.replace(found, format=manifest.FORMAT + 1)
    (tmp_path / folder / layout.MANIFEST).write_bytes(manifest.encode(newer))
    for command in ("ls", "inspect"):
        result = _run(command, tmp_path)
        assert result.exit_code == 65
        number = manifest.FORMAT
        assert f"format {number + 1}, and this keepstep reads formats up to {number}" in (
            result.stderr
        )


def test_long_names_are_not_cut_when_the_output_is_no_terminal(tmp_path: Path) -> None:
    name = "model." + "very_long_layer_name." * 12 + "weight"
    version = make_version(world=1)
    spec = TensorSpec(name=name, dtype="U8", shape=(1,), global_shape=(1,), offsets=(0,))
    plan = ShardPlan([spec], version, 0, {})
    _, folder = write(tmp_path, version, 0, plan.header + b"\0")
    commit(tmp_path, folder, version)
    assert name in _run("inspect", tmp_path).stdout
