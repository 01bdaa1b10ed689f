from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner, Result

from keepstep.checkpoint import catalog, layout, manifest
from keepstep.checkpoint.blocks import BLOCK_BYTES
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.shard_file import ShardPlan, TensorSpec
from keepstep.cli.checkpoint import app
from tests.checkpoint import foreign_files
from tests.checkpoint.shards import flip, image, make_version, save, write


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with the checkpoints 5 and 10, and 15 unfinished."""
    root = tmp_path / "checkpoints"
    for step in (5, 10):
        save(root, make_version(step, term=1, round=step))
    write(root, make_version(15), 0)
    return tmp_path


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


def test_verify_says_good_for_each_checkpoint(run: Path) -> None:
    result = _run("verify", run)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == ["step-00000005: good", "step-00000010: good"]


def test_verify_exits_with_1_and_names_the_damaged_file(run: Path) -> None:
    flip(run / "checkpoints/step-00000005" / layout.shard_name(1), 4100)
    result = _run("verify", run)
    assert result.exit_code == 1
    size = (run / "checkpoints/step-00000005" / layout.shard_name(1)).stat().st_size
    assert (
        "step-00000005: BAD\n  rank-00001.safetensors: checksum: 1 of its 1 blocks differ from "
        f"what was committed: bytes 0 to {size - 1}\n" in result.stdout
    )
    assert "step-00000010: good" in result.stdout
    assert _run("verify", run, "--step", "10").exit_code == 0
    assert _run("verify", run, "--step", "5", "--quick").exit_code == 0


def test_verify_finds_what_ls_no_longer_offers(run: Path) -> None:
    (run / "checkpoints/step-00000010" / layout.shard_name(0)).unlink()
    result = _run("verify", run, "--quick")
    assert result.exit_code == 1
    assert "rank-00000.safetensors: missing" in result.stdout


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


def _steps(run: Path) -> list[int]:
    return [info.step for info in catalog.committed(run / "checkpoints")]


def test_verify_lists_the_damaged_byte_ranges(tmp_path: Path) -> None:
    version = make_version(world=1)
    data = image(version, 0, pad=5 * BLOCK_BYTES)
    _, folder = write(tmp_path, version, 0, data)
    commit(tmp_path, folder, version)
    file = tmp_path / folder / layout.shard_name(0)
    for block in (0, 1, 3):
        flip(file, block * BLOCK_BYTES + 5)
    result = _run("verify", tmp_path)
    assert result.exit_code == 1
    first = f"bytes 0 to {2 * BLOCK_BYTES - 1}"
    second = f"bytes {3 * BLOCK_BYTES} to {4 * BLOCK_BYTES - 1}"
    assert f"\n    {first}\n    {second}\n" in result.stdout
    found = json.loads(_run("verify", tmp_path, "--json").stdout)
    (verdict,) = found["checkpoints"]
    assert not verdict["good"]
    assert verdict["problems"][0]["ranges"] == [
        [0, 2 * BLOCK_BYTES],
        [3 * BLOCK_BYTES, 4 * BLOCK_BYTES],
    ]


def test_a_pinned_checkpoint_stays_pinned_until_it_is_unpinned(run: Path) -> None:
    result = _run("pin", run, "5", "10", "--reason", "for the paper")
    assert result.exit_code == 0
    assert result.stdout == "step-00000005: pinned\nstep-00000010: pinned\n"
    assert _run("pin", run, "5").stdout == "step-00000005: was pinned already\n"
    shown = _run("ls", run).stdout
    assert "good, pinned" in shown
    assert "step-00000005 is pinned: for the paper" in shown
    assert _run("unpin", run, "step-00000005").stdout == "step-00000005: no longer pinned\n"
    assert _run("unpin", run, "5").stdout == "step-00000005: was not pinned\n"
    assert _run("verify", run).exit_code == 0


def test_rm_removes_what_is_named_and_says_how_much(run: Path) -> None:
    result = _run("rm", run, "5", "--yes")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("removed 1 checkpoint (10.")
    assert result.stdout.endswith("KiB): step-00000005\n")
    assert _steps(run) == [10]
    assert not (run / "checkpoints/step-00000005").exists()


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (["5", "10"], "step-00000010 is the last good checkpoint"),
        (["5"], "step-00000005 is pinned"),
        (["15"], "step-00000015 was never committed: a save may be in flight"),
    ],
)
def test_rm_refuses_what_may_be_needed_unless_forced(run: Path, steps: list[str], why: str) -> None:
    if len(steps) == 1:
        _run("pin", run, "5")
    result = _run("rm", run, *steps, "--yes")
    assert result.exit_code == 64
    assert why in result.stderr
    assert "Nothing was removed" in result.stderr
    assert _steps(run) == [10, 5]
    assert _run("rm", run, *steps, "--yes", "--force").exit_code == 0
    gone = {int(step) for step in steps}
    assert set(_steps(run)) == {5, 10} - gone
    assert {layout.parse_folder(name) for name in gone_folders(run, gone)} == set()


def gone_folders(run: Path, steps: set[int]) -> list[str]:
    """Folders of these steps that are still there."""
    names = layout.list_folders(run / "checkpoints")
    return [name for name in names if int(name[5:13]) in steps]


def test_a_damaged_newer_one_does_not_make_the_last_good_one_removable(run: Path) -> None:
    (run / "checkpoints/step-00000010" / layout.shard_name(0)).unlink()
    result = _run("rm", run, "5", "-y")
    assert result.exit_code == 64
    assert "step-00000005 is the last good checkpoint" in result.stderr
    assert _run("rm", run, "10", "-y").exit_code == 0


def test_rm_removes_nothing_without_an_answer(run: Path) -> None:
    result = _run("rm", run, "5")
    assert result.exit_code == 64
    assert "its input is no terminal. Nothing was changed. Give --yes." in result.stderr
    assert _steps(run) == [10, 5]


def test_a_step_with_two_folders_must_be_named_by_the_folder(run: Path) -> None:
    save(run / "checkpoints", make_version(10, round=11))
    result = _run("rm", run, "10", "-y")
    assert result.exit_code == 64
    assert "step 10 has 2 folders: step-00000010, step-00000010.t1r11" in result.stderr
    assert _run("rm", run, "step-00000010", "-y").exit_code == 0
    assert "step-00000010.t1r11" in _run("ls", run).stdout


@pytest.mark.parametrize("command", ["rm", "pin", "unpin"])
def test_a_step_that_is_not_there_is_told(run: Path, command: str) -> None:
    result = _run(command, run, "5", "77")
    assert result.exit_code == 65
    assert "there is no checkpoint of step 77" in result.stderr
    assert _steps(run) == [10, 5]
